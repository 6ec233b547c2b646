"""Options of the commands that train on rows as they are (sft, rm, dpo) or on chosen answers (expert-iteration), and of
best-of-n, which only chooses."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rolecall.config.foreign import Foreign
from rolecall.config.foreign_trl import TRL_ROUNDS, TRL_ROWS
from rolecall.config.memory import memory_line
from rolecall.config.parts import (
    AnsweringOptions,
    ChatOptions,
    EngineOptions,
    LoadOptions,
    OptimOptions,
    RunOptions,
    SaveOptions,
    TrainingOptions,
)
from rolecall.config.plan import logits_line, passes_line, ranks_line
from rolecall.config.rewards import RewardProcessOptions


@dataclass(frozen=True, kw_only=True)
class RowTrainingOptions(TrainingOptions):
    """One optimiser step per batch of rows."""

    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROWS
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    unit: ClassVar[str] = "pairs"
    """What a batch consists of."""
    steps: int = 100
    """Optimiser steps."""
    epochs: float | None = None
    """Passes over the training rows, in place of steps."""
    batch: int = 32
    """Pairs per step."""
    max_length: int = 1024
    """Pairs with a longer side (prompt and answer, in tokens) are left out, and counted; nothing is cut."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-5, warmup_steps=10, schedule="cosine"))
    seed: int = 0
    """Seeds the data order, and the pairs of a built-in task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "batch", "max_length")
        self._shared_out("batch")

    def plan(self) -> str:
        """What `--dry-run` says of a step."""
        return "\n".join(
            [
                f"one step: {self.batch} {self.unit} of up to {self.max_length} tokens, one optimiser step, in micro-batches "
                f"of up to {self.optim.token_budget:,} tokens",
                ranks_line(self.batch, self.unit),
                logits_line(self.model, self.optim.token_budget),
                memory_line(self),
                self._length(),
            ]
        )

    def _length(self) -> str:
        if self.epochs is not None:
            return passes_line(self.epochs, self.batch)
        return f"in all: {self.steps:,} steps, {self.steps * self.batch:,} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class AnswerTrainingOptions(RewardProcessOptions, RowTrainingOptions):
    """Training on rows, of a policy whose own answers are looked at in evaluations."""

    train_stop: bool = True
    """Train the choice to stop, not only the content."""
    max_new_tokens: int = 64
    """Longest answer when evaluating."""
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, kw_only=True)
class SFTOptions(AnswerTrainingOptions):
    """Supervised fine-tuning on demonstrations."""

    command: ClassVar[str] = "sft"
    unit: ClassVar[str] = "rows"
    rows: str = "addition"
    """Demonstrations: rows with prompt and completion, or with messages; or a built-in task."""
    batch: int = 32
    """Rows per step."""
    max_length: int = 1024
    """Longer rows are left out, and counted."""
    seed: int = 0
    """Seeds the data order."""


@dataclass(frozen=True, kw_only=True)
class RMOptions(RowTrainingOptions):
    """A reward model from preferences."""

    command: ClassVar[str] = "rm"
    model: str = "tiny"
    """What it starts as: a language model, which gets a fresh head (`tiny`, a model directory, a .gguf file, a hub id),
    or the directory of a reward model, which trains on."""
    rows: str = "addition"
    """Preferences: rows with chosen and rejected, with or without a prompt; or a built-in task. A column `margin` says
    by how much chosen should win."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval.reward:
            raise ValueError("a reward model is evaluated on held-out pairs: leave out eval.reward")
        if self.policy.lora_rank is not None:
            raise ValueError("a reward model trains all its weights: leave out policy.lora_rank")


@dataclass(frozen=True, kw_only=True)
class DPOOptions(AnswerTrainingOptions):
    """A policy from preferences, without a reward model and without sampling."""

    command: ClassVar[str] = "dpo"
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory. As it is at the
    start it is also the reference."""
    rows: str = "addition"
    """Preferences: rows with prompt, chosen and rejected; or a built-in task."""
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """The share of pairs that are taken to be labelled the wrong way round."""
    train_stop: bool = True
    """Count the choice to stop among an answer's log-probs, not only its content."""
    max_new_tokens: int = 64
    """Longest answer when evaluating on a task."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=1e-6, warmup_steps=10, schedule="linear"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta must be above 0, got {self.beta}: at 0 nothing is learned")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: at half, pairs say nothing"
            )

    def plan(self) -> str:
        """What `--dry-run` says of a step."""
        return (
            f"one step: {self.batch} pairs = {2 * self.batch} answers of up to {self.max_length} tokens, each scored by the "
            f"policy and by the reference\n{memory_line(self, reference=True)}\n{self._length()}"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertIterationOptions(AnsweringOptions, TrainingOptions):
    """Rounds of: sample answers, keep the good ones, imitate them."""

    command: ClassVar[str] = "expert-iteration"
    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROUNDS
    rows: str = "addition"
    """Prompts: a file of rows, a Hugging Face dataset (saved, or owner/name on the hub), a built-in task, or rg:NAME."""
    steps: int = 5
    """Rounds."""
    prompts: int = 256
    """Prompts per round."""
    samples: int = 4
    """Answers per prompt."""
    keep: Literal["above", "best"] = "above"
    """Which answers are imitated: all that score at least `threshold`, or each prompt's best one."""
    threshold: float | None = None
    """The score an answer must have; 1 with `above`, any with `best` if not given."""
    unique: bool = True
    """Imitate the same answer to the same prompt only once per round."""
    epochs: int = 2
    """Passes over the answers that a round keeps. Passes over the rows are set by `steps`: a round uses `prompts` of them."""
    batch: int = 32
    """Answers per optimiser step."""
    train_stop: bool = True
    """Train the choice to stop, not only the content."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-5))
    save: SaveOptions = field(default_factory=lambda: SaveOptions(every=1))
    seed: int = 0
    """Seeds data order and sampling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "prompts", "samples", "epochs", "batch")
        self._shared_out("prompts", "batch")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature 0 gives the same answer every time: there is nothing to choose; use 1"
            )

    @property
    def required_score(self) -> float:
        """The score that an answer must have to be imitated."""
        if self.threshold is not None:
            return self.threshold
        return 1.0 if self.keep == "above" else -float("inf")

    def plan(self) -> str:
        """What `--dry-run` says of a round."""
        answers = self.prompts * self.samples
        return (
            f"one round: {self.prompts} prompts x {self.samples} answers = {answers} answers of up to "
            f"{self.sampling.max_new_tokens} tokens; {self.epochs} passes over those that are kept, {self.batch} per "
            f"optimiser step\n{memory_line(self, sampler=True)}\nin all: {self.steps} rounds, {self.steps * answers:,} answers"
        )


@dataclass(frozen=True, kw_only=True)
class BestOfNOptions(AnsweringOptions, RunOptions):
    """Sample n answers to every prompt and keep the best; what the best of 1, 2, 4 … answers is worth."""

    command: ClassVar[str] = "best-of-n"
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    rows: str = "addition"
    """Prompts: a file of rows, a Hugging Face dataset (saved, or owner/name on the hub), a built-in task, or rg:NAME."""
    split: Literal["train", "test"] = "train"
    """Which rows of a task: those that training uses, or those held out. A file is used as it is."""
    count: int = 256
    """How many rows at most, from the first on."""
    n: int = 16
    """Answers per prompt."""
    reward: tuple[str, ...] = ()
    """What chooses: reward functions, or a reward model's run. A task brings its own, which is also called `task`."""
    judge: tuple[str, ...] = ()
    """Another reward by which the chosen answers are also measured; it has no say in the choice."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    prompts: int = 32
    """Prompts per step; a stopped run resumes at a step."""
    policy: LoadOptions = field(default_factory=LoadOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    """Seeds the answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("n", "count", "prompts")
        if self.extend:
            raise ValueError("best-of-n ends with its last row: raise count instead of giving extend")
        if self.sampling.temperature == 0 and self.n > 1:
            raise ValueError("sampling.temperature 0 gives the same answer n times; use 1, or n 1")

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of answers that are reported: 1, 2, 4 … and n."""
        return tuple(sorted({2**i for i in range(self.n.bit_length()) if 2**i <= self.n} | {self.n}))

    def plan(self) -> str:
        """What `--dry-run` says of the run."""
        return (
            f"at most {self.count} prompts x {self.n} answers = {self.count * self.n:,} answers of up to "
            f"{self.sampling.max_new_tokens} tokens, {self.prompts} prompts at a time\n"
            f"reported: the best of {', '.join(map(str, self.ks))}"
        )
