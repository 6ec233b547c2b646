"""y = x W^T + b for weights that serve many calls, packed once: by linear.c, else by oneDNN, else not at all."""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rolecall.policy.compiled import library, pointer, wanted

_SOURCE = Path(__file__).with_name("linear.c")
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_PANEL = 48
"""Columns of a panel, as in linear.c."""


class Linear:
    """One weight and its bias. Takes and gives tensors [..., width] of the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._kernels = _kernels(weight)
        self._packed = self._panels(weight) if self._kernels is not None else _reordered(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`out`, contiguous, may be given to be written to; what is returned counts."""
        if self._weight is not None:
            return F.linear(x, self._weight, self.bias)
        if self._kernels is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        assert self._packed is not None
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features) if out is None else out
        self._kernels[f"linear_{_NAMES[x.dtype]}"](
            pointer(x),
            pointer(self._packed),
            None if self.bias is None else pointer(self.bias),
            pointer(out),
            *map(ctypes.c_int64, (x.numel() // self.in_features, self.out_features, self.in_features)),
            torch.get_num_threads(),
        )
        return out

    def _panels(self, weight: Tensor) -> Tensor:
        assert self._kernels is not None
        weight = weight.contiguous()
        packed = weight.new_empty(-(-self.out_features // _PANEL) * _PANEL * self.in_features)
        sizes = map(ctypes.c_int64, weight.shape)
        pack = self._kernels[f"pack_{_NAMES[weight.dtype]}"]
        pack(pointer(weight), pointer(packed), *sizes, torch.get_num_threads())
        return packed


def _kernels(weight: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, if this processor has the instructions they are made of."""
    if weight.device.type != "cpu" or weight.dtype not in _NAMES or weight.shape[1] % 2 or not wanted():
        return None
    found = library(_SOURCE)
    return found if found is not None and found[f"fits_{_NAMES[weight.dtype]}"]() else None


def _reordered(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order, where this build of torch has the (private) operators for it."""
    if weight.device.type != "cpu" or weight.dtype not in _NAMES:
        return None
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    except RuntimeError:  # this CPU has no kernel for the dtype
        return None
