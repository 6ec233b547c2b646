"""Options of `rolecall best-of-n`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rolecall.config.parts import ChatOptions, EngineOptions, LoadOptions, RewardProcessOptions, RunOptions, SaveOptions
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class BestOfNOptions(RewardProcessOptions, RunOptions):
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
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    judge: tuple[str, ...] = ()
    """What the chosen answers are measured by beside: another reward, which has no say in the choice."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    prompts: int = 32
    """Prompts per step; a run that is stopped goes on at a step."""
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineOptions = field(default_factory=EngineOptions)
    policy: LoadOptions = field(default_factory=LoadOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    """Seeds the answers."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.n < 1 or self.count < 1 or self.prompts < 1:
            raise ValueError(f"n, count and prompts must be at least 1, got {self.n}, {self.count}, {self.prompts}")
        if self.extend:
            raise ValueError("best-of-n ends with its last row: raise count instead of giving extend")
        if self.sampling.temperature == 0 and self.n > 1:
            raise ValueError("sampling.temperature 0 gives the same answer n times; use 1, or n 1")

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of answers that are reported: 1, 2, 4 … and n."""
        return tuple(sorted({2**i for i in range(self.n.bit_length()) if 2**i <= self.n} | {self.n}))


def plan(options: BestOfNOptions) -> str:
    """What `--dry-run` says."""
    return (
        f"at most {options.count} prompts x {options.n} answers = {options.count * options.n:,} answers of up to "
        f"{options.sampling.max_new_tokens} tokens, {options.prompts} prompts at a time\n"
        f"reported: the best of {', '.join(map(str, options.ks))}"
    )
