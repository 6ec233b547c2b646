"""Attention on flat tokens, with its gradient: on the CPU compiled where there is a compiler, on a GPU by a varlen kernel
(`policy.varlen`), else in torch on padded rectangles.

Tokens lie in segments, segments in groups. The first segment of a group is its prefix, which may be empty; a token looks
at its group's prefix and at its own segment up to itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from rolecall.policy.compiled import Kernels, kernels
from rolecall.policy.varlen import Lengths, Varlen
from rolecall.transfer import to_device

_SOURCE = Path(__file__).with_name("attend.c")


@dataclass(frozen=True, kw_only=True)
class Segments:
    """How the flat tokens of a batch belong together."""

    starts: Tensor
    """[segments + 1] the first token of each segment, and the number of tokens."""
    groups: Tensor
    """[groups + 1] the first segment of each group, and the number of segments."""
    device: torch.device | str = "cpu"
    """Where attention is computed. All above is on the host."""
    varlen: Varlen | None = None
    """What it is computed with there; None: padded rectangles."""

    @classmethod
    def of_rows(cls, rows: int, time: int) -> Self:
        """Rows of one length, end to end, that share nothing."""
        starts = torch.arange(rows + 1).mul_(time).repeat_interleave(2)[:-1]
        return cls(starts=starts.contiguous(), groups=2 * torch.arange(rows + 1))

    @cached_property
    def rectangles(self) -> "Rectangles":
        """For attention in torch."""
        return _rectangles(self.starts.numpy(), self.groups.numpy()).to(self.device)

    @cached_property
    def looks(self) -> "Looks":
        """For a varlen kernel."""
        return _looks(self.starts.tolist(), self.groups.tolist(), self.device)


def attend(qkv: Tensor, segments: Segments, *, heads: int, kv_heads: int) -> Tensor:
    """[n, heads x width] what each token gathers from those it may look at.

    `qkv` [n, (heads + 2 kv_heads) x width] holds its queries, keys and values side by side.
    """
    qkv = qkv.contiguous()
    compiled = kernels(_SOURCE, qkv.dtype, qkv)
    if compiled is None and segments.varlen is not None:
        return _attend_varlen(qkv, segments.looks, segments.varlen, heads, kv_heads)
    if compiled is None:
        return _attend(qkv, segments.rectangles, heads, kv_heads)
    mixed: Tensor = _Attend.apply(qkv, segments, heads, kv_heads, compiled)
    return mixed


def attend_into(out: Tensor, qkv: Tensor, segments: Segments, *, heads: int, kv_heads: int) -> None:
    """The same into `out`, without gradient."""
    compiled = kernels(_SOURCE, qkv.dtype, qkv)
    if compiled is None:
        out.copy_(_attend(qkv, segments.rectangles, heads, kv_heads))
        return
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    _call("attend", (qkv, out, torch.empty(len(qkv), heads)), segments, (heads, kv_heads, width), compiled)


class _Attend(Function):
    """The compiled one. Keeps what goes in and the logarithm of each softmax's sum."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, segments: Segments, heads: int, kv_heads: int, compiled: Kernels) -> Tensor:
        width = qkv.shape[1] // (heads + 2 * kv_heads)
        out, logsums = qkv.new_empty(len(qkv), heads * width), torch.empty(len(qkv), heads)
        ctx.about = segments, (heads, kv_heads, width), compiled
        _call("attend", (qkv, out, logsums), *ctx.about)
        ctx.save_for_backward(qkv, logsums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkv, logsums = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        _call("attend_back", (qkv, logsums, grad.contiguous(), dqkv), *ctx.about)
        return dqkv, None, None, None, None


def _call(
    name: str, tensors: Sequence[Tensor], segments: Segments, sizes: tuple[int, int, int], compiled: Kernels
) -> None:
    where, counts = (segments.starts, segments.groups), (len(segments.groups) - 1, *sizes)
    compiled.call(name, tensors[0].dtype, (*tensors, *where), counts, sizes[2] ** -0.5)


# -- by a varlen kernel ------------------------------------------------------------------------------------------------


class Looks(NamedTuple):
    """The segments that are not empty as sequences of queries, and the keys of each: its group's prefix, then its own."""

    lengths: Lengths
    take: Tensor | None
    """[keys] the flat token of each key; None: the tokens as they are, since no segment has a prefix."""


def _looks(starts: list[int], groups: list[int], device: torch.device | str) -> Looks:
    take: list[np.ndarray] = []
    queries: list[int] = []
    for first, end in pairwise(groups):
        prefix = np.arange(starts[first], starts[first + 1])
        for segment in range(first, end):
            own = np.arange(starts[segment], starts[segment + 1])
            if len(own):
                take.append(own if segment == first else np.concatenate([prefix, own]))
                queries.append(len(own))
    keys = [len(seen) for seen in take]
    ends, key_ends = (to_device(torch.tensor([0, *n]).cumsum(0).int(), device) for n in (queries, keys))
    return Looks(
        lengths=Lengths(ends, key_ends, max(queries), max(keys)),
        take=None if keys == queries else to_device(torch.from_numpy(np.concatenate(take)), device),
    )


def _attend_varlen(qkv: Tensor, at: Looks, varlen: Varlen, heads: int, kv_heads: int) -> Tensor:
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    q, kv = qkv.split([heads * width, 2 * kv_heads * width], dim=1)
    kv = kv if at.take is None else _Spread.apply(kv, at.take)
    k, v = kv.unflatten(1, (2, kv_heads, width)).unbind(1)
    return varlen(q.unflatten(1, (heads, width)), k, v, at.lengths).flatten(1)


# -- in torch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangles:
    """Where flat tokens lie in two rectangles, one of prefixes and one of branches, padded at the end of their rows.

    Their places are numbered together, the prefixes' first; every flat token has one place.
    """

    prefixes: tuple[int, int]
    """(rows, longest) of the rectangle of prefixes; longest is 0 if no rows share anything."""
    branches: tuple[int, int]
    """(rows, longest) of the rectangle of branches."""
    take: Tensor
    """[places] the flat token at each place; any at padding."""
    put: Tensor
    """[n] the place of each flat token."""
    padding: Tensor
    """The places that hold none."""
    group_of: Tensor
    """[branches] the prefix each branch goes on from."""
    allowed: Tensor | None
    """[branches, 1, longest, prefix + longest] what a branch's tokens may look at; None: itself only, causally."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: to_device(x, device) for n, x in held.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _rectangles(starts: np.ndarray, groups: np.ndarray) -> Rectangles:
    segments = [np.arange(start, stop) for start, stop in pairwise(starts)]
    prefixes = [segments[first] for first in groups[:-1]]
    members = [(g, s) for g in range(len(groups) - 1) for s in range(groups[g] + 1, groups[g + 1])]
    branches, group_of = [segments[s] for _, s in members], torch.tensor([g for g, _ in members])
    places = np.concatenate([_padded(prefixes), _padded(branches)])
    there = np.flatnonzero(places >= 0)
    put = np.empty(starts[-1], dtype=np.int64)
    put[places[there]] = there
    longest, width = max(map(len, prefixes)), max(map(len, branches))
    lengths = torch.tensor([len(prefixes[group]) for group, _ in members])
    return Rectangles(
        prefixes=(len(prefixes), longest),
        branches=(len(branches), width),
        take=torch.from_numpy(np.maximum(places, 0)),
        put=torch.from_numpy(put),
        padding=torch.from_numpy(np.flatnonzero(places < 0)),
        group_of=group_of,
        allowed=_allowed(lengths, width) if longest else None,
    )


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[rows x longest] the rows one after another, -1 after the shorter ones."""
    longest = max(map(len, rows))
    return np.concatenate([np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows])


def _allowed(prefix_lengths: Tensor, longest: int) -> Tensor:
    """What a branch's token may look at."""
    before = torch.arange(int(prefix_lengths.max()))[None, None, :] < prefix_lengths[:, None, None]
    own = torch.ones(longest, longest, dtype=torch.bool).tril()
    return torch.cat([before.expand(-1, longest, -1), own.expand(len(prefix_lengths), -1, -1)], dim=2)[:, None]


def _attend(qkv: Tensor, at: Rectangles, heads: int, kv_heads: int) -> Tensor:
    rows = _Take.apply(qkv, at.take, at.put, None)
    (groups, longest), (count, width) = at.prefixes, at.branches
    first, rest = rows.split([groups * longest, count * width])
    q, k, v = _heads(rest, count, heads, kv_heads)
    if at.allowed is None:
        mixed = _mixed(q, k, v, None)
    else:
        prefix_q, prefix_k, prefix_v = _heads(first, groups, heads, kv_heads)
        k, v = (
            torch.cat([_Spread.apply(before, at.group_of), own], dim=2)
            for before, own in ((prefix_k, k), (prefix_v, v))
        )
        mixed = torch.cat([_mixed(prefix_q, prefix_k, prefix_v, None), _mixed(q, k, v, at.allowed)])
    flat: Tensor = _Take.apply(mixed, at.put, at.take, at.padding)
    return flat


def _heads(rows: Tensor, count: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [rows, heads, length, width]."""
    length, width = len(rows) // count, rows.shape[1] // (heads + 2 * kv_heads)
    return rows.view(count, length, -1, width).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)


def _mixed(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """Attention, causal if there is no mask; [rows x longest, heads x width]."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


class _Take(Function):
    """Rows of x in the order of `take`. `back` undoes that; rows that are padding, in x or here, get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, padding)
        return x.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back, padding = ctx.saved_tensors
        found = grad.index_select(0, back)
        if padding is not None:
            found[padding] = 0
        return found, None, None, None


class _Spread(Function):
    """The rows of x that are named, some of them more than once; gradients are added up in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_of: Tensor) -> Tensor:
        ctx.save_for_backward(group_of)
        ctx.groups = len(x)
        return x.index_select(0, group_of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (group_of,) = ctx.saved_tensors
        wide = torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
        total = torch.zeros(ctx.groups, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, group_of, grad.to(wide)).to(grad.dtype), None
