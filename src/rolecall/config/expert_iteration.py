"""Options of `rolecall expert-iteration`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rolecall.config.foreign import Foreign
from rolecall.config.foreign_trl import TRL_ROUNDS
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
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ExpertIterationOptions(RewardProcessOptions, RunOptions):
    """Rounds of: sample answers, keep the good ones, imitate them."""

    command: ClassVar[str] = "expert-iteration"
    foreign: ClassVar[tuple[Foreign, ...]] = TRL_ROUNDS
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    rows: str = "addition"
    """Prompts: a file of rows, a Hugging Face dataset (saved, or owner/name on the hub), a built-in task, or rg:NAME."""
    reward: tuple[str, ...] = ()
    """Reward functions: file.py:name, module:name, a built-in verifier, or a reward model's run. A task brings its
    own, which is also called `task`."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    steps: int = 5
    """Rounds."""
    prompts: int = 256
    """Prompts per round."""
    samples: int = 4
    """Answers per prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    keep: Literal["above", "best"] = "above"
    """Which answers are imitated: all that score at least `threshold`, or each prompt's best one."""
    threshold: float | None = None
    """The score an answer must have; 1 with `above`, any with `best` if not given."""
    unique: bool = True
    """Imitate the same answer to the same prompt only once per round."""
    epochs: int = 2
    """Passes over the answers that a round keeps. Passes over the rows are set by `steps`: a round asks `prompts` of them."""
    batch: int = 32
    """Answers per optimiser step."""
    train_stop: bool = True
    """Train the choice to stop, not only the content."""
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-5))
    engine: EngineOptions = field(default_factory=EngineOptions)
    eval: HeldOutOptions = field(default_factory=HeldOutOptions)
    save: SaveOptions = field(default_factory=lambda: SaveOptions(every=1))
    seed: int = 0
    """Seeds data order and sampling."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name in ("steps", "prompts", "samples", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature 0 gives the same answer every time: there is nothing to choose; use 1"
            )

    @property
    def needed(self) -> float:
        """The score that an answer must have to be imitated."""
        if self.threshold is not None:
            return self.threshold
        return 1.0 if self.keep == "above" else -float("inf")


def plan(options: ExpertIterationOptions) -> str:
    """What `--dry-run` says."""
    answers = options.prompts * options.samples
    return (
        f"one round: {options.prompts} prompts x {options.samples} answers = {answers} answers of up to "
        f"{options.sampling.max_new_tokens} tokens; {options.epochs} passes over those that are kept, {options.batch} per "
        f"optimiser step\nin all: {options.steps} rounds, {options.steps * answers:,} answers"
    )
