"""Base models of 8 or 4 bits. Only an adapter on top trains. Plain torch; where bitsandbytes is installed, its compiled
kernel unpacks 4 bits, several times as fast and to the same values.

The linear layers hold their weights rounded, and compute with the rounded values in the model's dtype; backward they are
unpacked a second time, so that no plain copy stays in memory. Merging an adapter turns them back into plain layers
with just those values: the engine samples from, and the run saves, what was trained.

int8    one scale per row: the weight is code * scale, code in -127 … 127
int4    NF4 (https://arxiv.org/abs/2305.14314): one scale per 64 weights, codes stand for the quantiles below
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.policy import compiled
from rolecall.policy.load import LoadedModel, LoadError
from rolecall.transfer import to_device

Bits = Literal["int8", "int4"]
Unpack = Callable[[Tensor, Tensor], Tensor]
"""(codes [blocks, 32], scales [blocks, 1]) -> weights [blocks, 64]."""

_BLOCK = 64
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class RoundedLinear(nn.Linear):
    """A linear layer that does not train, with its weight in 8 or 4 bits."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, bits: Bits) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.weight.data
        codes, scales = _packed(weight.float(), bits)
        del self.weight  # the codes are in its place; peft asks for it to see where the layer lies
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = layer.bias
        self.bits, self.dtype = bits, weight.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in] the rounded values, unpacked."""
        shape = (self.out_features, self.in_features)
        return _unpacked(self.codes, self.scales, self.bits, shape).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        made: Tensor = _Product.apply(x, self)
        return made if bias is None else made + bias


class _Product(torch.autograd.Function):
    """x W^T, which keeps the layer for the backward pass and not its unpacked weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RoundedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight.to(grads[0].dtype), None


def quantized(loaded: LoadedModel, bits: Bits) -> LoadedModel:
    """The model with its linear layers, the head apart, rounded in place."""
    model, head = loaded.model, loaded.model.get_output_embeddings()
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not layers:
        raise LoadError(f"model {loaded.name!r} has no linear layers to quantise: leave out policy.quantize")
    for name, layer in layers:
        _put(model, name, RoundedLinear(layer, bits))
    return loaded


def restore(model: Any) -> None:
    """Turn rounded layers into plain ones of the same values, in place. A model without any stays as it is."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, RoundedLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight, plain.bias = nn.Parameter(layer.weight, requires_grad=False), layer.bias
            _put(model, name, plain)


def _put(model: Any, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _packed(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """(codes, scales)."""
    if bits == "int8":
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        return (weight / scales).round().to(torch.int8), scales
    blocks = functional.pad(weight.flatten(), (0, -weight.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    levels = torch.tensor(_NF4, device=weight.device)
    codes = torch.bucketize(blocks / scales, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _unpacked(codes: Tensor, scales: Tensor, bits: Bits, shape: tuple[int, int]) -> Tensor:
    if bits == "int8":
        return codes.float() * scales
    unpack = (_bitsandbytes() if codes.device.type == "cpu" and compiled.wanted() else None) or _unpack
    return unpack(codes, scales).flatten()[: shape[0] * shape[1]].view(shape)


def _unpack(codes: Tensor, scales: Tensor) -> Tensor:
    levels = to_device(torch.tensor(_NF4), codes.device)
    both = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
    return levels[both.long()] * scales


@cache
def _bitsandbytes() -> Unpack | None:
    """The kernel of bitsandbytes, if that is installed and gives the very values of ours for every code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its imports warn of
        try:
            from bitsandbytes.functional import QuantState, dequantize_4bit
        except Exception:  # not installed, or no build for this machine
            return None

    def unpack(codes: Tensor, scales: Tensor) -> Tensor:
        shape = torch.Size((len(codes), _BLOCK))
        how = {"blocksize": _BLOCK, "quant_type": "nf4", "dtype": torch.float32}
        state = QuantState(absmax=scales.flatten(), shape=shape, code=torch.tensor(_NF4), **how)
        made: Tensor = dequantize_4bit(codes.reshape(-1, 1), state)
        return made

    codes = torch.arange(256, dtype=torch.uint8).view(-1, _BLOCK // 2)
    scales = torch.rand((len(codes), 1), generator=torch.Generator().manual_seed(0))
    try:
        same = torch.equal(unpack(codes, scales), _unpack(codes, scales))
    except Exception:  # another version of it
        same = False
    return unpack if same else None
