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
    head = Head(weight=head_weight, bias=bias, temperature=temperature, logit_scale=logit_scale, soft_cap=soft_cap)
    return token_scores(hidden, head, targets, chunk=chunk, kept=kept)


def token_scores(
    hidden: Hidden, head: Head, targets: Int[Tensor, "n"], *, chunk: int | None = None, kept: Supports | None = None
) -> TokenScores:
    """`token_logprobs` of a head."""
    _check(hidden, head.weight, targets)
    work = _Work(head, _chunks(len(targets), chunk or _chunk_for(head.weight)), kept)
    return TokenScores(*_TokenLogprobs.apply(hidden, head.weight, head.bias, targets, work))


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
    work = _Work(head, _chunks(len(hidden), chunk or _chunk_for(head.weight)), kept)
    return _ExactKL.apply(hidden, head.weight, head.bias, ref_hidden, ref_head, work)


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
    work = _Work(head, _whole_rows(row_ends, chunk or _chunk_for(head.weight)), kept)
    return FusedLoss(*_FusedLoss.apply(hidden, head.weight, head.bias, values, targets, loss, work))


class _Work(NamedTuple):
    """A head, and the positions that it goes over in parts."""

    head: Head
    spans: Sequence[slice]
    kept: Supports | None

    def parts(self) -> Iterator[tuple[slice, Supports | None]]:
        """Each part of the positions, and the tokens that could be drawn there."""
        for part in self.spans:
            yield part, self.kept and self.kept[part]


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: _Work
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse = (_per_token(hidden) for _ in range(3))
        over = HeadPass(work.head)
        for part, kept in work.parts():
            logprobs[part], entropy[part], lse[part] = over.score(over.raw(hidden[part]), targets[part], kept)
        ctx.save_for_backward(hidden, targets, entropy, lse)
        ctx.work = work
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, targets, entropy, lse = ctx.saved_tensors
        over = HeadPass(ctx.work.head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad)
        for part, kept in ctx.work.parts():
            about = targets[part], lse[part], entropy[part]
            up, sideways = (None if grad is None else grad[part] for grad in (grad_logprobs, grad_entropy))
            grads.add(part, over.gradient(over.raw(hidden[part]), *about, up, sideways, kept))
        return *grads.found, None, None


class _FusedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor | None,
        targets: Tensor,
        loss: ChunkLoss,
        work: _Work,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy = (_per_token(hidden) for _ in range(2))
        over = HeadPass(work.head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad)
        value_grad = None if values is None else torch.zeros_like(values)
        total = logprobs.new_zeros(())
        for part, kept in work.parts():
            logits = over.raw(hidden[part])
            logprobs[part], entropy[part], lse = over.score(logits, targets[part], kept)
            leaves = [x[part].detach().clone().requires_grad_() for x in (logprobs, entropy, values) if x is not None]
            with torch.enable_grad():
                part_loss = loss(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, part.start, part.stop)
            total += part_loss.detach()
            if not part_loss.requires_grad:
                continue
            found: tuple[Tensor | None, ...] = torch.autograd.grad(part_loss, leaves, allow_unused=True)
            up, sideways, *by_value = found
            if value_grad is not None and by_value[0] is not None:
                value_grad[part] = by_value[0]
            if up is not None or sideways is not None:
                grads.add(part, over.gradient(logits, targets[part], lse, entropy[part], up, sideways, kept))
        ctx.save_for_backward(*grads.found, value_grad)
        ctx.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        if grad.device.type == "cpu" and bool(grad == 1):  # elsewhere a look costs more than the products
            return *ctx.saved_tensors, None, None, None
        scaled = (None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return *scaled, None, None, None


class _ExactKL(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        ref_head: Head,
        work: _Work,
    ) -> Tensor:
        kl, over, ref = _per_token(hidden), HeadPass(work.head), HeadPass(ref_head)
        for part, kept in work.parts():
            _, logprobs, gap = _ExactKL.compared(over, ref, hidden[part], ref_hidden[part], kept)
            kl[part] = (logprobs.exp() * gap).sum(-1)
        ctx.save_for_backward(hidden, ref_hidden, kl)
        ctx.work, ctx.ref_head = work, ref_head
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> Any:
        hidden, ref_hidden, kl = ctx.saved_tensors
        over, ref = HeadPass(ctx.work.head), HeadPass(ctx.ref_head)
        grads = _HeadGradients(hidden, over, ctx.needs_input_grad)
        for part, kept in ctx.work.parts():
            logits, logprobs, gap = _ExactKL.compared(over, ref, hidden[part], ref_hidden[part], kept)
            # d KL / d z_j = p_j (log p_j - log q_j - KL)
            grad = gap.sub_(kl[part, None]).mul_(logprobs.exp_()).mul_(grad_kl[part, None])
            grads.add(part, over.head.raw_gradient(grad, logits).to(over.dtype))
        return *grads.found, None, None, None

    @staticmethod
    def compared(
        over: HeadPass, ref: HeadPass, hidden: Tensor, ref_hidden: Tensor, kept: Supports | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, their log-probs, how far these are above the reference's)."""
        logits = over.logits(hidden, kept)
        logprobs = logits.log_softmax(-1)
        return logits, logprobs, logprobs - ref.logits(ref_hidden, kept).log_softmax(-1)


class _HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias, gathered chunk by chunk. `wanted` begins with
    whether each of these is."""

    def __init__(self, hidden: Tensor, over: HeadPass, wanted: Sequence[bool]) -> None:
        self._source, self._over, head = hidden, over, over.head
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(head.weight) if wanted[1] else None
        self.bias = torch.zeros_like(head.bias) if wanted[2] and head.bias is not None else None

    @property
    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of the hidden states, the weight and the bias."""
        return self.hidden, self.weight, self.bias

    def add(self, part: slice, grad: Tensor) -> None:
        """Add the chunk whose raw logits have this gradient, zeros after it. Products are in the working dtype, sums in
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


def _per_token(hidden: Tensor) -> Tensor:
    """[n], empty, in fp32; fp64 stays."""
    return hidden.new_empty(len(hidden), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]


def _whole_rows(row_ends: Sequence[int], chunk: int) -> list[slice]:
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
