"""A language model's head over chunks of positions: raw logits, what is read from them, and their gradient.

Compiled where there is a compiler, else in torch. Logits are in the working dtype: that of autocast if it is on, else the
weight's. The compiled functions read them as they are and write the gradient in their place; torch needs several copies
in fp32.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rolecall.policy.compiled import kernels
from rolecall.policy.packing import rounded_up
from rolecall.types import Supports

_SOURCE = Path(__file__).with_name("head.c")
_NEVER = -1e15
"""The logit of a token that could not be drawn: its probability is exactly 0, and 0 times it is 0, not NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The map from a hidden state to tempered logits."""

    weight: Float[Tensor, "vocab width"]
    """[vocab, width]."""
    bias: Float[Tensor, "vocab"] | None = None
    """[vocab]."""
    temperature: float = 1.0
    """The sampling temperature. 0 (greedy) scores at 1."""
    logit_scale: float = 1.0
    """Multiplies raw logits (Cohere; the inverse of Granite's logits_scaling)."""
    soft_cap: float | None = None
    """Gemma's cap: cap tanh(logits / cap)."""

    @property
    def slope(self) -> float:
        """d z / d raw logit, without the cap."""
        return self.logit_scale / (self.temperature if self.temperature > 0 else 1.0)

    def tempered(self, raw: Tensor) -> Tensor:
        """Tempered logits in fp32 (fp64 stays)."""
        raw = raw if raw.dtype == torch.float64 else raw.float()
        if self.soft_cap is None:
            return raw if self.slope == 1 else raw * self.slope
        capped = (raw * (self.logit_scale / self.soft_cap)).tanh_().mul_(self.soft_cap)
        return capped.div_(self.temperature if self.temperature > 0 else 1.0)

    def raw_gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the raw logits from that of the tempered ones; overwrites `grad`."""
        if self.soft_cap is not None:
            temperature = self.temperature if self.temperature > 0 else 1.0
            grad = grad * (1 - (logits * (temperature / self.soft_cap)).square())
        return grad if self.slope == 1 else grad.mul_(self.slope)


class HeadPass:
    """A head on its way over the chunks of one batch: its weight is cast to the working dtype once."""

    def __init__(self, head: Head) -> None:
        self.head = head
        kind = head.weight.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        self.weight = head.weight.to(self.dtype)
        self._bias = None if head.bias is None else head.bias.to(self.dtype)
        plain = head.soft_cap is None and head.slope > 0
        self._kernels = kernels(_SOURCE, self.dtype) if plain and kind == "cpu" else None

    def rows(self, hidden: Tensor) -> Tensor:
        """A chunk's hidden states in the working dtype, with rows of zeros after them if that makes products faster."""
        missing = rounded_up(len(hidden), self.dtype) - len(hidden)
        return torch.nn.functional.pad(hidden.to(self.dtype), (0, 0, 0, missing))

    def raw(self, hidden: Tensor) -> Tensor:
        """Raw logits [rows, vocab] of a chunk; there may be more rows than hidden states, which mean nothing."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(self.rows(hidden), self.weight, self._bias)

    def logits(self, hidden: Tensor, kept: Supports | None = None) -> Tensor:
        """Tempered logits of a chunk, in fp32 (fp64 stays)."""
        return self._within(kept, self.head.tempered(self.raw(hidden)[: len(hidden)]))

    def score(self, raw: Tensor, targets: Tensor, kept: Supports | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(log-prob of the targets, entropy, logsumexp) of a chunk of raw logits, among the `kept` ids; may overwrite
        the others' logits."""
        raw = raw[: len(targets)]
        if self._kernels is None:
            return _score(self._within(kept, self.head.tempered(raw)), targets)
        self._within(kept, raw)
        logprobs, entropy, lse = (torch.empty(len(raw)) for _ in range(3))
        tensors = (raw, targets.contiguous(), logprobs, entropy, lse)
        self._kernels.call("score", raw.dtype, tensors, raw.shape, self.head.slope)
        return logprobs, entropy, lse

    def gradient(
        self,
        raw: Tensor,
        targets: Tensor,
        lse: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        kept: Supports | None = None,
    ) -> Tensor:
        """The gradient of the raw logits in the working dtype; may overwrite them. It is 0 at ids that are not `kept`."""
        whole, raw = raw, raw[: len(targets)]
        if self._kernels is None:
            logits = self._within(kept, self.head.tempered(raw))
            grad = _logit_gradient(logits, targets, lse, entropy, grad_logprobs, grad_entropy)
            return self.head.raw_gradient(grad, logits).to(self.dtype)
        self._within(kept, raw)
        none = torch.zeros(len(raw))
        parts = [none if g is None else g.float().contiguous() for g in (grad_logprobs, grad_entropy)]
        tensors = (raw, targets.contiguous(), lse.contiguous(), entropy.contiguous(), *parts)
        self._kernels.call("gradient", raw.dtype, tensors, raw.shape, self.head.slope)
        whole[len(raw) :] = 0
        return whole

    def _within(self, kept: Supports | None, logits: Tensor) -> Tensor:
        """The logits, in place, with those at `_NEVER` that could not be drawn."""
        if kept is None:
            return logits
        return logits.masked_fill_(~kept.allowed(logits.shape[1], logits.device), _NEVER)


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the targets, entropy, logsumexp) of a chunk of tempered logits."""
    top = logits.amax(-1)
    weights = (logits - top[:, None]).exp_()  # one exponential serves the sum and the mean
    total = weights.sum(-1)
    lse = top + total.log()
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    return chosen - lse, lse - weights.mul_(logits).sum(-1) / total, lse


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """d loss / d z_j = g_logprob (1[j = target] - p_j) - g_entropy p_j (log p_j + H)."""
    logprobs = logits - lse[:, None]
    probs = logprobs.exp()
    grad = torch.zeros_like(probs)
    if grad_entropy is not None:
        grad = logprobs.add_(entropy[:, None]).mul_(grad_entropy[:, None])
    if grad_logprobs is not None:
        grad.add_(grad_logprobs[:, None])
    grad.mul_(probs.neg_())
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None].to(grad.dtype))
    return grad
