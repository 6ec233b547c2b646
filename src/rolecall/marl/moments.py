"""Running mean and standard deviation of what counts."""

import torch
from torch import Tensor, nn

from rolecall.maths.reduce import masked_sum


class RunningMoments(nn.Module):
    """Moments of all values so far, or, with `decay`, mostly of the latest; padding never enters.

    Its buffers are state: they are saved and come back with the module.
    """

    count: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, *, decay: float | None = None) -> None:
        super().__init__()
        self.decay = decay
        for name in ("count", "mean", "square"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Take in the values where the mask is True."""
        x = x.detach().double()
        count = mask.sum().double()
        if not float(count):
            return
        mean, square = masked_sum(x, mask) / count, masked_sum(x.square(), mask) / count
        if not bool(torch.isfinite(mean + square)):
            return
        if self.decay is not None:  # weights of a mean that forgets, without the bias of its start at 0
            count = torch.tensor(1 - self.decay, dtype=torch.float64)
            self.count.mul_(self.decay)
        share = count / (self.count + count)
        self.count += count
        self.mean += share * (mean - self.mean)
        self.square += share * (square - self.square)

    @property
    def std(self) -> Tensor:
        """Never 0: of a constant it is 1."""
        variance = (self.square - self.mean.square()).clamp(min=0)
        return torch.where(variance > 1e-8 * self.square.clamp(min=1e-8), variance.sqrt(), 1.0)

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std."""
        return ((x - self.mean) / self.std).to(x.dtype)

    def restore(self, x: Tensor) -> Tensor:
        """x std + mean: the way back."""
        return (x * self.std + self.mean).to(x.dtype)
