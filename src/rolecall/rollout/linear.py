"""y = x W^T + b for weights that serve many calls, packed once: by linear.c, else by oneDNN, else not at all."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rolecall.policy.compiled import Kernels, kernels

_SOURCE = Path(__file__).with_name("linear.c")
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
        sizes = (x.numel() // self.in_features, self.out_features, self.in_features)
        self._kernels.call("linear", x.dtype, (x, self._packed, self.bias, out), sizes)
        return out

    def _panels(self, weight: Tensor) -> Tensor:
        assert self._kernels is not None
        weight = weight.contiguous()
        packed = weight.new_empty(-(-self.out_features // _PANEL) * _PANEL * self.in_features)
        self._kernels.call("pack", weight.dtype, (weight, packed), weight.shape)
        return packed


def _kernels(weight: Tensor) -> Kernels | None:
    """The compiled functions, if this processor has the instructions they are made of."""
    found = kernels(_SOURCE, weight.dtype) if weight.device.type == "cpu" and not weight.shape[1] % 2 else None
    return found if found is not None and found.has("linear", weight.dtype) else None


def _reordered(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order, where this build of torch has the (private) operators for it."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    except RuntimeError:  # this CPU has no kernel for the dtype
        return None
