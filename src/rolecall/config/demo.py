"""Options of `rolecall demo`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """SFT, a reward model, PPO and GRPO on the built-in model, in a few minutes on a laptop."""

    out: str | None = None
    """The directory for the four runs; runs/demo-NUMBER if not given."""
    quick: bool = False
    """Fewer steps and held-out problems, for about a minute; the models learn less."""
    seed: int = 0
    """Seeds everything."""
    quiet: bool = False
    """Only the table at the end."""
