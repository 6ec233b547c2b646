"""Options of `rolecall plan`."""

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a run of RL would take on GPUs: memory, seconds per step, cost, settings. From formulas (docs/plan.md), with error bars;
    nothing of it was measured on a GPU."""

    command: ClassVar[str] = "plan"
    model: str = field(metadata={"bare": True})
    """A model's directory or config.json, a run, `tiny`, or a Hugging Face hub id, of which only the config is read."""
    gpu: str = "h100"
    """b200, h200, h100, a100-80, a100-40, l40s, a10, l4, rtx4090 or mi300x."""
    gpus: int = 8
    """GPUs in all."""
    sample_gpus: int | None = None
    """How many of them sample, the others train; 0: all do both in turn. Left out: as many as balance the two."""
    prompts: int = 64
    """Prompts per step."""
    samples: int = 8
    """Answers per prompt."""
    prompt_tokens: float = 256.0
    """Tokens of a prompt, on average."""
    answer_tokens: float = 1024.0
    """Tokens of an answer, on average."""
    longest: float = 4096.0
    """Tokens of the longest answer."""
    epochs: int = 1
    """Passes over each rollout."""
    reference: bool = False
    """Whether there is a KL to a reference."""
    lora_rank: int | None = None
    """Train an adapter of this rank instead of all weights."""
    token_budget: int = 8192
    """Tokens of a micro-batch."""
    network: float = 12.5
    """Gigabytes per second between trainers and samplers."""
    price: float | None = None
    """What a GPU costs per hour, in any currency."""
    simulate: bool = False
    """Simulate 8 to 4,096 workers with tails, failures and stragglers, and show where their time goes."""
    failures_per_day: float = 0.5
    """simulate: how often a worker fails."""
    slow_share: float = 0.02
    """simulate: the share of workers that take half as long again."""
    spread: float = 0.8
    """simulate: the spread of the logarithm of an answer's length."""
    picture: str | None = None
    """simulate: also write an SVG of it to this file."""

    def __post_init__(self) -> None:
        for name in ("gpus", "prompts", "samples", "epochs", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prompt_tokens", "answer_tokens", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.longest < self.answer_tokens:
            raise ValueError(
                f"the longest answer has {self.longest:g} tokens and the mean one {self.answer_tokens:g}: give longest too"
            )
        if self.sample_gpus is not None and not 0 <= self.sample_gpus < self.gpus:
            raise ValueError(
                f"sample_gpus is 0 or below gpus ({self.gpus}), since others must train, got {self.sample_gpus}"
            )
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}")
        if self.price is not None and self.price < 0:
            raise ValueError(f"price must be 0 or more, got {self.price:g}")
        if not 0 <= self.slow_share <= 1 or self.failures_per_day < 0 or self.spread < 0:
            raise ValueError("slow_share is a share, failures_per_day and spread are 0 or more")
        if self.picture is not None and not self.simulate:
            raise ValueError("picture is of what simulate shows: give simulate too")
