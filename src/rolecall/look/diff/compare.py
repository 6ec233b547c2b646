"""Runs compared from their files: what they were told, where they part, and how far apart their seeds end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.look.compare import groups_of
from rolecall.look.diff.parting import Followed, follow
from rolecall.look.diff.seeds import SidesDifference, sides_differ
from rolecall.look.run import RunFiles, flat, read_several


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """Something that two runs were told differently, or were made with."""

    name: str
    """A setting by its dotted name, or a version or fact of run.json."""
    values: tuple[Any, Any]
    """None where a run does not have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairDifference:
    """Two runs side by side."""

    runs: tuple[str, str]
    settings: tuple[Changed, ...]
    versions: tuple[Changed, ...]
    """Versions, threads, processes."""
    followed: Followed
    cause: str
    """What may have made them part, as far as settings and versions tell; empty if they are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that `rolecall diff` says."""

    command: str
    pairs: tuple[PairDifference, ...]
    """The first run against each other one; of sides with several seeds, one run of each."""
    sides: tuple[SidesDifference, ...]
    """Where there are several seeds on each side."""

    @property
    def same(self) -> bool:
        """True if no pair parts."""
        return all(pair.followed.parting is None for pair in self.pairs)


def compare(runs: Sequence[Path], against: Sequence[Path] = ()) -> Comparison:
    """Compare the first run with each other one, or `runs` with `against`; seeds of equal settings make a side."""
    if len(runs) + len(against) < 2:
        raise UserError("there is nothing to compare with: give two runs or more, such as runs/rl-1 runs/rl-2")
    if against and not runs:
        raise UserError("--against needs runs on the other side: rolecall diff A1 A2 --against B1 B2")
    read = read_several([*runs, *against])
    commands = {run.command: run.path for run in read}
    if len(commands) > 1:
        (one, first), (two, second) = list(commands.items())[:2]
        raise UserError(f"{first} is a run of {one} and {second} one of {two}; give runs of one command")
    sides = [read[: len(runs)], read[len(runs) :]] if against else _by_settings(read)
    if not against and all(len(side) < 2 for side in sides):
        sides = [[run] for run in read]
    if len(sides) == 1:
        pairs = [(sides[0][0], run) for run in sides[0][1:]]
    else:
        pairs = [_counterparts(sides[0], side) for side in sides[1:]]
    several = [side for side in sides[1:] if len(side) > 1 and len(sides[0]) > 1]
    return Comparison(
        command=read[0].command,
        pairs=tuple(_pair(*pair) for pair in pairs),
        sides=tuple(sides_differ(sides[0], side) for side in several),
    )


def _by_settings(runs: Sequence[RunFiles]) -> list[list[RunFiles]]:
    groups = groups_of({str(run.path): run for run in runs})
    return [[run for _, run in group.runs] for group in groups]


def _counterparts(one: Sequence[RunFiles], two: Sequence[RunFiles]) -> tuple[RunFiles, RunFiles]:
    """The first runs of two sides that have the same seed, or the first of each."""
    same = ((a, b) for a in one for b in two if a.about.get("seed") == b.about.get("seed"))
    return next(same, (one[0], two[0]))


def _pair(a: RunFiles, b: RunFiles) -> PairDifference:
    settings = tuple(_changed(dict(flat(a.config)), dict(flat(b.config))))
    versions = tuple(_changed(_made_with(a), _made_with(b)))
    followed = follow(a, b)
    return PairDifference(
        runs=(str(a.path), str(b.path)),
        settings=settings,
        versions=versions,
        followed=followed,
        cause="" if followed.parting is None else _cause(settings, versions),
    )


def _cause(settings: Sequence[Changed], versions: Sequence[Changed]) -> str:
    names = [changed.name for changed in settings]
    made = [changed.name for changed in versions]
    if not names and not made:
        return (
            "all settings, versions and threads are the same: look for what is not a setting (a file, a reward's code)"
        )
    if len(names) == 1 and not made:
        return f"{names[0]} is the only setting that differs, and versions and threads are the same"
    if not made:
        return f"{len(names)} settings differ, and versions and threads are the same"
    if not names:
        return f"all settings are the same; {', '.join(made)} {'differs' if len(made) == 1 else 'differ'}"
    return f"{len(names)} setting{'s' * (len(names) > 1)} and {', '.join(made)} differ"


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Changed]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield Changed(name=name, values=(a.get(name), b.get(name)))


def _made_with(run: RunFiles) -> dict[str, Any]:
    """Versions and what else of the machine changes the last bits of a number."""
    versions = run.about.get("versions")
    facts = {name: run.about.get(name) for name in ("python", "threads", "processes")}
    return {**(versions if isinstance(versions, dict) else {}), **facts}
