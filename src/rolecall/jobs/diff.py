"""`rolecall diff`: where runs part."""

from collections.abc import Sequence
from pathlib import Path

from rolecall.look.diff import Comparison, compare


def diff(*runs: str | Path, against: Sequence[str | Path] = ()) -> Comparison:
    """Compare runs by their files: `diff("runs/rl-1", "runs/rl-2").pairs[0].followed.parting`."""
    one, two = ([Path(run).expanduser() for run in side] for side in (runs, against))
    return compare(one, two)
