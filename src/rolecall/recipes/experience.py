"""What an RL step produces, and who looks at it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rolecall.experience.batches import Joined
from rolecall.experience.replay import StoredGroup
from rolecall.recipes.algorithms import Algorithm
from rolecall.recipes.collect import Collected
from rolecall.train.step import StepResult, trained
from rolecall.types import Batch, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What is replayed in a step, on this rank."""

    groups: Sequence[StoredGroup]
    wanted: int
    """How many were asked for."""
    held: int
    """Groups in the buffer."""
    version: int
    """The weights that the update starts from."""
    batch: Batch | None
    """Their answers, in order; None if there are none. When they are only observed, log-probs now are `old_logprobs`."""
    joined: Batch | None
    """The fresh rows and these, to train on; None if there are none or they are only observed."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """Their answers, in the order of the batch."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, row) of each answer in the rollouts files."""
        return [(group.step, place) for group in self.groups for place in group.places]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout(Collected):
    """One step's experience: what was sampled, what it scored, and the batch made of it."""

    step: int
    joined: Joined
    """Which trajectories are one sequence."""
    batch: Batch
    kl: Tensor | None
    """[batch, time] KL to the reference at eligible positions, if there is a reference."""
    kl_coef: float
    """The KL controller's coefficient when the rewards were made."""
    algorithm: Algorithm
    replay: Replayed | None = None
    """What is replayed beside it; None without replay."""

    @property
    def sequences(self) -> Batch:
        """The batch with a row for each sequence."""
        return self.joined.batch(self.batch)

    @property
    def training(self) -> Batch:
        """The rows that are trained on: the fresh ones, then the replayed ones."""
        return self.batch if self.replay is None or self.replay.joined is None else self.replay.joined

    @property
    def trained_trajectories(self) -> list[Trajectory]:
        """The trajectories of `training`."""
        more = self.replay.trajectories if self.replay is not None and self.replay.joined is not None else []
        return [*self.trajectories, *more]

    @property
    def trained_places(self) -> list[tuple[int, int]]:
        """(step, row) in the rollouts files of each row of `training`."""
        more = self.replay.places if self.replay is not None and self.replay.joined is not None else []
        return [*((self.step + 1, row) for row in range(len(self.trajectories))), *more]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniStep:
    """One optimiser step of an update, for metrics and records."""

    epoch: int
    minibatch: int
    rows: Tensor
    batch: Batch
    result: StepResult


class Watch(Protocol):
    """Looks at every stage of a step: tripwires and records are watches.

    If it also has `metrics() -> dict[str, float]`, called after `updated`, those numbers are logged with the step.
    """

    def rolled_out(self, rollout: Rollout) -> None:
        """Called when a rollout is ready, before it is trained on."""
        ...

    def updated(self, rollout: Rollout, steps: Sequence[MiniStep]) -> None:
        """Called after the last optimiser step of a rollout, when the engine has the new weights."""
        ...


def with_advantages(batch: Batch, joined: Joined, made: Tensor | tuple[Tensor, Tensor]) -> Batch:
    """The batch with what an algorithm made of its sequences: advantages and, with a critic, returns.

    One advantage per sequence is spread over its trained positions.
    """
    advantages, returns = made if isinstance(made, tuple) else (made, None)
    width = batch.ids.shape[1]
    advantages = joined.split(advantages.to(torch.get_default_dtype()), width)
    if advantages.dim() == 1:
        advantages = torch.where(trained(batch), advantages[:, None], 0)
    return dataclasses.replace(
        batch, advantages=advantages, returns=None if returns is None else joined.split(returns, width)
    )


def or_nan(scores: Sequence[float | None]) -> Tensor:
    """[batch] float64; NaN for what is None."""
    return torch.tensor([float("nan") if score is None else score for score in scores], dtype=torch.float64)
