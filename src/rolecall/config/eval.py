"""Options of `rolecall eval`."""

from dataclasses import dataclass, field

from rolecall.config.agents import AgentOptions
from rolecall.config.parts import ChatOptions, EngineOptions, LoadOptions, RewardProcessOptions
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RewardProcessOptions):
    """How good a model is on held-out rows: accuracy, avg@k, pass@k, length, truncation, KL to another model."""

    model: str
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    rows: str | None = None
    """Prompts: a file, a saved dataset, or a task (its test split). If not given, or if they are those the run in `model` learned from, the ones it held out."""
    env: str | None = None
    """Play episodes of several turns in it, as in `rolecall rl`. If neither it nor rows are given, that of the run."""
    agent: AgentOptions = field(default_factory=AgentOptions)
    reward: tuple[str, ...] = ()
    """Reward functions, or a reward model's run. If not given: the task's own, or that of the run in `model`."""
    n: int = 256
    """How many rows at most."""
    samples: int = 1
    """Answers per row for avg@k and pass@k; 1 is greedy only."""
    against: str | None = None
    """A model to measure the KL to, on the sampled answers (needs samples above 1)."""
    template: bool | None = None
    """Put prompts that are plain text into the chat template. Left out: if the run in `model` was trained on messages."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """Left out: those of the run in `model`."""
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineOptions = field(default_factory=EngineOptions)
    policy: LoadOptions = field(default_factory=LoadOptions)
    show: int = 0
    """Print so many rows with their greedy answers."""
    json: bool = False
    """Print the numbers as one JSON object."""
    seed: int = 0
    """Seeds the sampled answers."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.samples < 1:
            raise ValueError(f"n and samples must be at least 1, got {self.n} and {self.samples}")
        if self.against is not None and self.samples < 2:
            raise ValueError("the KL to another model is measured on sampled answers: give samples above 1")
