"""A dataclass of options with one of everything, for the tests beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters."""

    rank: int = 16
    """Their rank."""
    targets: tuple[str, ...] = ()
    """Which layers."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    name: str
    """The model. A second sentence."""
    lora: Lora | None = None
    """Train adapters only."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimiser."""

    lr: float = field(default=1e-5, metadata={"known_as": ("learning_rate",)})
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the step size moves."""
    fused: bool = True
    """One kernel."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Train something."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"optim": {"lr": 1e-3, "schedule": "cosine"}, "steps": 10},
        "adapters": {"model": {"lora": {"rank": 4}}, "extra": {"a": 1, "b": 2}},
    }

    model: Model
    """What is trained."""
    optim: Optim = field(default_factory=Optim)
    """How it is trained."""
    eval_sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    """How answers are drawn for evaluation."""
    steps: int = 100
    """How long."""
    limit: int | None = None
    """Rows to use."""
    clip: float | Literal["auto"] = "auto"
    """Where to clip."""
    bits: Literal[4, 8] = 8
    """How small."""
    parts: tuple[str, ...] = field(default=(), metadata={"flag": "part"})
    """Texts."""
    ids: tuple[int, ...] | None = None
    """Numbers."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < self.steps:
            raise ValueError(f"limit {self.limit} is less than steps {self.steps}; raise it")

    def plan(self) -> str:
        return f"{self.steps} steps"
