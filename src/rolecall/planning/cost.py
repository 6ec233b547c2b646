"""The cost model: seconds and bytes of a step from the model's shape, the batch and the hardware. All formulas, nothing measured.

    parameters    P = V d (1 if tied, else 2) + L (d a + 2 d b + a d + 3 d f + 2 d) + d,   a = heads x head size, b = key heads x head size
    training      R = T (6 P epochs, 8 P with recomputation, + 2 P for each scoring pass + attention) / (N F u)
    decoding      one token of every answer that grows takes max((2 P + B c K) / (W w), 2 P B / (F u)) on one replica:
                  its weights and the cache (K bytes a token, c tokens) are read once, or its products take longer
    generation    G = max(crowd, longest); crowd = A / (replicas x B / decoding) + prefill, longest = its tokens x decoding of a nearly
                  empty replica + prefill
    sync          S = 2 P / network
    step          G + R + S in turn; max(crowd, longest / k, R) + S with async.ahead k, k steps being sampled side by side; in flight, where
                  weights change inside answers and none is waited for, max(crowd, R) + S
    memory        16 P / N (weights, gradients, two moments, in float32) + 4 P / N (reference) + two layers gathered + activations

T are the tokens trained on, A those sampled, N the GPUs that train, F their products per second and u the share of it that is
reached, W the memory's bandwidth and w the share of it that is reached, B the answers that grow at a time on a replica.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from rolecall.planning.hardware import Device

SERVER_SHARE = 0.9
"""The part of a GPU's memory that weights and caches of an engine may take."""
TRAINER_SHARE = 0.92
"""The part that a trainer may take: the rest is fragmentation and the library's own."""
_LAYER_ACTIVATIONS = 34
"""Bytes a token and unit of width that one layer keeps for its backward pass in 16 bits (Korthikanti et al. 2022, without
attention's square part, which fused attention does not keep)."""
_CHUNK_BYTES = 3 * 32e6
"""Logits exist in chunks of 32 MB: they, their softmax and its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A dense decoder."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From a model's config.json; a `KeyError` names what it lacks, a `ValueError` what is no size."""

        def size(name: str, default: int | None = None) -> int:
            given = config[name] if default is None else config.get(name) or default
            if not isinstance(given, int) or given < 1:
                raise ValueError(f"{name} is {given!r}, not a number above 0")
            return given

        heads, width = size("num_attention_heads"), size("hidden_size")
        return cls(
            width=width,
            layers=size("num_hidden_layers"),
            heads=heads,
            key_heads=size("num_key_value_heads", heads),
            head_size=size("head_dim", width // heads),
            feed_forward=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        asked, kept = self.heads * self.head_size, self.key_heads * self.head_size
        return self.width * (2 * asked + 2 * kept + 3 * self.feed_forward + 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.layers * self.layer + self.width

    @property
    def cache_per_token(self) -> int:
        """Bytes that an engine keeps of a token, in 16 bits."""
        return 2 * 2 * self.layers * self.key_heads * self.head_size

    def attention(self, length: float) -> float:
        """Operations of attention for a token of a sequence of this length, forward, on average."""
        return 4 * self.layers * self.heads * self.head_size * length / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step samples and trains on."""

    answers: int
    prompt: float
    """Tokens of a prompt, on average."""
    answer: float
    """Tokens of an answer, on average."""
    longest: float
    """Tokens of the longest answer."""
    same_prompt: int = 1
    """Answers that share a prompt, which an engine reads once."""
    epochs: int = 1
    scoring: int = 1
    """Passes without gradient: old log-probs, reference."""
    recompute: bool = True
    """Whether activations are computed again in the backward pass."""
    token_budget: int = 8192
    """Tokens of a micro-batch."""

    @property
    def length(self) -> float:
        """Tokens of a sequence."""
        return self.prompt + self.answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Which part of the data sheet is reached."""

    products: float
    """Of the matrix products."""
    bandwidth: float
    """Of the memory's bandwidth."""


LIKELY = Reached(products=0.35, bandwidth=0.6)
WORST, BEST = Reached(products=0.2, bandwidth=0.4), Reached(products=0.5, bandwidth=0.8)
"""The error bars: what trainers and engines of several libraries are reported to reach."""


def train_seconds(shape: Shape, batch: Batch, device: Device, *, gpus: int, reached: Reached) -> float:
    """R: optimiser steps and scoring passes."""
    p, attention = shape.parameters, shape.attention(batch.length)
    forward = 2 * p + attention
    per_token = forward * ((4 if batch.recompute else 3) * batch.epochs + batch.scoring)
    return batch.answers * batch.length * per_token / (gpus * device.flops * reached.products)


def decode_seconds(
    shape: Shape, device: Device, *, growing: float, context: float, gpus: int, reached: Reached
) -> float:
    """Seconds for a token of every answer that grows on one replica of `gpus` GPUs."""
    read = 2 * shape.parameters + growing * context * shape.cache_per_token
    products = growing * (2 * shape.parameters + 2 * shape.attention(context))
    return max(
        read / (gpus * device.bandwidth * reached.bandwidth), products / (gpus * device.flops * reached.products)
    )


def replica_gpus(shape: Shape, device: Device, *, context: float) -> int | None:
    """The GPUs of a replica: the smallest power of two that holds the weights and one answer; None if 64 do not."""
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        if 2 * shape.parameters + context * shape.cache_per_token <= gpus * device.memory * SERVER_SHARE:
            return gpus
    return None


def slots(shape: Shape, device: Device, *, gpus: int, context: float) -> int:
    """Answers that a replica's memory has room for at a time."""
    free = gpus * device.memory * SERVER_SHARE - 2 * shape.parameters
    return max(1, int(free // (context * shape.cache_per_token)))


def generate_seconds(shape: Shape, batch: Batch, device: Device, *, gpus: int, reached: Reached) -> tuple[float, float]:
    """(all answers at the rate of full replicas, the longest answer alone); a step's sampling takes the larger of the two."""
    full = batch.prompt + batch.longest
    each = replica_gpus(shape, device, context=full)
    if each is None or each > gpus:
        return float("inf"), float("inf")
    replicas = gpus // each
    growing = min(ceil(batch.answers / replicas), slots(shape, device, gpus=each, context=full))
    context = batch.prompt + batch.answer / 2
    how: dict[str, Any] = {"gpus": each, "reached": reached}
    rate = growing / decode_seconds(shape, device, growing=growing, context=context, **how)
    crowded = batch.answers * batch.answer / (replicas * rate)
    alone = batch.longest * decode_seconds(shape, device, growing=1, context=full / 2, **how)
    prompts = batch.answers / batch.same_prompt * batch.prompt
    prefill = prompts * 2 * shape.parameters / (replicas * each * device.flops * reached.products)
    return crowded + prefill, alone + prefill


def sync_seconds(shape: Shape, *, network: float) -> float:
    """S: the weights in 16 bits over the network, to all engines at once."""
    return 2 * shape.parameters / network


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one GPU that trains."""

    states: float
    """Weights, gradients and the optimiser's moments."""
    reference: float
    gathered: float
    """Layers that are whole while they are computed: one, and the next."""
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.reference + self.gathered + self.activations


def trainer_memory(shape: Shape, batch: Batch, *, gpus: int, reference: bool, lora_rank: int | None = None) -> Memory:
    """Sharded over `gpus` GPUs (fsdp2). With LoRA all weights are there, and only adapters have gradients and moments."""
    p, tokens = shape.parameters, batch.token_budget
    kept = shape.layers if not batch.recompute else 1
    activations = tokens * shape.width * (2 * shape.layers + _LAYER_ACTIVATIONS * kept) + _CHUNK_BYTES
    if lora_rank is None:
        states = 16 * p / gpus
    else:
        adapters = shape.layers * lora_rank * (9 * shape.width + 3 * shape.feed_forward)
        states = (4 * p + 16 * adapters) / gpus
    return Memory(
        states=states,
        reference=4 * p / gpus if reference and lora_rank is None else 0.0,
        gathered=0.0 if gpus == 1 else 2 * 4 * shape.layer,
        activations=activations,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of a step."""

    crowd: float
    """All answers at the rate of full replicas."""
    longest: float
    """The longest answer alone."""
    train: float
    sync: float

    @property
    def generate(self) -> float:
        """From the first prompt to the last answer."""
        return max(self.crowd, self.longest)

    def seconds(self, ahead: int | None) -> float:
        """With sampling so many steps ahead of training; None: in flight."""
        if ahead == 0:
            return self.generate + self.train + self.sync
        tail = 0.0 if ahead is None else self.longest / ahead
        return max(self.crowd, tail, self.train) + self.sync

    @property
    def useful_ahead(self) -> int:
        """The steps ahead, at most 8, beyond which the longest answer no longer holds up a step."""
        return min(8, max(1, ceil(self.longest / max(self.crowd, self.train))))


def step(
    shape: Shape, batch: Batch, device: Device, *, train: int, sample: int, network: float, reached: Reached
) -> Step:
    """A step on so many GPUs that train and that sample; with 0 to sample, the same GPUs do both in turn."""
    crowd, longest = generate_seconds(shape, batch, device, gpus=sample or train, reached=reached)
    return Step(
        crowd=crowd,
        longest=longest,
        train=train_seconds(shape, batch, device, gpus=train, reached=reached),
        sync=sync_seconds(shape, network=network),
    )


def balanced(shape: Shape, batch: Batch, device: Device, *, gpus: int, network: float) -> int:
    """Of `gpus` GPUs how many should sample, so that the slower side of a step is within 3 % of the quickest there is, and both
    together take least; 0 for one GPU."""

    def sides(sample: int) -> tuple[float, float]:
        found = step(shape, batch, device, train=gpus - sample, sample=sample, network=network, reached=LIKELY)
        return found.generate, found.train

    all_sides = {sample: sides(sample) for sample in range(1, gpus)}
    quickest = min((max(both) for both in all_sides.values()), default=0.0)
    near = [sample for sample, both in all_sides.items() if max(both) <= 1.03 * quickest]
    return min(near, key=lambda sample: sum(all_sides[sample]), default=0)


def largest_budget(
    shape: Shape, batch: Batch, device: Device, *, gpus: int, reference: bool, lora_rank: int | None
) -> int | None:
    """The largest micro-batch, in tokens, a power of two up to 65,536, with which a trainer fits; None if none does, or none holds
    the longest answer."""
    for tokens in (2**n for n in range(16, 8, -1)):
        if tokens < batch.prompt + batch.longest:
            return None
        needed = trainer_memory(
            shape, replace(batch, token_budget=tokens), gpus=gpus, reference=reference, lora_rank=lora_rank
        )
        if needed.total <= device.memory * TRAINER_SHARE:
            return tokens
    return None
