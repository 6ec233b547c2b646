"""The options of `rolecall conformance`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions:
    """Run the conformance cases against a library's own functions: masks, aggregation, returns, advantages, KL, losses.

    The exit code is 1 if something differs.
    """

    adapter: str = field(metadata={"bare": True})
    """A Python file with functions of the library (docs/conformance.md says which), or one that ships: rolecall, trl,
    verl, openrlhf."""
    json: bool = False
    """Print every case as JSON instead of a table."""
