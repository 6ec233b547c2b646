"""The rollouts that a run left on disk, as data: found, checked once, read step by step."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolecall.experience.parquet import StoreError
from rolecall.experience.store import Rollouts, read_rollouts
from rolecall.maths.roles import Role
from rolecall.types import Trajectory

_FILE = re.compile(r"step-([0-9]{6,})\.parquet")


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


class RolloutStore:
    """`runs/x/rollouts/`, or another directory of such files. They are only read."""

    def __init__(self, place: Path) -> None:
        """`place` is a run's directory or the directory of files itself."""
        folder = place / "rollouts" if (place / "rollouts").is_dir() else place
        if not folder.is_dir():
            raise StoreError(f"{place} is not a run: there is no such directory; give a run's directory")
        found = {int(m.group(1)): path for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))}
        if not found:
            raise StoreError(f"{folder} holds no rollouts (step-000001.parquet …); give a run that recorded some")
        self.place, self.files = folder, [found[step] for step in sorted(found)]

    @property
    def names(self) -> list[str]:
        """The files' names, in the order of their steps."""
        return [path.name for path in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Rollouts:
        """One step's rollouts."""
        return read_rollouts(self.files[index])

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
