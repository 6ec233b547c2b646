"""Hypothesis strategies: masks, float64 tensors beside them, and episodes as a runner records them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

_FINITE = st.floats(-8, 8, allow_nan=False, width=32)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9))
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """A bool [batch, time] tensor; holes, empty rows and full rows are all likely."""
    batch, time = draw(SHAPES)
    row = st.one_of(
        st.lists(st.booleans(), min_size=time, max_size=time), st.just([True] * time), st.just([False] * time)
    )
    return torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))


def like(mask: Tensor, *, per_row: bool = False) -> st.SearchStrategy[Tensor]:
    """A float64 tensor of the mask's shape, or one number per row."""
    shape = mask.shape[:1] if per_row else mask.shape
    size = shape.numel()
    return st.lists(_FINITE, min_size=size, max_size=size).map(
        lambda numbers: torch.tensor(numbers, dtype=torch.float64).reshape(shape)
    )


@st.composite
def masked(draw: st.DrawFn, *, tensors: int) -> tuple[Tensor, ...]:
    """(mask, tensor, …), all [batch, time]."""
    mask = draw(masks())
    return (mask, *(draw(like(mask)) for _ in range(tensors)))


def rubbish(mask: Tensor) -> st.SearchStrategy[Tensor]:
    """NaN, inf or -inf at each position, to be put where the mask is False."""
    size = mask.numel()
    kinds = st.sampled_from([float("nan"), float("inf"), float("-inf")])
    return st.lists(kinds, min_size=size, max_size=size).map(
        lambda numbers: torch.tensor(numbers, dtype=torch.float64).reshape(mask.shape)
    )


@st.composite
def runner_episodes(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """(filled, terminated, limit) as PyMARL's runner writes them.

    Slots 0..length are filled (the last holds the observation to bootstrap from); `terminated` is set at length - 1
    unless the time limit ended the episode, which is then exactly `limit` steps long. There are limit + 1 slots.
    """
    limit = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, limit), min_size=1, max_size=5))
    filled = torch.zeros(len(lengths), limit + 1, dtype=torch.bool)
    terminated = torch.zeros_like(filled)
    for row, length in enumerate(lengths):
        filled[row, : length + 1] = True
        terminated[row, length - 1] = length < limit or draw(st.booleans())
    return filled, terminated, limit
