"""The functions of decode.c, and the gate of flat.c, for the native engine."""

from pathlib import Path

import torch
from torch import Tensor

from rolecall.policy import compiled

_SOURCE = Path(__file__).with_name("decode.c")
_FLAT = Path(compiled.__file__).with_name("flat.c")


class DecodeKernels:
    """The compiled functions for one storage type. Tensors must be contiguous and on the CPU; `out` is returned."""

    def __init__(self, functions: compiled.Kernels, flat: compiled.Kernels, dtype: torch.dtype) -> None:
        self._call, self._flat_call, self._dtype = functions.call, flat.call, dtype

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, out: Tensor
    ) -> Tensor:
        """Rotate, store the new key and value of each row in its slot, attend. `out` is [rows, heads x width]."""
        _, kv, room, width = keys.shape
        sizes = (len(qkv), out.shape[1] // width, kv, width, room)
        self._call("attend", self._dtype, (qkv, cos, sin, keys, values, lengths, out), sizes, width**-0.5)
        return out

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
        """Add to x in place, and norm it into `out`."""
        self._call("add_norm", self._dtype, (x, added, weight, out), x.shape, eps)
        return out

    def gated(self, gate_up: Tensor, *, out: Tensor) -> Tensor:
        """silu(gate) * up."""
        self._flat_call("gate", self._dtype, (gate_up, out), out.shape)
        return out

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs; a token is -1 where the logits are not finite."""
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._call("draw", self._dtype, (logits, u, tokens, logprobs), logits.shape, 1.0 / temperature)
        return tokens, logprobs


def kernels_for(dtype: torch.dtype) -> DecodeKernels | None:
    """The kernels for weights of this dtype; None where there are none."""
    own, flat = compiled.kernels(_SOURCE, dtype), compiled.kernels(_FLAT, dtype)
    return None if own is None or flat is None else DecodeKernels(own, flat, dtype)
