"""Options of `rolecall play`."""

from dataclasses import dataclass, field
from typing import Literal

from rolecall.config.agents import AgentOptions
from rolecall.config.parts import ChatOptions, EngineOptions, LoadOptions
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Episodes of several turns, as a conversation or token by token."""

    model: str
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    env: str
    """The environment: calculator, guessing, kuhn, file.py:Class, gym:ID."""
    rows: str | None = None
    """What it starts from; left out, the environment's own held-out rows, or seeds."""
    n: int = 1
    """How many rows to play, once each."""
    seed: int = 0
    """The same seed plays the same episodes."""
    show: Literal["text", "tokens"] = "text"
    """text: who said what. tokens: every token with its author, role and log-prob."""
    json: bool = False
    """Print one JSON object for each player of each episode."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineOptions = field(default_factory=EngineOptions)
    policy: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1 episode, got {self.n}")
