"""The trunk of Llama-family models on flat tokens: nothing is padded, and a prefix that rows share is computed once.

Rows of a batch that begin with the same tokens, such as the answers to one prompt, have the same hidden states there. So
the tokens are laid out as

    prefix of group 0 | branch | branch | ... | prefix of group 1 | branch | ...

and every matrix product runs over that one flat list. Attention is the only place where rows matter: a prefix attends to
itself, a branch to its group's prefix and to itself.

It computes what transformers' modules compute, from the same parameters; `PolicyModel` compares the two at first use.
$ROLECALL_FLAT=0 turns it off.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rolecall.policy.families import unsupported
from rolecall.policy.flat_ops import GatedMlp, Norm, Pad, Project, Rotate, Spread, Unpad


def unfit(model: Any) -> str | None:
    """Why the flat trunk cannot stand in for this model's own, or None if it can."""
    if os.environ.get("ROLECALL_FLAT") == "0":
        return "ROLECALL_FLAT is 0"
    if reason := unsupported(model):
        return reason
    if model.is_gradient_checkpointing:
        return "it recomputes activations (gradient checkpointing)"
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return "its weights are not in fp32"
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return "it is not on the CPU"
    if any(name.endswith(("q_norm.weight", "mlp.gate_proj.bias")) for name, _ in model.named_parameters()):
        return "it norms queries, or its gates have biases"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the tokens of a batch lie on the flat list, and in the two rectangles of attention.

    The rectangles, one of prefixes and one of branches, are padded at the end of their rows. Their places are numbered
    together, the prefixes' first; every flat token has one place.
    """

    source: Tensor
    """[n] the place of each flat token in ids.flatten()."""
    positions: Tensor
    """[n] its position in its row."""
    place: Tensor
    """[batch, time] the flat token of each position; -1 where there is none."""
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
    mask: Tensor | None
    """[branches, 1, longest, prefix + longest] what a branch's tokens may look at; None: itself only, causally."""


def layout_of(ids: Int[Tensor, "batch time"], needed: Bool[Tensor, "batch time"], *, dtype: torch.dtype) -> Layout:
    """The layout of all tokens that the needed positions depend on."""
    time = ids.shape[1]
    ends = (needed * torch.arange(1, time + 1)).amax(1).numpy()
    table = ids.numpy()
    groups = _groups(table, ends)
    place = np.full(ids.shape, -1, dtype=np.int64)
    source, positions, prefixes, branches, group_of = [], [], [], [], []
    n = 0

    def lay(row: int, start: int, stop: int) -> np.ndarray:
        nonlocal n
        source.append(row * time + np.arange(start, stop))
        positions.append(np.arange(start, stop))
        n += stop - start
        return np.arange(n - (stop - start), n)

    for number, (rows, shared) in enumerate(groups):
        prefix = lay(rows[0], 0, shared)
        prefixes.append(prefix)
        for row in rows:
            branch = lay(row, shared, ends[row])
            branches.append(branch)
            group_of.append(number)
            place[row, :shared], place[row, shared : ends[row]] = prefix, branch
    longest = max(map(len, prefixes))
    places = np.concatenate([_padded(prefixes), _padded(branches)])
    there = np.flatnonzero(places >= 0)
    put = np.empty(n, dtype=np.int64)
    put[places[there]] = there
    width = max(map(len, branches))
    lengths = torch.tensor([len(prefixes[group]) for group in group_of])
    return Layout(
        source=torch.from_numpy(np.concatenate(source)),
        positions=torch.from_numpy(np.concatenate(positions)),
        place=torch.from_numpy(place),
        prefixes=(len(prefixes), longest),
        branches=(len(branches), width),
        take=torch.from_numpy(np.maximum(places, 0)),
        put=torch.from_numpy(put),
        padding=torch.from_numpy(np.flatnonzero(places < 0)),
        group_of=torch.tensor(group_of),
        mask=_mask(lengths, width, dtype) if longest else None,
    )


def _groups(table: np.ndarray, ends: np.ndarray) -> list[tuple[list[int], int]]:
    """(rows, tokens they share) for rows laid out together: greedily, in the order of their tokens.

    A row joins the group before it if that saves more tokens than the group saves without it. Every row keeps at least
    one token of its own.
    """
    rows = sorted((row for row in range(len(table)) if ends[row]), key=lambda row: table[row, : ends[row]].tobytes())
    groups: list[tuple[list[int], int]] = []
    for row in rows:
        if groups:
            members, shared = groups[-1]
            limit = int(min(ends[row], ends[members[-1]])) - 1
            limit = min(limit, shared) if len(members) > 1 else limit
            same = table[row, :limit] == table[members[-1], :limit]
            common = limit if same.all() else int(same.argmin())
            if common * len(members) > shared * (len(members) - 1):
                groups[-1] = ([*members, row], common)
                continue
        groups.append(([row], 0))
    return groups


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[rows x longest] the rows one after another, -1 behind the shorter ones."""
    longest = max(map(len, rows))
    return np.concatenate([np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows])


def _mask(prefix_lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """0 where a branch's token may look, -inf elsewhere."""
    width = int(prefix_lengths.max())
    before = torch.arange(width)[None, None, :] < prefix_lengths[:, None, None]
    own = torch.ones(longest, longest, dtype=torch.bool).tril()
    allowed = torch.cat([before.expand(-1, longest, -1), own.expand(len(prefix_lengths), -1, -1)], dim=2)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)[:, None]


class FlatTrunk:
    """Stands in for `model.get_decoder()`: the same parameters, the same numbers, less work."""

    def __init__(self, model: Any) -> None:
        self._decoder, config = model.get_decoder(), model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def __call__(
        self, ids: Int[Tensor, "batch time"], needed: Bool[Tensor, "batch time"], *, dtype: torch.dtype
    ) -> Float[Tensor, "n width"]:
        """The last hidden states of the needed positions, row by row. At least one is needed."""
        layout = layout_of(ids, needed, dtype=dtype)
        decoder = self._decoder
        x = F.embedding(ids.flatten()[layout.source], decoder.embed_tokens.weight)
        cos, sin = decoder.rotary_emb(x, layout.positions[None])
        half = self.width // 2
        cos, sin = (t[0, :, :half].to(x.dtype).contiguous() for t in (cos, sin))
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            normed = _norm(layer.input_layernorm, x, dtype)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            qkv = Project.apply(normed, 3, *(p.weight for p in projections), *(p.bias for p in projections))
            qkv = Rotate.apply(qkv, cos, sin, self.heads + self.kv_heads)
            mixed = self._attend(qkv, layout)
            x = x + Project.apply(mixed, 1, attention.o_proj.weight, attention.o_proj.bias)
            normed = _norm(layer.post_attention_layernorm, x, dtype)
            x = x + GatedMlp.apply(normed, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        x = F.embedding(layout.place[needed], x)
        return _norm(decoder.norm, x, x.dtype)

    def _attend(self, qkv: Tensor, layout: Layout) -> Tensor:
        """[n, heads x width] what each token gathers from those it may look at."""
        rows = Pad.apply(qkv, layout.take, layout.put)
        (groups, longest), (count, width) = layout.prefixes, layout.branches
        first, rest = rows.split([groups * longest, count * width])
        q, k, v = self._heads(rest, count, width)
        if layout.mask is None:
            mixed = self._mixed(q, k, v, None)
        else:
            prefix_q, prefix_k, prefix_v = self._heads(first, groups, longest)
            k, v = (
                torch.cat([Spread.apply(before, layout.group_of), own], dim=2)
                for before, own in ((prefix_k, k), (prefix_v, v))
            )
            mixed = torch.cat([self._mixed(prefix_q, prefix_k, prefix_v, None), self._mixed(q, k, v, layout.mask)])
        return Unpad.apply(mixed, layout.take, layout.put, layout.padding)

    def _heads(self, rows: Tensor, count: int, length: int) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, length, width]."""
        heads = rows.view(count, length, -1, self.width).transpose(1, 2)
        return heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention, causal if there is no mask; [rows x longest, heads x width]."""
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return mixed.transpose(1, 2).reshape(-1, self.heads * self.width)


def _norm(norm: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.float64:  # transformers norms in fp32 whatever the weights, and fp64 is for exact comparisons
        return norm(x)
    return Norm.apply(x, norm.weight, norm.variance_epsilon, dtype)
