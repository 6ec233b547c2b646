"""Attention over sequences of different lengths in one call, on a GPU: that of flash_attn where it is installed, else torch's own.

Queries and keys of all sequences lie end to end. A sequence may have more keys than queries, which are then its last tokens:
a token looks at all keys up to itself.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Where sequences begin and end among the queries, and among the keys."""

    queries: Tensor
    """[sequences + 1] int32 on the device."""
    keys: Tensor
    """[sequences + 1] int32 on the device."""
    most_queries: int
    most_keys: int


Varlen = Callable[[Tensor, Tensor, Tensor, Lengths], Tensor]
"""(queries [n, heads, width], keys [m, kv_heads, width], values, lengths) -> [n, heads, width]."""


def ways(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Varlen | None]]:
    """What attention can be computed with on a device, by name, the quickest first; None is SDPA on padded rectangles, which can
    always be had. The kernels are for 16 bits."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if find_spec("flash_attn") is not None:
            yield "flash_attn's varlen kernel", flash_attn
        yield "torch's varlen kernel", torch_varlen
    yield "SDPA on padded segments", None


def flash_attn(q: Tensor, k: Tensor, v: Tensor, at: Lengths) -> Tensor:
    """By the package of that name, 2.1 or newer: older ones align queries with the first keys."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    most = at.most_queries, at.most_keys
    mixed: Tensor = flash_attn_varlen_func(q, k, v, at.queries, at.keys, *most, causal=True)
    return mixed


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, at: Lengths) -> Tensor:
    """By `torch.nn.attention.varlen`."""
    from torch.nn.attention.varlen import varlen_attn

    most = at.most_queries, at.most_keys
    mixed = varlen_attn(q, k, v, at.queries, at.keys, *most, window_size=(-1, 0), enable_gqa=True)  # (-1, 0): causal
    assert isinstance(mixed, Tensor)
    return mixed
