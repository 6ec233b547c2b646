"""What the doctor says of a run."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Sure = Literal["certain", "likely", "possible"]
"""certain: the numbers say so by themselves. likely: so it is nearly always. possible: look at it."""
Evidence = tuple[tuple[int, int, int | None], ...]
"""Where it can be seen: step, the trajectory's row in that step's rollouts file, and a token of it or None for all."""


class Seen(NamedTuple):
    """What a check says of a run in which it finds something."""

    sure: Sure
    steps: tuple[int, int]
    """The first and the last training step that it was seen in."""
    sentence: str
    """What is wrong, with its numbers."""
    setting: str
    """The one setting to try first, as flags of the command line."""
    evidence: Evidence = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that looks wrong, and what shows it: what a check says, its name, and what its setting did."""

    kind: str
    """Which check, as docs/doctor.md calls it: letters and dashes."""
    sure: Sure
    steps: tuple[int, int]
    sentence: str
    evidence: Evidence
    setting: str
    did: str
    """What that setting did in our own run with this fault."""
