"""What an RL step produces, and who looks at it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rolecall.recipes.algorithms import Algorithm
from rolecall.rewards.records import Scored
from rolecall.train.step import StepResult
from rolecall.types import Batch, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One step's experience: what was sampled, what it scored, and the batch made of it."""

    step: int
    trajectories: Sequence[Trajectory]
    prompts: Sequence[str]
    """The prompt of each trajectory as text."""
    answers: Sequence[str]
    """The answer of each trajectory as text, without its stop token."""
    scored: Sequence[Scored]
    batch: Batch
    kl: Tensor | None
    """[batch, time] KL to the reference at eligible positions, if there is a reference."""
    kl_coef: float
    """The KL controller's coefficient when the rewards were made."""
    rows: Sequence[int]
    """The row of the data that each trajectory answers."""
    seed: int
    """What the answers were sampled with, together with step, prompt and sample."""
    algorithm: Algorithm


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
