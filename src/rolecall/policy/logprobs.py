"""Log-probs, entropies and exact KL of chosen tokens: the one place where hidden states meet the vocabulary.

Logits are made for a chunk of positions at a time and thrown away, so nothing of size [batch, time, vocab] ever exists.
Callers pass only the positions they ask for, flattened: `hidden` [n, d] is the trunk's output *before* token t (index
t - 1), `targets` [n] is token t.

    z = soft_cap(logit_scale (W h + b)) / temperature        logprob = z[target] - logsumexp(z)

`token_logprobs` recomputes a chunk's logits in the backward pass (four products with the head in all); `fused_loss`
computes the head's gradient in the forward pass, where the loss of a chunk is known as soon as its log-probs are (three).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from rolecall.config.plan import CHUNK_LOGITS

Hidden = Float[Tensor, "n width"]
Weight = Float[Tensor, "vocab width"]
PerToken = Float[Tensor, "n"]


class TokenScores(NamedTuple):
    """What is known about each chosen token."""

    logprobs: PerToken
    entropy: PerToken


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The map from a hidden state to tempered logits."""

    weight: Weight
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Tempered logits of a chunk, in fp32 (fp64 stays)."""
        raw = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        if self.soft_cap is None:
            return raw if self.slope == 1 else raw.mul_(self.slope)
        capped = raw.mul_(self.logit_scale / self.soft_cap).tanh_().mul_(self.soft_cap)
        return capped.div_(self.temperature if self.temperature > 0 else 1.0)

    def raw_gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the raw logits from that of the tempered ones; overwrites `grad`."""
        if self.soft_cap is not None:
            temperature = self.temperature if self.temperature > 0 else 1.0
            grad = grad * (1 - (logits * (temperature / self.soft_cap)).square())
        return (grad if self.slope == 1 else grad.mul_(self.slope)).to(self.weight.dtype)


def token_logprobs(
    hidden: Hidden,
    head_weight: Weight,
    targets: Int[Tensor, "n"],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Float[Tensor, "vocab"] | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, at the sampling temperature (0 scores at 1).

    Gradients reach `hidden`, `head_weight` and `bias`. `chunk` is the number of positions whose logits exist at a time.
    """
    _check(hidden, head_weight, targets)
    head = Head(weight=head_weight, bias=bias, temperature=temperature, logit_scale=logit_scale, soft_cap=soft_cap)
    return TokenScores(
        *_TokenLogprobs.apply(hidden, head_weight, bias, targets, head, chunk or _chunk_for(head_weight))
    )


def exact_token_kl(
    hidden: Hidden, head: Head, ref_hidden: Float[Tensor, "n ref_width"], ref_head: Head, *, chunk: int | None = None
) -> PerToken:
    """KL(pi || ref) over the whole vocabulary at each position; gradients reach the policy, not the reference."""
    return _ExactKL.apply(hidden, head.weight, head.bias, ref_hidden, head, ref_head, chunk or _chunk_for(head.weight))


ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, int, int], Tensor]
"""(logprobs, entropy, values, start, stop) of positions start..stop -> a scalar, already divided by its denominators."""


class FusedLoss(NamedTuple):
    """A loss whose gradients are known, and the scores it was computed from (which carry no gradient)."""

    loss: Float[Tensor, ""]
    logprobs: PerToken
    entropy: PerToken


def fused_loss(
    hidden: Hidden,
    head: Head,
    targets: Int[Tensor, "n"],
    loss: ChunkLoss,
    *,
    row_ends: Sequence[int],
    values: Float[Tensor, "n *channels"] | None = None,
    chunk: int | None = None,
) -> FusedLoss:
    """The sum of a loss over chunks of whole rows, with the head's gradient computed on the way.

    `row_ends` are the ends of the rows among the n positions; a chunk never splits a row, so `loss` may look along a
    row (GSPO) but not across rows. Gradients reach `hidden`, the head and `values`: whatever else the loss needs of each
    position, one number or several.
    """
    _check(hidden, head.weight, targets)
    spans = _spans(row_ends, chunk or _chunk_for(head.weight))
    return FusedLoss(*_FusedLoss.apply(hidden, head.weight, head.bias, values, targets, head, loss, spans))


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, chunk: int
    ) -> Any:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
        lse = torch.empty_like(entropy)
        for part in _chunks(len(targets), chunk):
            logits = head.logits(hidden[part])
            logprobs[part], entropy[part], lse[part] = _score(logits, targets[part])
        ctx.save_for_backward(hidden, targets, entropy, lse)
        ctx.head, ctx.chunk = head, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, targets, entropy, lse = ctx.saved_tensors
        head: Head = ctx.head
        grads = _HeadGradients(hidden, head, ctx.needs_input_grad[:3])
        for part in _chunks(len(targets), ctx.chunk):
            logits = head.logits(hidden[part])
            grad = _logit_gradient(
                logits,
                targets[part],
                lse[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            grads.add(part, head.raw_gradient(grad, logits))
        return grads.hidden, grads.weight, grads.bias, None, None, None


class _FusedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor | None,
        targets: Tensor,
        head: Head,
        loss: ChunkLoss,
        spans: list[slice],
    ) -> Any:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
        grads = _HeadGradients(hidden, head, ctx.needs_input_grad[:3])
        value_grad = None if values is None else torch.zeros_like(values)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for part in spans:
            logits = head.logits(hidden[part])
            logprobs[part], entropy[part], lse = _score(logits, targets[part])
            leaves = [x[part].detach().clone().requires_grad_() for x in (logprobs, entropy, values) if x is not None]
            with torch.enable_grad():
                part_loss = loss(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, part.start, part.stop)
            total += part_loss.detach()
            if not part_loss.requires_grad:
                continue
            by_leaf: tuple[Tensor | None, ...] = torch.autograd.grad(part_loss, leaves, allow_unused=True)
            if value_grad is not None and by_leaf[2] is not None:
                value_grad[part] = by_leaf[2]
            if by_leaf[0] is not None or by_leaf[1] is not None:
                grad = _logit_gradient(logits, targets[part], lse, entropy[part], by_leaf[0], by_leaf[1])
                grads.add(part, head.raw_gradient(grad, logits))
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias, value_grad)
        ctx.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *(None if g is None else (g if bool(grad == 1) else g * grad.to(g.dtype)) for g in ctx.saved_tensors), *(
            [None] * 4
        )


class _ExactKL(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        head: Head,
        ref_head: Head,
        chunk: int,
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        kl = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        for part in _chunks(len(hidden), chunk):
            logprobs = head.logits(hidden[part]).log_softmax(-1)
            gap = logprobs - ref_head.logits(ref_hidden[part]).log_softmax(-1)
            kl[part] = (logprobs.exp() * gap).sum(-1)
        ctx.save_for_backward(hidden, ref_hidden, kl)
        ctx.head, ctx.ref_head, ctx.chunk = head, ref_head, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> Any:
        hidden, ref_hidden, kl = ctx.saved_tensors
        head: Head = ctx.head
        grads = _HeadGradients(hidden, head, ctx.needs_input_grad[:3])
        for part in _chunks(len(hidden), ctx.chunk):
            logits = head.logits(hidden[part])
            logprobs = logits.log_softmax(-1)
            gap = logprobs - ctx.ref_head.logits(ref_hidden[part]).log_softmax(-1)
            # d KL / d z_j = p_j (log p_j - log q_j - KL)
            grad = gap.sub_(kl[part, None]).mul_(logprobs.exp_()).mul_(grad_kl[part, None])
            grads.add(part, head.raw_gradient(grad, logits))
        return grads.hidden, grads.weight, grads.bias, None, None, None, None


class _HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias, gathered chunk by chunk."""

    def __init__(self, hidden: Tensor, head: Head, wanted: Sequence[bool]) -> None:
        self._source, self._head = hidden, head
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(head.weight) if wanted[1] else None
        self.bias = torch.zeros_like(head.bias) if wanted[2] and head.bias is not None else None

    def add(self, part: slice, grad: Tensor) -> None:
        """Add the chunk whose raw logits have this gradient."""
        if self.hidden is not None:
            self.hidden[part] = (grad @ self._head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            if torch.is_autocast_enabled(grad.device.type):  # the product in the working dtype, the sum in the weight's
                self.weight += grad.T @ self._source[part]
            else:
                self.weight.addmm_(grad.T, self._source[part].to(grad.dtype))
        if self.bias is not None:
            self.bias += grad.sum(0)


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the targets, entropy, logsumexp) of a chunk of logits."""
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


def _chunk_for(weight: Tensor) -> int:
    return max(16, CHUNK_LOGITS // weight.shape[0])


def _chunks(n: int, chunk: int) -> Iterator[slice]:
    for start in range(0, n, chunk):
        yield slice(start, min(start + chunk, n))


def _spans(row_ends: Sequence[int], chunk: int) -> list[slice]:
    """Whole rows packed into spans of at most `chunk` positions (a longer row is a span of its own)."""
    spans, start, previous = [], 0, 0
    for end in row_ends:
        if end - start > chunk and previous > start:
            spans.append(slice(start, previous))
            start = previous
        previous = end
    if previous > start:
        spans.append(slice(start, previous))
    return spans


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} but the head is {tuple(weight.shape)}; pass [n, {weight.shape[1]}]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)} but hidden has {hidden.shape[0]} positions")
