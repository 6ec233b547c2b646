"""Options of `rolecall rm`."""

from dataclasses import dataclass, field
from typing import ClassVar

from rolecall.config.foreign import Foreign
from rolecall.config.foreign_trl import TRL_ROWS
from rolecall.config.parts import ChatOptions, HeldOutOptions, OptimOptions, PolicyOptions, RunOptions, SaveOptions
from rolecall.config.plan import steps_plan


@dataclass(frozen=True, kw_only=True)
class RMOptions(RunOptions):
    """A reward model from preferences."""

    command: ClassVar[str] = "rm"
    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROWS
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    model: str = "tiny"
    """What it starts as: a language model, which gets a fresh head (`tiny`, a model directory, a .gguf file, a hub id),
    or the directory of a reward model, which trains on."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    rows: str = "addition"
    """Preferences: rows with chosen and rejected, with or without a prompt; or a built-in task. A column `margin` says
    by how much chosen should win."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    steps: int = 100
    """Optimiser steps."""
    epochs: float | None = None
    """Passes over the training rows, in place of steps."""
    batch: int = 32
    """Pairs per step."""
    max_length: int = 1024
    """Pairs with a longer side (prompt and answer, in tokens) are left out, and counted; nothing is cut."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-5, warmup_steps=10, schedule="cosine"))
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
        if self.eval.reward:
            raise ValueError("a reward model is evaluated on held-out pairs: leave out eval.reward")
        if self.policy.lora_rank is not None:
            raise ValueError("a reward model trains all its weights: leave out policy.lora_rank")


def plan(options: RMOptions) -> str:
    """The batch plan that `--dry-run` prints."""
    return steps_plan(
        options.steps,
        options.epochs,
        options.batch,
        "pairs",
        max_length=options.max_length,
        token_budget=options.optim.token_budget,
        model=options.model,
    )
