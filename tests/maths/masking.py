"""What holds for every function with a mask, as one assertion."""

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


def padded(tensor: Tensor, columns: int) -> Tensor:
    """With columns of zeros (False) behind it."""
    return torch.nn.functional.pad(tensor, (0, columns))
