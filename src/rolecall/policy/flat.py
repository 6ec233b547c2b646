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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rolecall.policy.attend_ops import Segments, attend
from rolecall.policy.families import unsupported
from rolecall.policy.flat_ops import AddNorm, GatedMlp, Norm, Project, Rotate
from rolecall.policy.packing import rounded_up
from rolecall.policy.varlen import Varlen
from rolecall.transfer import to_device


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
    if any(name.endswith(("q_norm.weight", "mlp.gate_proj.bias")) for name, _ in model.named_parameters()):
        return "it norms queries, or its gates have biases"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the tokens of a batch lie on the flat list."""

    source: Tensor
    """[n] the place of each flat token in ids.flatten()."""
    positions: Tensor
    """[n] its position in its row."""
    place: Tensor
    """[batch, time] the flat token of each position; -1 where there is none."""
    segments: Segments
    """Which tokens look at which: a group's prefix is its first segment, and every branch one more."""


def layout_of(
    ids: Int[Tensor, "batch time"], needed: Bool[Tensor, "batch time"], dtype: torch.dtype = torch.float32
) -> Layout:
    """The layout of all tokens that the needed positions depend on.

    Behind them are as many more as products in the working dtype are better for: each sees itself alone, and nobody
    asks for it.
    """
    time = ids.shape[1]
    ends = (needed * torch.arange(1, time + 1)).amax(1).numpy()
    place = np.full(ids.shape, -1, dtype=np.int64)
    source, positions, starts, groups = [], [], [0], [0]

    def lay(row: int, start: int, stop: int) -> np.ndarray:
        source.append(row * time + np.arange(start, stop))
        positions.append(np.arange(start, stop))
        starts.append(int(starts[-1] + stop - start))
        return np.arange(*starts[-2:])

    for rows, shared in _groups(ids.numpy(), ends):
        prefix = lay(rows[0], 0, shared)
        for row in rows:
            place[row, :shared], place[row, shared : ends[row]] = prefix, lay(row, shared, ends[row])
        groups.append(len(starts) - 1)
    if missing := rounded_up(starts[-1], dtype) - starts[-1]:
        source.append(np.zeros(missing, dtype=np.int64))
        positions.append(np.zeros(missing, dtype=np.int64))
        starts += range(starts[-1], starts[-1] + missing + 1)  # an empty prefix, and branches of one token
        groups.append(len(starts) - 1)
    return Layout(
        source=torch.from_numpy(np.concatenate(source)),
        positions=torch.from_numpy(np.concatenate(positions)),
        place=torch.from_numpy(place),
        segments=Segments(starts=torch.tensor(starts), groups=torch.tensor(groups)),
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


class FlatTrunk:
    """Stands in for `model.get_decoder()`: the same parameters, the same numbers, less work."""

    def __init__(self, model: Any) -> None:
        self._decoder, config = model.get_decoder(), model.config
        self.varlen: Varlen | None = None
        """What attention is computed with off the CPU."""
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    @property
    def first_norm(self) -> nn.Parameter:
        """The first weight after the embedding: its gradient comes through all layers."""
        weight: nn.Parameter = self._decoder.layers[0].input_layernorm.weight
        return weight

    def __call__(
        self, ids: Int[Tensor, "batch time"], needed: Bool[Tensor, "batch time"], *, dtype: torch.dtype
    ) -> Float[Tensor, "n width"]:
        """The last hidden states of the needed positions, row by row. At least one is needed; ids and needed are on the host."""
        layout = layout_of(ids, needed, dtype)
        decoder = self._decoder
        device = decoder.embed_tokens.weight.device
        segments = replace(layout.segments, device=device, varlen=self.varlen)
        # Positions that are not needed are of no use after the last layer's keys and values.
        kept, wanted = torch.unique(layout.place[needed], return_inverse=True)
        kept = F.pad(kept, (0, rounded_up(len(kept), dtype) - len(kept)))
        if 8 * len(kept) > 7 * len(layout.source):  # not worth products of another size
            kept, wanted = None, layout.place[needed]
        kept = None if kept is None else to_device(kept, device)
        x = F.embedding(to_device(ids.flatten()[layout.source], device), decoder.embed_tokens.weight)
        cos, sin = decoder.rotary_emb(x, to_device(layout.positions, device)[None])
        half = self.width // 2
        cos, sin = (t[0, :, :half].to(x.dtype).contiguous() for t in (cos, sin))
        added, last = None, len(decoder.layers) - 1
        for number, layer in enumerate(decoder.layers):
            one = getattr(layer, "flat_layer", None) or partial(flat_layer, layer)  # a sharded layer gathers itself
            x, added = one(
                x,
                added,
                cos,
                sin,
                segments=segments,
                heads=(self.heads, self.kv_heads),
                kept=kept if number == last else None,
                dtype=dtype,
            )
        return F.embedding(to_device(wanted, device), _norm(decoder.norm, x if added is None else x + added, x.dtype))


def flat_layer(
    layer: Any,
    x: Tensor,
    added: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    segments: Segments,
    heads: tuple[int, int],
    kept: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One decoder layer: the sum of all before it, and what it adds. `added` is of the layer before, `kept` as above."""
    attention, mlp = layer.self_attn, layer.mlp
    if added is None:
        normed = _norm(layer.input_layernorm, x, dtype)
    else:
        x, normed = _add_norm(layer.input_layernorm, x, added)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    qkv = Project.apply(normed, 3, *(p.weight for p in projections), *(p.bias for p in projections))
    qkv = Rotate.apply(qkv, cos, sin, sum(heads))
    mixed = attend(qkv, segments, heads=heads[0], kv_heads=heads[1])
    if kept is not None:
        x, mixed = F.embedding(kept, x), F.embedding(kept, mixed)
    added = Project.apply(mixed, 1, attention.o_proj.weight, attention.o_proj.bias)
    x, normed = _add_norm(layer.post_attention_layernorm, x, added)
    return x, GatedMlp.apply(normed, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


def _norm(norm: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.float64:  # transformers norms in fp32 whatever the weights, and fp64 is for exact comparisons
        return norm(x)
    return Norm.apply(x, norm.weight, norm.variance_epsilon, dtype)


def _add_norm(norm: Any, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return x + added, norm(x + added)
    total, normed = AddNorm.apply(x, added, norm.weight, norm.variance_epsilon)
    return total, normed
