"""Drawing tokens: random numbers that belong to a token, and an inverse-CDF draw that does not walk the vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rolecall.rollout.kernels import DecodeKernels
from rolecall.types import Sampling

_BLOCK = 256
_BROKEN = "the model's logits hold NaN or inf: its weights are broken; go back to an earlier checkpoint"
_U64 = npt.NDArray[np.uint64]


def row_keys(seed: int, step: int, prompt: int, samples: Sequence[int]) -> _U64:
    """A 64-bit key per answer to a prompt: the first four parts of (seed, step, prompt, sample, position)."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, step, prompt):
        key = _mix(key + np.uint64(part % 2**64))
    return _mix(key + np.array(samples).astype(np.uint64))


def uniforms(keys: _U64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a pure function of the row's key and the position of the token to draw."""
    return (_mix(keys + _mix(positions.astype(np.uint64))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: _U64) -> _U64:
    """One step of splitmix64 (Steele et al. 2014): a bijection of 64-bit words that leaves no visible pattern."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Drawn(NamedTuple):
    """Tokens and their log-probs under the tempered distribution."""

    tokens: Int[Tensor, "rows"]
    logprobs: Float[Tensor, "rows"]
    supports: list[bytes] | None = None
    """The ids that each could be drawn from, as `Trajectory.supports`, where sampling cuts the vocabulary. Log-probs are
    then of these."""


def draw(
    logits: Float[Tensor, "rows vocab"],
    sampling: Sampling,
    u: Float[Tensor, "rows"],
    *,
    kernels: DecodeKernels | None = None,
) -> Drawn:
    """One token per row: the most likely one at temperature 0, else the one whose slice of the CDF holds u.

    `kernels` for the logits' dtype do the plain case in compiled code.
    """
    if kernels is not None and sampling.temperature > 0 and not sampling.cuts_support:
        drawn = Drawn(*kernels.draw(logits.contiguous(), u, sampling.temperature))
        if bool((drawn.tokens < 0).any()):
            raise ValueError(_BROKEN)
        return drawn
    logits = logits if logits.dtype == torch.float64 else logits.float()
    z = logits if sampling.scoring_temperature == 1 else logits / sampling.scoring_temperature
    top = z.max(dim=-1)
    weights = (z - top.values[:, None]).exp_()  # not normalised: the draw scales u instead
    total = weights.sum(dim=-1)
    if not bool(total.isfinite().all()):
        raise ValueError(_BROKEN)
    supports = None
    if sampling.temperature == 0:
        tokens = top.indices
    else:
        if sampling.cuts_support:
            allowed = support(z, sampling)
            weights = weights.masked_fill(~allowed, 0)
        if sampling.records_support:
            total, supports = weights.sum(dim=-1), _ids_of(allowed)
        tokens = _invert(weights, u)
    logprobs = z.gather(1, tokens[:, None]).squeeze(1) - top.values - total.log()
    return Drawn(tokens, logprobs, supports)


def logprobs_of(logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, "rows"]) -> list[float]:
    """log p of a token per row, at temperature 1."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide.gather(1, targets[:, None]).squeeze(1) - wide.logsumexp(-1)).tolist()


def support(z: Float[Tensor, "rows vocab"], sampling: Sampling) -> Bool[Tensor, "rows vocab"]:
    """The tokens that may be drawn, from tempered logits: top_k, then top_p among these, then min_p.

    top_k keeps ties with the k-th. top_p keeps the smallest set of most likely tokens that reaches p.
    """
    allowed = torch.ones_like(z, dtype=torch.bool)
    if sampling.top_k is not None:
        allowed = z >= z.topk(min(sampling.top_k, z.shape[-1])).values[:, -1:]
    if sampling.top_p is not None and sampling.top_p < 1:
        probs, order = z.masked_fill(~allowed, -torch.inf).softmax(-1).sort(descending=True)
        before = probs.double().cumsum(-1) - probs
        allowed = allowed & torch.empty_like(allowed).scatter(1, order, before < sampling.top_p)
    if sampling.min_p:
        allowed = allowed & (z >= z.max(dim=-1, keepdim=True).values + float(np.log(sampling.min_p)))
    return allowed


def _ids_of(allowed: Bool[Tensor, "rows vocab"]) -> list[bytes]:
    """The ids of each row as `Trajectory.supports` holds them; empty where all are allowed."""
    flat = allowed.nonzero()[:, 1].to("cpu", torch.int32).numpy()
    ends = allowed.sum(dim=1).cumsum(0).tolist()
    parts = [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [b"" if len(part) == allowed.shape[1] else part.tobytes() for part in parts]


def _invert(weights: Float[Tensor, "rows vocab"], u: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """The first token whose cumulative weight exceeds u times the total: first its block of 256, then inside the block.

    A token of weight 0 is never drawn, whatever the rounding.
    """
    rows, vocab = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    block_ends = blocks.sum(-1).double().cumsum(-1)
    goal = u.double()[:, None] * block_ends[:, -1:]
    block = _first_beyond(block_ends, goal)
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)), 0)
    inside = blocks[torch.arange(rows, device=blocks.device), block[:, 0]].double().cumsum(-1)
    return (block * _BLOCK + _first_beyond(inside, goal - before)).squeeze(1)


def _first_beyond(ends: Float[Tensor, "rows n"], goal: Float[Tensor, "rows 1"]) -> Int[Tensor, "rows 1"]:
    """Index of the first entry above the goal; if rounding leaves none, of the last entry with any weight."""
    index = torch.searchsorted(ends, goal, right=True)
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(index, last)
