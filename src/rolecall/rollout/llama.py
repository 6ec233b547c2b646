"""The forward pass of Llama-family decoders with a preallocated cache, for sampling only: no autograd, no dropout.

Covers Llama, SmolLM, Qwen2, Qwen3 and Mistral: RMSNorm, rotary positions, grouped queries, gated SiLU, optional biases
and per-head query/key norms. Numbers follow transformers' modules (norms in fp32, rotary in the weights' dtype), so that
log-probs agree with the trainer's.

Shapes: rows are sequences in the cache's slots 0..rows-1; a step feeds one token to each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rolecall.policy.attend_ops import Segments, attend_into
from rolecall.policy.families import unsupported
from rolecall.policy.flat_ops import rotated
from rolecall.policy.sharded import whole
from rolecall.rollout.engine import check_weights, weights_hash
from rolecall.rollout.kernels import DecodeKernels, kernels_for
from rolecall.rollout.linear import Linear

Attend = Callable[[int, Tensor, Any], Tensor]
"""(layer, qkv [rows, ...], out) -> what each token gathers [rows, heads x width], in `out` where there is one."""

RoomFor = Callable[[str | int, int, int], Any]
"""(name, rows, width) -> memory to write to, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The weights of one decoder layer, projections of the same input joined."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class KVCache:
    """Keys and values of `slots` sequences of up to `length` tokens, all layers."""

    def __init__(self, data: Float[Tensor, "layers 2 slots heads length width"]) -> None:
        self.data, self.slots, self.length = data, data.shape[2], data.shape[4]

    def put(self, slot: int, kv: Float[Tensor, "layers 2 heads time width"]) -> None:
        """Write a prefix into a slot."""
        self.data[:, :, slot, :, : kv.shape[3]] = kv

    def get(self, slot: int, length: int) -> Float[Tensor, "layers 2 heads time width"]:
        """A copy of a slot's first `length` tokens."""
        return self.data[:, :, slot, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence to another slot."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


class LlamaDecoder:
    """Weights and forward passes. Holds no sequence state: caches belong to the caller."""

    def __init__(self, model: Any, *, dtype: torch.dtype) -> None:
        config = model.config
        reason = unsupported(model)
        if reason is not None:
            raise ValueError(f"the native engine cannot run this model: {reason}; use the hf engine")
        self.dtype = dtype
        self.layer_count: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps: float = config.rms_norm_eps
        self.vocabulary: int = config.vocab_size
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        rotary = model.get_decoder().rotary_emb
        self._frequencies: Tensor = rotary.inv_freq.detach().clone().float()
        self._rotary_scale: float = rotary.attention_scaling
        self._table = torch.zeros(2, 0, self.head_dim // 2)
        self.layers: list[Layer] = []
        self.head: Linear | None = None
        self._rooms: dict[str | int, Tensor] = {}
        self.kernels = kernels_for(dtype)

    def load(self, weights: Mapping[str, Tensor]) -> str:
        """Take a copy of the weights in this decoder's dtype and return the hash of that copy."""
        check_weights(weights, self._shapes)
        self.release()  # what is replaced need not stand beside what replaces it
        digest = weights_hash(weights, self.dtype)
        self.embedding = self._own(weights["model.embed_tokens.weight"])
        self.norm = self._own(weights["model.norm.weight"])
        head = weights.get("lm_head.weight")
        self.head = Linear(self.embedding if head is None else self._own(head), None)
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(self.layer_count)]
        return digest

    def release(self) -> None:
        """Free the weights until the next `load`."""
        self.layers, self._rooms = [], {}
        self.embedding = self.norm = torch.zeros(0, dtype=self.dtype)
        self.head = None

    def _own(self, weight: Tensor) -> Tensor:
        return whole(weight.detach()).to(self.dtype, copy=True)

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> Layer:
        def join(block: str, *names: str) -> Linear:
            parts = [f"{prefix}{block}.{name}_proj" for name in names]
            weight = torch.cat([whole(weights[f"{part}.weight"].detach()).to(self.dtype) for part in parts])
            given = [weights[f"{part}.bias"] for part in parts if f"{part}.bias" in weights]
            biases = [whole(bias.detach()).to(self.dtype) for bias in given]
            return Linear(weight, torch.cat(biases) if biases else None)

        def norm(name: str) -> Tensor | None:
            held = weights.get(f"{prefix}{name}.weight")
            return None if held is None else self._own(held)

        return Layer(
            input_norm=self._own(weights[prefix + "input_layernorm.weight"]),
            qkv=join("self_attn", "q", "k", "v"),
            query_norm=norm("self_attn.q_norm"),
            key_norm=norm("self_attn.k_norm"),
            out=join("self_attn", "o"),
            post_norm=self._own(weights[prefix + "post_attention_layernorm.weight"]),
            gate_up=join("mlp", "gate", "up"),
            down=join("mlp", "down"),
        )

    def cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache for this model."""
        return KVCache(torch.zeros(self._kv_shape(slots, length), dtype=self.dtype))

    def _kv_shape(self, rows: int, time: int) -> tuple[int, ...]:
        return self.layer_count, 2, rows, self.kv_heads, time, self.head_dim

    def bytes_per_token(self) -> int:
        """What one token of one sequence takes in a cache."""
        return 2 * self.layer_count * self.kv_heads * self.head_dim * self.dtype.itemsize

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Raw logits, valid until they are asked for again."""
        assert self.head is not None
        return self.head(hidden, self._room("logits", len(hidden), self.vocabulary))

    def step(
        self, tokens: Int[Tensor, "rows"], lengths: Int[Tensor, "rows"], cache: KVCache
    ) -> Float[Tensor, "rows width"]:
        """Feed one token to each of the first rows of the cache, `lengths` tokens long so far; hidden states after it,
        valid until the next step.
        """
        kernels = self.kernels
        if kernels is None:
            return self._run(self.embedding[tokens], self._step_attention(lengths, cache), _TORCH, _no_room)
        cos, sin = (x.float().contiguous() for x in self._rotation(lengths))

        def attend(layer: int, qkv: Tensor, out: Tensor) -> Tensor:
            return kernels.attend(qkv, cos, sin, cache.data[layer, 0], cache.data[layer, 1], lengths, out=out)

        return self._run(self.embedding[tokens], attend, kernels, self._room)

    def prefill(
        self, ids: Int[Tensor, "rows time"]
    ) -> tuple[Float[Tensor, "rows time width"], Float[Tensor, "layers 2 rows heads time width"]]:
        """Hidden states and keys/values of whole prompts, right-padded (causal, so padding after them changes nothing).

        Compiled, a row's numbers do not depend on the rows beside it.
        """
        rows, time = ids.shape
        x, kept = self.embedding[ids.flatten()], torch.empty(self._kv_shape(rows, time), dtype=self.dtype)
        if self.kernels is None:
            hidden = self._run(x, self._prefill_attention(rows, time, kept), _TORCH, _no_room)
            return hidden.view(rows, time, -1), kept
        cos, sin = (t.float().repeat(rows, 1) for t in self._rotation(torch.arange(time)))
        segments = Segments.of_rows(rows, time)

        def attend(layer: int, qkv: Tensor, out: Tensor) -> Tensor:
            rotated(qkv, cos, sin, self.heads + self.kv_heads, 1.0)
            kv = qkv.view(rows, time, -1, self.head_dim)[:, :, self.heads :].transpose(1, 2)
            kept[layer, 0], kept[layer, 1] = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
            attend_into(out, qkv, segments, heads=self.heads, kv_heads=self.kv_heads)
            return out

        return self._run(x, attend, self.kernels, self._own_room).view(rows, time, -1), kept

    def go_on(
        self, ids: Sequence[Int[Tensor, "time"]], pasts: Sequence[Float[Tensor, "layers 2 heads start width"]]
    ) -> tuple[list[Float[Tensor, "time width"]], list[Float[Tensor, "layers 2 heads longer width"]]]:
        """Hidden states of tokens that follow cached prefixes of any lengths, and the keys/values of prefix and tokens.

        Each sequence attends by itself and all else is done token by token, so that, compiled, its numbers do not depend on
        the others.
        """
        times, starts = [len(x) for x in ids], [past.shape[3] for past in pasts]
        shape = self._kv_shape(1, 0)
        kept = [
            past.new_empty(*shape[:2], shape[3], start + t, shape[5])
            for past, start, t in zip(pasts, starts, times, strict=True)
        ]
        seen = [
            torch.arange(start + t) <= torch.arange(start, start + t)[:, None]
            for start, t in zip(starts, times, strict=True)
        ]
        positions = torch.cat([torch.arange(start, start + t) for start, t in zip(starts, times, strict=True)])
        cos, sin = (x[:, None] for x in self._rotation(positions))
        for kv, past, start in zip(kept, pasts, starts, strict=True):
            kv[:, :, :, :start] = past

        def attend(layer: int, qkv: Tensor, out: Tensor | None) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in self._turned(qkv.view(1, len(qkv), -1, self.head_dim), cos, sin))
            mixed = []
            for kv, mask, start, own in zip(kept, seen, starts, _spans(times), strict=True):
                kv[layer, 0, :, start:], kv[layer, 1, :, start:] = k[:, own], v[:, own]
                keys, values = kv[layer, :, None]
                found = F.scaled_dot_product_attention(
                    q[None, :, own], keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
                )
                mixed.append(found[0].transpose(0, 1).reshape(len(mask), -1))
            return torch.cat(mixed)

        x, ops, room = self.embedding[torch.cat(list(ids))], self.kernels, self._own_room
        hidden = self._run(x, attend, _TORCH, _no_room) if ops is None else self._run(x, attend, ops, room)
        return list(hidden.split(times)), kept

    def _run(self, x: Tensor, attend: Attend, ops: "DecodeKernels | _TorchOps", room_for: RoomFor) -> Tensor:
        """All layers over x [rows, width], which is overwritten, without allocating in the loop if there is room."""
        rows, width, middle = *x.shape, self.layers[0].down.in_features
        room = {n: room_for(n, rows, n) for n in {self.layers[0].qkv.out_features, 2 * middle}}
        mixed_room, gated_room = room_for("mixed", rows, self.heads * self.head_dim), room_for("gated", rows, middle)
        normed_room, added_room = room_for("normed", rows, width), room_for("added", rows, width)
        normed = ops.add_norm(x, None, self.layers[0].input_norm, self.eps, out=normed_room)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(normed, room[layer.qkv.out_features])
            if layer.query_norm is not None and layer.key_norm is not None:
                qkv = self._with_normed_heads(qkv, layer.query_norm, layer.key_norm)
            added = layer.out(attend(i, qkv, mixed_room), added_room)
            normed = ops.add_norm(x, added, layer.post_norm, self.eps, out=normed_room)
            gated = ops.gated(layer.gate_up(normed, room[2 * middle]), out=gated_room)
            after = self.layers[i + 1].input_norm if i + 1 < self.layer_count else self.norm
            normed = ops.add_norm(x, layer.down(gated, added_room), after, self.eps, out=normed_room)
        return normed

    def _step_attention(self, lengths: Tensor, cache: KVCache) -> Attend:
        """One token's attention in torch."""
        rows, reach = len(lengths), int(lengths.max()) + 1
        index = torch.arange(rows)
        hole = torch.arange(reach) > lengths[:, None]
        mask = torch.zeros(rows, 1, reach).masked_fill_(hole[:, None], -torch.inf) if bool(hole.any()) else None
        cos, sin = (x[:, None, None] for x in self._rotation(lengths))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32

        def attend(layer: int, qkv: Tensor, out: None) -> Tensor:
            q, k, v = self._turned(qkv.view(rows, 1, -1, self.head_dim), cos, sin)
            keys, values = cache.data[layer, 0], cache.data[layer, 1]
            keys[index, :, lengths] = k.squeeze(1)
            values[index, :, lengths] = v.squeeze(1)
            # In fp32: as exact as fused attention, and bf16 products of a part of a cache are slow.
            keys, values = (x[:rows, :, :reach].flatten(0, 1).to(wide) for x in (keys, values))
            # Queries that share a key head are the rows of one small product.
            grouped = q.reshape(rows * self.kv_heads, -1, self.head_dim).to(wide)
            scores = torch.bmm(grouped, keys.transpose(1, 2)).view(rows, self.heads, reach).mul_(self.head_dim**-0.5)
            if mask is not None:
                scores.add_(mask)
            weights = scores.softmax(-1).view(rows * self.kv_heads, -1, reach)
            return torch.bmm(weights, values).to(q.dtype).view(rows, -1)

        return attend

    def _prefill_attention(self, rows: int, time: int, kept: Tensor) -> Attend:
        """A prompt's attention in torch, which also fills `kept`."""
        cos, sin = (x[:, None] for x in self._rotation(torch.arange(time)))

        def attend(layer: int, qkv: Tensor, out: None) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in self._turned(qkv.view(rows, time, -1, self.head_dim), cos, sin))
            kept[layer, 0], kept[layer, 1] = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
            return mixed.transpose(1, 2).reshape(rows * time, -1)

        return attend

    def _turned(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, time, heads, width], with (a, b) -> (a cos - b sin, b cos + a sin) on the two
        halves of each query and key."""
        turned, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        a, b = turned.chunk(2, dim=-1)
        q, k = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).split([self.heads, self.kv_heads], dim=2)
        return q, k, v

    def _room(self, name: str | int, rows: int, width: int) -> Tensor:
        """[rows, width] that is written to again and again: fresh memory costs more than what is done with it."""
        held = self._rooms.get(name)
        if held is None or len(held) < rows:
            held = self._rooms[name] = torch.empty(rows, width, dtype=self.dtype)
        return held[:rows]

    def _own_room(self, name: str | int, rows: int, width: int) -> Tensor:
        """[rows, width] of its own, where a step's hidden states may be in use."""
        return torch.empty(rows, width, dtype=self.dtype)

    def _with_normed_heads(self, qkv: Tensor, query_norm: Tensor, key_norm: Tensor) -> Tensor:
        """qkv [rows, ...] with queries and keys normed per head (Qwen3)."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return torch.cat([_normed(q, query_norm, self.eps), _normed(k, key_norm, self.eps), v], dim=1).flatten(1)

    def _rotation(self, positions: Int[Tensor, "n"]) -> tuple[Tensor, Tensor]:
        """cos and sin [n, head_dim / 2] of the rotary angles at these positions."""
        reach = int(positions.max()) + 1
        if reach > self._table.shape[1]:
            angles = torch.arange(2 * reach, dtype=torch.float32)[:, None] * self._frequencies
            self._table = (torch.stack([angles.cos(), angles.sin()]) * self._rotary_scale).to(self.dtype)
        cos, sin = self._table[:, positions]
        return cos, sin


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Where pieces of these lengths lie, end to end."""
    edges = [0, *accumulate(lengths)]
    return [slice(start, end) for start, end in pairwise(edges)]


def _no_room(name: str | int, rows: int, width: int) -> None:
    return None


class _TorchOps:
    """The functions of `DecodeKernels` in torch. What they return counts; there is no `out`."""

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, out: Tensor | None) -> Tensor:
        """Add to x in place, and norm it."""
        return _normed(x if added is None else x.add_(added), weight, eps)

    def gated(self, gate_up: Tensor, *, out: Tensor | None) -> Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


_TORCH = _TorchOps()
