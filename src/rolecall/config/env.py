"""The options of `rolecall env`: none."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Versions and hardware, to paste into a bug report."""
