"""The pieces of a decoder layer on flat tokens, with their gradients: compiled where there is a compiler, else in torch.

The residual stream [n, width] and all weights are fp32 (fp64 in tests); what lies between two matrix products is in the
working dtype, fp32 or bf16. A weight is cast to it in every forward, so that none is ever stale. The backward pass uses
the same copy if that is small beside the activations it is kept with, else it casts again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rolecall.policy.compiled import kernels

_SOURCE = Path(__file__).with_name("flat.c")
_BLOCK = 64
"""As in flat.c."""


class Norm(Function):
    """weight * x / rms(x), from fp32 into the working dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        _, out, factors = _normed(x, None, weight, eps, dtype)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, factors = ctx.saved_tensors
        dx, _, dweight = _norm_back(x, weight, factors, grad, None, None)
        return dx, dweight, None, None


class AddNorm(Function):
    """x + added in fp32, and its norm in the dtype of what is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out, factors = _normed(x, added, weight, eps, added.dtype)
        ctx.save_for_backward(total, weight, factors)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, above: Tensor | None, grad: Tensor) -> Any:
        x, weight, factors = ctx.saved_tensors
        dx, dadded, dweight = _norm_back(x, weight, factors, grad, above, grad.dtype)
        return dx, dadded, dweight, None


def _normed(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(x with what is added, that normed, the factors 1 / rms)."""
    factors = x.new_empty(len(x))
    compiled = kernels(_SOURCE, dtype, x, weight, *(() if added is None else (added,)))
    if compiled is None:
        total = x if added is None else x + added
        torch.rsqrt(total.square().mean(-1) + eps, out=factors)
        return total, (weight * (total * factors[:, None])).to(dtype), factors
    total = x if added is None else torch.empty_like(x)
    out = torch.empty_like(x, dtype=dtype)
    compiled.call("norm", dtype, (x, added, weight, total, out, factors), x.shape, eps)
    return total, out, factors


def _norm_back(
    x: Tensor, weight: Tensor, factors: Tensor, grad: Tensor, above: Tensor | None, added: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient of x, the same in the dtype of what was added, gradient of the weight); `above` is added to it."""
    grad = grad.contiguous()
    above = None if above is None else above.contiguous()
    compiled = kernels(_SOURCE, grad.dtype, x, weight)
    if compiled is None:
        normed, scaled = x * factors[:, None], grad.to(x.dtype) * weight
        dx = factors[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        dx = dx if above is None else dx + above
        return dx, None if added is None else dx.to(added), (grad.to(x.dtype) * normed).sum(0)
    dx, dadded = torch.empty_like(x), None if added is None else torch.empty_like(x, dtype=added)
    partial = x.new_empty(-(-len(x) // _BLOCK), x.shape[1])
    compiled.call("norm_back", grad.dtype, (x, weight, factors, grad, above, dx, dadded, partial), x.shape)
    return dx, dadded, partial.sum(0)


class Project(Function):
    """x W^T + b for several weights at once, side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor | None) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        joined = _joined(weights, x.dtype)
        ctx.save_for_backward(x, *_light(joined, weights, beside=x))
        ctx.sizes = [0 if w is None else len(w) for w in weights]
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        if all(b is None for b in biases):
            return x @ joined.T
        return torch.addmm(_joined(biases, x.dtype), x, joined.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        needs = ctx.needs_input_grad
        dx = grad @ _joined(weights, x.dtype) if needs[0] else None
        count = len(ctx.sizes)
        found: list[Tensor | None] = [None] * (2 * count)
        if any(needs[2 : 2 + count]):
            found[:count] = _cast((grad.T @ x).split(ctx.sizes), ctx.dtypes[:count])
        if any(needs[2 + count :]):
            sums = grad.sum(0, dtype=torch.float32 if grad.dtype == torch.bfloat16 else None)
            found[count:] = _cast(sums.split(ctx.sizes), ctx.dtypes[count:])
        return dx, None, *(g if need else None for g, need in zip(found, needs[2:], strict=True))


class Rotate(Function):
    """Rotary positions on the query and key heads of qkv, in place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(qkv)
        return rotated(qkv, cos, sin, heads, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        # In place: attention has just made it, and nobody else holds it.
        return rotated(grad.contiguous(), cos, sin, ctx.heads, -1.0), None, None, None


class GatedMlp(Function):
    """(silu(x G^T) * (x U^T)) D^T. The middle is made again in the backward pass instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        joined, last = _joined((gate, up), x.dtype), down.to(x.dtype)
        gate_up = x @ joined.T
        compiled = kernels(_SOURCE, x.dtype, gate_up)
        if compiled is None:
            middle = _gated(gate_up)
        else:
            middle = gate_up.new_empty(len(x), len(gate))
            compiled.call("gate", x.dtype, (gate_up, middle), middle.shape)
        ctx.save_for_backward(
            x, gate_up, *_light(last, (down,), beside=gate_up), *_light(joined, (gate, up), beside=gate_up)
        )
        ctx.dtypes = gate.dtype, up.dtype, down.dtype
        return middle @ last.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate_up, last, *first = ctx.saved_tensors
        grad = grad.contiguous()
        dmiddle = grad @ last.to(x.dtype)
        compiled = kernels(_SOURCE, x.dtype, gate_up)
        if compiled is None:
            with torch.enable_grad():
                leaf = gate_up.detach().requires_grad_()
                middle = _gated(leaf)
                (dgate_up,) = torch.autograd.grad(middle, leaf, dmiddle)
            middle = middle.detach()
        else:
            middle, dgate_up = torch.empty_like(dmiddle), torch.empty_like(gate_up)
            compiled.call("gate_back", x.dtype, (gate_up, dmiddle, middle, dgate_up), middle.shape)
        dx = dgate_up @ _joined(first, x.dtype) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return dx, None, None, None
        dgate, dup = (dgate_up.T @ x).chunk(2)
        return dx, *_cast((dgate, dup, grad.T @ middle), ctx.dtypes)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float) -> Tensor:
    """Rotary positions on the first heads of qkv [rows, ...], in place; sign -1 turns them back. cos, sin [rows, half]."""
    rows, half = cos.shape
    compiled = kernels(_SOURCE, qkv.dtype, qkv, cos)
    if compiled is not None:
        compiled.call("rotate", qkv.dtype, (qkv, cos, sin), (rows, qkv.shape[1], heads, half), sign)
        return qkv
    part = qkv[:, : 2 * heads * half].unflatten(1, (heads, 2, half))
    wide = part.to(cos.dtype)
    c, s = cos[:, None], sign * sin[:, None]
    part[:, :, 0], part[:, :, 1] = wide[:, :, 0] * c - wide[:, :, 1] * s, wide[:, :, 1] * c + wide[:, :, 0] * s
    return qkv


def _joined(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    there = [part.to(dtype) for part in parts if part is not None]
    return there[0] if len(there) == 1 else torch.cat(there)


def _light(
    joined: Tensor, parts: Sequence[Tensor | None], *, beside: Tensor
) -> tuple[Tensor, ...] | Sequence[Tensor | None]:
    """What to keep for the backward pass: weights in the working dtype, or the parameters they are made of."""
    return (joined,) if 4 * joined.numel() <= beside.numel() else parts


def _cast(parts: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if dtype is None else part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
