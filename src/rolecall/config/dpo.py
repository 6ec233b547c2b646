"""Options of `rolecall dpo`."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from rolecall.config.foreign import Foreign
from rolecall.config.foreign_trl import TRL_ROWS
from rolecall.config.parts import (
    ChatOptions,
    EngineOptions,
    HeldOutOptions,
    OptimOptions,
    PolicyOptions,
    RewardProcessOptions,
    RunOptions,
    SaveOptions,
)
from rolecall.config.plan import length_line


@dataclass(frozen=True, kw_only=True)
class DPOOptions(RewardProcessOptions, RunOptions):
    """A policy from preferences, without a reward model and without sampling."""

    command: ClassVar[str] = "dpo"
    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROWS
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory. As it is at the
    start it is also the reference."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    rows: str = "addition"
    """Preferences: rows with prompt, chosen and rejected; or a built-in task."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    steps: int = 100
    """Optimiser steps."""
    epochs: float | None = None
    """Passes over the training rows, in place of steps."""
    batch: int = 32
    """Pairs per step."""
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """The share of pairs that are taken to be labelled the wrong way round."""
    max_length: int = 1024
    """Pairs with a longer side (prompt and answer, in tokens) are left out, and counted; nothing is cut."""
    train_stop: bool = True
    """Count the choice to stop among an answer's log-probs, not only its content."""
    max_new_tokens: int = 64
    """Longest answer when evaluating on a task."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=1e-6, warmup_steps=10, schedule="linear"))
    engine: EngineOptions = field(default_factory=EngineOptions)
    eval: HeldOutOptions = field(default_factory=HeldOutOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    """Seeds the data order, and the pairs of a built-in task."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.steps < 1 or self.batch < 1 or self.max_length < 1:
            raise ValueError(
                f"steps, batch and max_length must be at least 1, got {self.steps}, {self.batch}, {self.max_length}"
            )
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta must be above 0, got {self.beta}: at 0 nothing is learned")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: at half, pairs say nothing"
            )


def plan(options: DPOOptions) -> str:
    """What `--dry-run` says."""
    return (
        f"one step: {options.batch} pairs = {2 * options.batch} answers of up to {options.max_length} tokens, each scored "
        f"by the policy and by the reference\n{length_line(options.steps, options.epochs, options.batch, 'pairs')}"
    )
