"""What the doctor says of a run."""

from dataclasses import dataclass
from typing import Literal

Sure = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that looks wrong, and what shows it."""

    kind: str
    """Which check, as docs/doctor.md calls it: letters and dashes."""
    sure: Sure
    """certain: the numbers say so by themselves. likely: so it is nearly always. possible: look at it."""
    steps: tuple[int, int]
    """The first and the last training step that it was seen in."""
    sentence: str
    """What is wrong, with its numbers."""
    evidence: tuple[tuple[int, int, int | None], ...] = ()
    """Where it can be seen: step, the trajectory's row in that step's rollouts file, and a token of it or None for all."""
    setting: str
    """The one setting to try first, as flags of the command line."""
    did: str
    """What that setting did in our own run with this fault."""
