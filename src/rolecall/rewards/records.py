"""What a reward gets and gives."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

from rolecall.errors import UserError

logger = logging.getLogger("rolecall.rewards")

Messages = Sequence[Mapping[str, Any]]

_NAMED_FAILURES = 5
"""So many failures per call are named one by one in the log; the rest are counted."""


class RewardError(UserError):
    """A reward that cannot be used at all: not found, wrong signature, a column it asks for is not there."""


class WrongCount(RewardError):
    """A reward function returned another number of rewards than it was given answers."""

    def __init__(self, *, name: str, expected: int, got: int) -> None:
        self.name, self.expected, self.got = name, expected, got
        super().__init__(
            f"reward `{name}` returned {got} rewards for {expected} answers; it must return one per answer, in order, "
            f"with None where it does not apply"
        )


class NoSuchState(RewardError, AttributeError):
    """A reward function reads a field of `trainer_state` that is not there; `hasattr` and `getattr` see the latter."""


class TrainerState(SimpleNamespace):
    """What a reward function sees as `trainer_state`: the fields of transformers' that a run here knows."""

    def __init__(self, state: Mapping[str, Any], *, reward: str) -> None:
        super().__init__(**state)
        self._reward = reward

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        there = ", ".join(sorted(field for field in vars(self) if not field.startswith("_")))
        raise NoSuchState(f"reward `{self._reward}` asks for trainer_state.{name}, which is not there; it has {there}")


def trainer_state(
    *, step: int = 0, steps: int = 0, taken: int = 0, rows: int = 0, per_step: int = 0, rank: int = 0
) -> dict[str, Any]:
    """The state after `step` of `steps` steps in which `taken` rows were answered, of `rows` that there are.

    A step is a rollout, also where it takes several optimiser steps. Without arguments: nothing is being trained.
    """
    return {
        "global_step": step,
        "max_steps": steps,
        "epoch": taken / rows if rows else 0.0,
        "num_train_epochs": math.ceil(steps * per_step / rows) if rows else 0,
        "is_local_process_zero": int(os.environ.get("LOCAL_RANK", rank)) == 0,
        "is_world_process_zero": rank == 0,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One answer to be scored."""

    prompt: str | Messages
    """As the row has it: text, or messages."""
    completion: str | Messages
    """Text, or messages if the prompt is messages."""
    completion_ids: Sequence[int] = ()
    """The sampled tokens."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row the prompt came from."""
    prompt_index: int = 0
    """Which prompt of the step this answers."""
    sample_index: int = 0
    """Which of the prompt's answers this is."""
    environment: Any = None
    """The environment the answer was made in, for functions that ask for `environments`. The reward sees a copy."""

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"prompt {self.prompt_index} sample {self.sample_index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What the rewards say about one answer."""

    scores: Mapping[str, float | None]
    """By reward function. None: not applicable, or failed (then `failure` says so). Neither is 0."""
    total: float | None
    """The weighted sum of the scores that are there; None if there are none or if any function failed."""
    failure: str | None = None
    """Which function failed on which sample and why; None if all went well."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What functions logged for this sample (`log_extra`, or the other entries of verl's dict)."""

    def __post_init__(self) -> None:
        if self.failure is not None and self.total is not None:
            raise ValueError(f"a sample whose reward failed has no total, got {self.total}: {self.failure}")


def why_unscored(scored: Sequence[Scored], place: Callable[[int], str]) -> str | None:
    """Why none of these answers has a score; None if any has one. `place(i)` names the row that answer i is to."""
    if any(s.total is not None for s in scored):
        return None
    for i, one in enumerate(scored):
        if one.failure is not None:
            return f"{one.failure} ({place(i)})"
    names = " and ".join(f"`{name}`" for name in scored[0].scores)
    return f"the reward {names} gave None for every answer, the first one to {place(0)}"


def report_failures(name: str, scored: Sequence[Scored]) -> int:
    """Name the first failures of a reward in the log; how many there are."""
    failures = [s.failure for s in scored if s.failure is not None]
    for failure in failures[:_NAMED_FAILURES]:
        logger.warning("%s", failure)
    if len(failures) > _NAMED_FAILURES:
        logger.warning("reward `%s` failed on %d more samples", name, len(failures) - _NAMED_FAILURES)
    return len(failures)


class Reward(Protocol):
    """What the training loop calls: reward functions in workers, a reward model, a judge, or several of these."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of every score, in order."""
        ...

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """One result per sample, in order. `state` is what functions see as `trainer_state`."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What has been logged and counted since the last call."""
        ...
