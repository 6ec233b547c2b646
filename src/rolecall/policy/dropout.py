"""Dropout of an adapter's inputs, with random numbers that are a function of where in the run they are drawn.

Nothing drops unless `dropping` says where training is: scoring, evaluation and sampling never do. No random state is read
or left behind, so a resumed run draws what the whole one drew, and a forward pass that gradient checkpointing repeats
drops the same inputs again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


class KeyedDropout(nn.Module):
    """x with each element 0 with probability `rate`, else divided by 1 - rate; outside `dropping`, x as it is."""

    def __init__(self, rate: float, *, seed: int, number: int) -> None:
        """`number` tells the layers of a model apart."""
        super().__init__()
        self.rate, self.seed, self.number = rate, seed, number
        self.place: tuple[int, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """A layer that a pass goes through twice drops the same elements both times, if the shapes are the same."""
        if self.place is None:
            return x
        (seed,) = np.random.SeedSequence([self.seed, *self.place, self.number]).generate_state(1, np.uint64)
        generator = torch.Generator(x.device).manual_seed(int(seed))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.rate
        return torch.where(kept, x / (1 - self.rate), 0)

    def extra_repr(self) -> str:
        """The rate, where the model is printed."""
        return f"rate={self.rate:g}"


@contextmanager
def dropping(module: nn.Module, place: tuple[int, ...] | None) -> Iterator[None]:
    """Dropout is on for the time of the `with`, which spans the backward pass too: it may compute the forward again.

    `place` is (step, optimiser step, micro-batch, rank).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    if layers and place is None:
        raise ValueError("the model has dropout: say which step this is, or every step would drop the same inputs")
    for layer in layers:
        layer.place = place
    try:
        yield
    finally:
        for layer in layers:
            layer.place = None
