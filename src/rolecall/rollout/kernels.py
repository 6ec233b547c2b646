"""The functions of decode.c, for the native engine."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from rolecall.policy.compiled import library, pointer, wanted

_SOURCE = Path(__file__).with_name("decode.c")
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Kernels:
    """The compiled functions for one storage type. Tensors must be contiguous and on the CPU; `out` is returned."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        name = _NAMES[dtype]
        self._attend, self._add_norm, self._gated, self._draw = (
            getattr(functions, f"{function}_{name}") for function in ("attend", "add_norm", "gated", "draw")
        )

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, out: Tensor
    ) -> Tensor:
        """Rotate, store the new key and value of each row in its slot, attend. `out` is [rows, heads x width]."""
        rows, (_, kv, room, width) = len(qkv), keys.shape
        heads = out.shape[1] // width
        self._attend(
            *(pointer(t) for t in (qkv, cos, sin, keys, values, lengths, out)),
            *(ctypes.c_int64(n) for n in (rows, heads, kv, width, room)),
            ctypes.c_float(width**-0.5),
            torch.get_num_threads(),
        )
        return out

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
        """Add to x in place, and norm it into `out`."""
        self._add_norm(
            pointer(x),
            None if added is None else pointer(added),
            pointer(weight),
            pointer(out),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int64(x.shape[1]),
            ctypes.c_float(eps),
            torch.get_num_threads(),
        )
        return out

    def gated(self, gate_up: Tensor, *, out: Tensor) -> Tensor:
        """silu(gate) * up."""
        rows, width = out.shape
        self._gated(
            pointer(gate_up), pointer(out), ctypes.c_int64(rows), ctypes.c_int64(width), torch.get_num_threads()
        )
        return out

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs; a token is -1 where the logits are not finite."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        self._draw(
            *(pointer(t) for t in (logits, u, tokens, logprobs)),
            ctypes.c_int64(logits.shape[0]),
            ctypes.c_int64(logits.shape[1]),
            ctypes.c_float(1.0 / temperature),
            torch.get_num_threads(),
        )
        return tokens, logprobs


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The kernels for weights of this dtype; None where there are none."""
    if dtype not in _NAMES or not wanted():
        return None
    found = library(_SOURCE)
    return None if found is None else Kernels(found, dtype)
