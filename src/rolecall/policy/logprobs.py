"""Log-probs, entropies and exact KL of chosen tokens: the one place where hidden states meet the vocabulary.

Logits are made for a chunk of positions at a time and thrown away, so nothing of size [batch, time, vocab] ever exists.
Callers pass only the positions they ask for, flattened: `hidden` [n, d] is the trunk's output *before* token t (index
t - 1), `targets` [n] is token t.

    z = soft_cap(logit_scale (W h + b)) / temperature        logprob = z[target] - logsumexp(z)

Where sampling cut the vocabulary (`kept`), all of them are of the distribution over the tokens that could be drawn:
logsumexp runs over these, and no other token gets a gradient.

`token_logprobs` recomputes a chunk's logits in the backward pass (four products with the head in all); `fused_loss`
computes the head's gradient in the forward pass, where the loss of a chunk is known as soon as its log-probs are (three).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from rolecall.config.plan import CHUNK_LOGITS
from rolecall.policy.head_ops import Head, HeadPass
from rolecall.types import Supports

_WORDS = 8192
"""Rows of a head's gradient that are computed together where it is summed in another dtype."""

Hidden = Float[Tensor, "n width"]
Weight = Float[Tensor, "vocab width"]
PerToken = Float[Tensor, "n"]


class TokenScores(NamedTuple):
    """What is known about each chosen token."""

    logprobs: PerToken
    entropy: PerToken


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
    kept: Supports | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, at the sampling temperature (0 scores at 1).

    Gradients reach `hidden`, `head_weight` and `bias`. `chunk` is the number of positions whose logits exist at a time.
    `kept` [n] are the tokens that could be drawn; None is the whole vocabulary.
    """
    _check(hidden, head_weight, targets)
    head = Head(weight=head_weight, bias=bias, temperature=temperature, logit_scale=logit_scale, soft_cap=soft_cap)
    return TokenScores(
        *_TokenLogprobs.apply(hidden, head_weight, bias, targets, head, chunk or _chunk_for(head_weight), kept)
    )


def exact_token_kl(
    hidden: Hidden,
    head: Head,
    ref_hidden: Float[Tensor, "n ref_width"],
    ref_head: Head,
    *,
    chunk: int | None = None,
    kept: Supports | None = None,
) -> PerToken:
    """KL(pi || ref) over the whole vocabulary at each position, or over the `kept` tokens of both; gradients reach the
    policy, not the reference."""
    size = chunk or _chunk_for(head.weight)
    return _ExactKL.apply(hidden, head.weight, head.bias, ref_hidden, head, ref_head, size, kept)


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
    kept: Supports | None = None,
) -> FusedLoss:
    """The sum of a loss over chunks of whole rows, with the head's gradient computed on the way.

    `row_ends` are the ends of the rows among the n positions; a chunk never splits a row, so `loss` may look along a
    row (GSPO) but not across rows. Gradients reach `hidden`, the head and `values`: whatever else the loss needs of each
    position, one number or several.
    """
    _check(hidden, head.weight, targets)
    spans = _spans(row_ends, chunk or _chunk_for(head.weight))
    return FusedLoss(*_FusedLoss.apply(hidden, head.weight, head.bias, values, targets, head, loss, spans, kept))


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        chunk: int,
        kept: Supports | None,
    ) -> Any:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
        lse, over = torch.empty_like(entropy), HeadPass(head)
        for part in _chunks(len(targets), chunk):
            found = over.score(over.raw(hidden[part]), targets[part], kept and kept[part])
            logprobs[part], entropy[part], lse[part] = found
        ctx.save_for_backward(hidden, targets, entropy, lse)
        ctx.head, ctx.chunk, ctx.kept = head, chunk, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, targets, entropy, lse = ctx.saved_tensors
        head: Head = ctx.head
        over = HeadPass(head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad[:3])
        for part in _chunks(len(targets), ctx.chunk):
            grad = over.gradient(
                over.raw(hidden[part]),
                targets[part],
                lse[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                ctx.kept and ctx.kept[part],
            )
            grads.add(part, grad)
        return grads.hidden, grads.weight, grads.bias, None, None, None, None


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
        kept: Supports | None,
    ) -> Any:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
        over = HeadPass(head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad[:3])
        value_grad = None if values is None else torch.zeros_like(values)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for part in spans:
            logits, within = over.raw(hidden[part]), kept and kept[part]
            logprobs[part], entropy[part], lse = over.score(logits, targets[part], within)
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
                grads.add(
                    part, over.gradient(logits, targets[part], lse, entropy[part], by_leaf[0], by_leaf[1], within)
                )
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias, value_grad)
        ctx.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *(None if g is None else (g if bool(grad == 1) else g * grad.to(g.dtype)) for g in ctx.saved_tensors), *(
            [None] * 5
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
        kept: Supports | None,
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        kl = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        over, ref = HeadPass(head), HeadPass(ref_head)
        for part in _chunks(len(hidden), chunk):
            within = kept and kept[part]
            logprobs = over.logits(hidden[part], within).log_softmax(-1)
            gap = logprobs - ref.logits(ref_hidden[part], within).log_softmax(-1)
            kl[part] = (logprobs.exp() * gap).sum(-1)
        ctx.save_for_backward(hidden, ref_hidden, kl)
        ctx.head, ctx.ref_head, ctx.chunk, ctx.kept = head, ref_head, chunk, kept
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> Any:
        hidden, ref_hidden, kl = ctx.saved_tensors
        head: Head = ctx.head
        over, ref = HeadPass(head), HeadPass(ctx.ref_head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad[:3])
        for part in _chunks(len(hidden), ctx.chunk):
            within = ctx.kept and ctx.kept[part]
            logits = over.logits(hidden[part], within)
            logprobs = logits.log_softmax(-1)
            gap = logprobs - ref.logits(ref_hidden[part], within).log_softmax(-1)
            # d KL / d z_j = p_j (log p_j - log q_j - KL)
            grad = gap.sub_(kl[part, None]).mul_(logprobs.exp_()).mul_(grad_kl[part, None])
            grads.add(part, head.raw_gradient(grad, logits).to(over.dtype))
        return grads.hidden, grads.weight, grads.bias, None, None, None, None, None


class _HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias, gathered chunk by chunk."""

    def __init__(self, hidden: Tensor, over: HeadPass, wanted: Sequence[bool]) -> None:
        self._source, self._over, head = hidden, over, over.head
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(head.weight) if wanted[1] else None
        self.bias = torch.zeros_like(head.bias) if wanted[2] and head.bias is not None else None

    def add(self, part: slice, grad: Tensor) -> None:
        """Add the chunk whose raw logits have this gradient, zeros behind it. Products are in the working dtype, sums in
        the weight's."""
        with torch.autocast(grad.device.type, enabled=False):
            if self.hidden is not None:
                self.hidden[part] = (grad @ self._over.weight)[: part.stop - part.start].to(self.hidden.dtype)
            if self.weight is not None:
                source = self._over.rows(self._source[part])[: len(grad)]
                if self.weight.dtype == grad.dtype:
                    self.weight.addmm_(grad.T, source)
                else:  # some words at a time: the product of all is another copy of the head
                    for weight, words in zip(self.weight.split(_WORDS), grad.split(_WORDS, dim=1), strict=True):
                        weight += words.T @ source
            if self.bias is not None:
                self.bias += grad.sum(0)


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
