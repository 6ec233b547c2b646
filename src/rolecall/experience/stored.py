"""The rollouts that a run left on disk, as data: found, checked once, read step by step."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rolecall.experience.parquet import StoreError, merged_facts, read_table
from rolecall.experience.places import Place, is_address
from rolecall.experience.store import ROLLOUTS, Rollouts, read_rollouts
from rolecall.maths.roles import Role
from rolecall.types import Trajectory

_FILE = re.compile(r"step-([0-9]{6,})\.parquet")
_MERGED = re.compile(r"steps-([0-9]{6,})-([0-9]{6,})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFacts:
    """What a store holds, from reading all of it."""

    steps: int
    """Files."""
    answers: int
    """Trajectories."""
    tokens: int
    """Tokens that a policy sampled."""
    unknown: int
    """Of these, how many have no finite log-prob."""
    unscored: int
    """Trajectories without a score."""
    unrecorded: int
    """Trajectories that were drawn from a part of the vocabulary, without a record of which."""
    models: tuple[str, ...]
    """Fingerprints of the weights that sampled, in order, each once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFile:
    """Where one step's rollouts are: a file, or a part of one that holds several steps."""

    step: int
    file: str
    """The name of the file it is in."""
    where: str
    """In words, for messages."""
    source: Callable[[], Any]
    """Gives its path, or its bytes."""
    group: int | None = None
    """Its number in a file of several steps."""

    def __str__(self) -> str:
        return self.where

    @property
    def name(self) -> str:
        """`step-000012.parquet`, also in a file of several steps."""
        return f"step-{self.step:06d}.parquet"

    def read(self) -> Rollouts:
        """The rollouts."""
        return read_rollouts(self.where, source=self._opened(), group=self.group)

    def table(self) -> tuple[pa.Table, dict[str, str]]:
        """The same as a table, and the facts that were written with it."""
        return read_table(self.where, ROLLOUTS, source=self._opened(), group=self.group)

    def _opened(self) -> Any:
        held = self.source()
        return pa.BufferReader(held) if isinstance(held, bytes) else held


def step_files(folder: Path | Place, names: Sequence[str] | None = None) -> list[StepFile]:
    """The steps in a folder's files, or in those that are named, in order. One that is in a file of several and also in its own
    is taken from the former."""
    if names is None:
        names = [path.name for path in folder.iterdir()] if isinstance(folder, Path) else folder.names()
    found: dict[int, StepFile] = {}
    # A file at an address is fetched as a whole; steps that are in the same one are read one after another.
    source: Callable[[str], Any] = folder.joinpath if isinstance(folder, Path) else lru_cache(1)(folder.read)
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            step = int(match.group(1))
            found[step] = StepFile(step=step, file=name, where=f"{folder}/{name}", source=partial(source, name))
    for name in filter(_MERGED.fullmatch, sorted(names)):
        for group, facts in enumerate(_facts(folder, name)):
            step = int(facts["step"])
            where = f"{folder}/{name}, step {step}"
            found[step] = StepFile(step=step, file=name, where=where, source=partial(source, name), group=group)
    return [found[step] for step in sorted(found)]


def steps_in(name: str) -> tuple[int, int] | None:
    """The first and the last step that a file's name says; None if it holds no rollouts."""
    if match := _FILE.fullmatch(name):
        return int(match.group(1)), int(match.group(1))
    match = _MERGED.fullmatch(name)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


def _facts(folder: Path | Place, name: str) -> list[dict[str, str]]:
    try:
        return merged_facts(folder / name if isinstance(folder, Path) else folder.open(name))
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise StoreError(f"{folder}/{name} is not a whole file of several steps; bring back a copy") from error


class RolloutStore:
    """`runs/x/rollouts/`, another directory of such files, or an address of either. They are only read."""

    def __init__(self, place: Path | str) -> None:
        """`place` is a run's directory or the directory of files itself."""
        folder: Path | Place
        if isinstance(place, str) and is_address(place):
            folder = Place(place)
            folder = folder / "rollouts" if "rollouts" in folder.names() else folder
        else:
            place = Path(place).expanduser()
            folder = place / "rollouts" if (place / "rollouts").is_dir() else place
            if not folder.is_dir():
                raise StoreError(f"{place} is not a run: there is no such directory; give a run's directory")
        self.place, self.files = folder, step_files(folder)
        if not self.files:
            raise StoreError(f"{folder} holds no rollouts (step-000001.parquet …); give a run that recorded some")

    @property
    def names(self) -> list[str]:
        """The files' names, in the order of their steps."""
        return [file.name for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Rollouts:
        """One step's rollouts."""
        return self.files[index].read()

    def __iter__(self) -> Iterator[Rollouts]:
        return (self.read(index) for index in range(len(self)))

    def check(self, *, tokenizer: str, vocabulary: int, temperature: float, context: int) -> StoreFacts:
        """Read everything once and refuse what cannot be trained on, before anything else is done."""
        answers = tokens = unknown = unscored = unrecorded = 0
        models: dict[str, None] = {}
        for path, rollouts in zip(self.files, self, strict=True):
            if rollouts.tokenizer != tokenizer:
                raise StoreError(
                    f"{path} was written with another tokenizer ({rollouts.tokenizer[:12] or 'unknown'}, the model's is "
                    f"{tokenizer[:12]}), so its ids mean other tokens; train the model that the run trained"
                )
            for row, (trajectory, details) in enumerate(zip(rollouts.trajectories, rollouts.details, strict=True)):
                where = f"{path}, row {row}"
                if not 0 <= min(trajectory.ids) <= max(trajectory.ids) < vocabulary:
                    raise StoreError(
                        f"{where}: an id lies outside the model's vocabulary of {vocabulary}; use another model"
                    )
                if len(trajectory.ids) > context:
                    raise StoreError(
                        f"{where}: {len(trajectory.ids)} tokens do not fit the model's context of {context}; use another model"
                    )
                sampled = details.sampling
                if sampled is not None and sampled.scoring_temperature != temperature:
                    raise StoreError(
                        f"{where} was sampled at temperature {sampled.scoring_temperature:g}, but log-probs would be "
                        f"computed at {temperature:g}; set sampling.temperature {sampled.scoring_temperature:g}"
                    )
                unrecorded += trajectory.supports is None and sampled is not None and sampled.cuts_support
                if _outside(trajectory, vocabulary):
                    raise StoreError(
                        f"{where}: a token is not among those it could be drawn from; bring back a copy of the file"
                    )
            chosen = (rollouts.batch.roles == Role.CONTENT) | (rollouts.batch.roles == Role.STOP)
            held = rollouts.batch.behaviour_logprobs
            tokens += int(chosen.sum())
            unknown += int(chosen.sum() if held is None else (chosen & ~held.isfinite()).sum())
            unscored += sum(details.total is None for details in rollouts.details)
            answers += len(rollouts.trajectories)
            models[rollouts.model] = None
        if tokens and unknown == tokens:
            raise StoreError(
                f"no token in {self.place} has a finite behaviour log-prob, so there is nothing to take a ratio to; "
                "record them when sampling"
            )
        if unscored == answers:
            raise StoreError(f"no answer in {self.place} has a score; apply a reward with `rolecall rescore`")
        return StoreFacts(
            steps=len(self),
            answers=answers,
            tokens=tokens,
            unknown=unknown,
            unscored=unscored,
            unrecorded=unrecorded,
            models=tuple(models),
        )


def _outside(trajectory: Trajectory, vocabulary: int) -> bool:
    """True if a token's support does not hold it, or holds what the vocabulary does not."""
    for token, support in zip(trajectory.ids, trajectory.supports or (), strict=False):
        ids = np.frombuffer(support, np.int32)
        if len(ids) and (token not in ids or not 0 <= ids.min() <= ids.max() < vocabulary):
            return True
    return False
