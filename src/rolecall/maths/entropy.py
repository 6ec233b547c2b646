"""The coefficient of the entropy bonus over time."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedEntropy:
    """An entropy coefficient that stays."""

    coef: float

    def update(self, entropy: float) -> "FixedEntropy":
        """Itself, whatever was observed."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyTarget:
    """An entropy coefficient that steers the mean entropy per token towards a target.

        coef <- clip(coef + rate (target - entropy), 0, limit)

    Below the target the bonus grows, above it the bonus shrinks and ends at 0: entropy is never punished. The integral
    part of a controller; Skywork-OR1 (He et al. 2025, arXiv 2505.22312) moves by a constant instead. On target it stays.
    """

    coef: float
    """The coefficient now."""
    target: float
    """The mean entropy per trained token to hold, in nats."""
    rate: float
    """How much the coefficient moves per update and nat."""
    limit: float
    """The largest coefficient."""

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 <= self.coef <= self.limit:
            raise ValueError(
                f"rate must be positive and coef within 0 and limit, got rate={self.rate}, coef={self.coef}, "
                f"limit={self.limit}"
            )

    def update(self, entropy: float) -> "EntropyTarget":
        """The controller after an update whose mean entropy was `entropy`."""
        moved = self.coef + self.rate * (self.target - entropy)
        return replace(self, coef=min(max(moved, 0.0), self.limit))
