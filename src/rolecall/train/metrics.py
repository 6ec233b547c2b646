"""Numbers about a step, gathered as tensors and reduced over ranks once."""

from collections.abc import Callable

import torch
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]
"""Adds a tensor over ranks."""


class Meter:
    """Means, extremes and totals by name. Names and their meaning: docs/metrics.md."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._largest: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to a mean; with a mask, only where it is True. NaN outside the mask is harmless."""
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        total, count = self._sums.get(name, (0.0, 0))
        kept = torch.where(mask, values.double(), 0).detach()
        self._sums[name] = (total + kept.sum().cpu(), count + mask.sum().cpu())

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a sum over ranks."""
        total, _ = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + torch.as_tensor(value, dtype=torch.float64).cpu(), torch.tensor(-1.0))

    def largest(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the maximum."""
        kept = values.double() if mask is None else torch.where(mask, values.double(), -torch.inf)
        if kept.numel():
            now = kept.detach().max().cpu()
            self._largest[name] = torch.maximum(self._largest.get(name, now), now)

    def smallest(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Keep the minimum."""
        self.largest("-" + name, -values, mask)

    def result(self, all_sum: AllSum = lambda x: x, all_max: AllSum = lambda x: x) -> dict[str, float]:
        """Every number over all ranks; means of nothing are left out. All ranks must have gathered the same names."""
        out: dict[str, float] = {}
        if self._sums:
            rows = torch.stack([torch.stack([total, count.double()]) for total, count in self._sums.values()])
            for name, (total, count) in zip(self._sums, all_sum(rows).tolist(), strict=True):
                if count < 0:
                    out[name] = total
                elif count > 0:
                    out[name] = total / count
        if self._largest:
            for name, value in zip(
                self._largest, all_max(torch.stack(list(self._largest.values()))).tolist(), strict=True
            ):
                if value > -float("inf"):
                    out[name.removeprefix("-")] = -value if name.startswith("-") else value
        return out
