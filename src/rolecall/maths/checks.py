"""What every function of this package asks of its arguments, said in one sentence when it does not hold."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BatchTime = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
"""True = counts."""


def check_mask(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise ValueError unless `mask` is bool and every given tensor has its shape. None is skipped."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be a bool tensor (True = counts), got {mask.dtype}; derive it from roles or use `mask.bool()`"
        )
    check_shape(tuple(mask.shape), like="mask", **tensors)


def check_shape(shape: tuple[int, ...], *, like: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless every given tensor has exactly this shape (no broadcasting)."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but {like} has shape {shape}; they must be equal")


def check_bool(**tensors: Tensor | None) -> None:
    """Raise ValueError unless every given tensor is bool. None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be a bool tensor, got {tensor.dtype}; use `{name}.bool()` if 1 means True")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(repr(choice) for choice in choices)}")


def keep(mask: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` where the mask is True, else 0. Unlike `tensor * mask` it stops NaN and inf, in both directions."""
    return torch.where(mask, tensor, 0)
