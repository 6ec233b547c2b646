"""Options of `rolecall sft`."""

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
from rolecall.config.plan import steps_plan


@dataclass(frozen=True, kw_only=True)
class SFTOptions(RewardProcessOptions, RunOptions):
    """Supervised fine-tuning on demonstrations."""

    command: ClassVar[str] = "sft"
    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROWS
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    rows: str = "addition"
    """Demonstrations: rows with prompt and completion, or with messages; or a built-in task."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    steps: int = 100
    """Optimiser steps."""
    epochs: float | None = None
    """Passes over the training rows, in place of steps."""
    batch: int = 32
    """Rows per step."""
    max_length: int = 1024
    """Longer rows are left out, and counted."""
    train_stop: bool = True
    """Train the choice to stop, not only the content."""
    max_new_tokens: int = 64
    """Longest answer when evaluating."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-5, warmup_steps=10, schedule="cosine"))
    engine: EngineOptions = field(default_factory=EngineOptions)
    eval: HeldOutOptions = field(default_factory=HeldOutOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    """Seeds the data order."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch must be at least 1, got {self.steps} and {self.batch}")


def plan(options: SFTOptions) -> str:
    """The batch plan that `--dry-run` prints."""
    return steps_plan(
        options.steps,
        options.epochs,
        options.batch,
        "rows",
        max_length=options.max_length,
        token_budget=options.optim.token_budget,
        model=options.model,
    )
