"""Assertions that many tests share, and what holds for every function with a mask."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_rubbish_has_no_effect(
    function: Callable[..., Tensor], mask: Tensor, rubbish: Tensor, *tensors: Tensor
) -> None:
    """NaN and inf at positions that do not count reach neither the result nor any gradient, which is exactly 0 there.

    `function` takes the tensors and gives one tensor; every entry of the result gets its own weight in the gradient.
    """
    clean = [tensor.clone().requires_grad_() for tensor in tensors]
    dirty = [torch.where(mask, tensor, rubbish).requires_grad_() for tensor in tensors]
    expected, got = function(*clean), function(*dirty)
    assert torch.isfinite(expected).all()
    assert got.equal(expected)

    weight = torch.linspace(1, 2, got.numel(), dtype=got.dtype).reshape(got.shape)
    clean_gradients = torch.autograd.grad((weight * expected).sum(), clean)
    dirty_gradients = torch.autograd.grad((weight * got).sum(), dirty)
    for clean_gradient, dirty_gradient in zip(clean_gradients, dirty_gradients, strict=True):
        assert dirty_gradient.equal(clean_gradient)
        assert (dirty_gradient[~mask] == 0).all()


def every(like: Tensor) -> Tensor:
    """A mask of this shape in which every position counts."""
    return torch.ones(like.shape, dtype=torch.bool)


def equal(actual: Tensor, expected: object, atol: float = 1e-12) -> None:
    """Compare in float64, or in whatever dtype `actual` has."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)
