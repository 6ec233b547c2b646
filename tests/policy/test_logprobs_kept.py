"""Log-probs, entropy and KL among the tokens that could be drawn, against full logits with the others at -inf."""

import pytest
import torch
from test_logprobs import OPTIONS, VOCAB, N, problem

from rolecall.policy.head_ops import Head
from rolecall.policy.logprobs import exact_token_kl, fused_loss, token_logprobs
from rolecall.types import Supports

UNTOUCHED = 11
"""An id that no position may draw, except where the whole vocabulary may be."""


def kept_of(targets, *, whole=()):
    """Each target and some others, ragged, in storage that holds the positions in another order."""
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(N, VOCAB, generator=generator) < 0.3
    allowed[torch.arange(N), targets] = True
    allowed[:, UNTOUCHED] = False
    allowed[list(whole)] = True
    starts, counts, flat = torch.zeros(N, dtype=torch.long), torch.zeros(N, dtype=torch.long), [torch.zeros(2)]
    for i in reversed(range(N)):
        starts[i] = sum(map(len, flat))
        if i not in whole:
            flat.append(allowed[i].nonzero().flatten())
            counts[i] = len(flat[-1])
    return Supports(ids=torch.cat(flat).to(torch.int32), starts=starts, counts=counts), allowed


def full_logprobs(hidden, weight, bias, allowed, *, temperature=1.0, logit_scale=1.0, soft_cap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    return (logits / (temperature or 1.0)).masked_fill(~allowed, -torch.inf).log_softmax(-1)


def entropy_of(logprobs):
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)


def case(dtype=torch.float64, *, bias=True, whole=(4, 12)):
    hidden, weight, offset, targets = problem(dtype=dtype, bias=bias)
    targets = torch.where(targets == UNTOUCHED, 0, targets)
    kept, allowed = kept_of(targets, whole=whole)
    return hidden, weight, offset, targets, kept, allowed


def close(mine, theirs, dtype=torch.float64):
    torch.testing.assert_close(mine, theirs, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_values_and_gradients(dtype, options, chunk):
    """float32 runs in compiled code where there is any."""
    hidden, weight, bias, targets, kept, allowed = case(dtype)
    ours = token_logprobs(hidden, weight, targets, bias=bias, chunk=chunk, kept=kept, **options)
    full = full_logprobs(hidden, weight, bias, allowed, **options)
    chosen, entropy = full.gather(1, targets[:, None])[:, 0], entropy_of(full)
    close(ours.logprobs, chosen, dtype)
    close(ours.entropy, entropy, dtype)
    mix, inputs = torch.linspace(-1, 2, N, dtype=dtype), [hidden, weight, bias]
    mine = torch.autograd.grad((ours.logprobs * mix + ours.entropy * mix.flip(0)).sum(), inputs)
    theirs = torch.autograd.grad((chosen * mix + entropy * mix.flip(0)).sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_that_could_not_be_drawn_gets_exactly_no_gradient(dtype):
    hidden, weight, bias, targets, kept, _ = case(dtype, whole=())
    found = token_logprobs(hidden, weight, targets, bias=bias, kept=kept)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert bool((weight.grad[UNTOUCHED] == 0).all())
    assert float(bias.grad[UNTOUCHED]) == 0
    assert bool(weight.grad.isfinite().all())
    assert bool((weight.grad[0] != 0).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_loss_is_the_same(dtype):
    hidden, weight, bias, targets, kept, allowed = case(dtype)

    def loss(logprobs, entropy, values, start, stop):
        mix = torch.linspace(-1, 2, N, dtype=dtype)[start:stop]
        return (logprobs.exp() * mix + 0.3 * entropy).sum()

    head = Head(weight=weight, bias=bias, temperature=0.7)
    fused = fused_loss(hidden, head, targets, loss, row_ends=[3, 4, 9, N], chunk=5, kept=kept)
    full = full_logprobs(hidden, weight, bias, allowed, temperature=0.7)
    whole = loss(full.gather(1, targets[:, None])[:, 0], entropy_of(full), None, 0, N)
    close(fused.loss, whole, dtype)
    inputs = [hidden, weight, bias]
    for a, b in zip(torch.autograd.grad(fused.loss, inputs), torch.autograd.grad(whole, inputs), strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("chunk", [3, 100])
def test_the_exact_kl_is_among_the_same_tokens_of_both(soft_cap, chunk):
    hidden, weight, bias, _, kept, allowed = case()
    other, ref_weight, _, _ = problem(seed=5)
    heads = (Head(weight=weight, bias=bias, soft_cap=soft_cap), Head(weight=ref_weight))
    ours = exact_token_kl(hidden, heads[0], other.detach(), heads[1], chunk=chunk, kept=kept)
    p = full_logprobs(hidden, weight, bias, allowed, soft_cap=soft_cap)
    q = full_logprobs(other.detach(), ref_weight.detach(), None, allowed)
    full = torch.where(allowed, p.exp() * (p.masked_fill(~allowed, 0) - q.masked_fill(~allowed, 0)), 0).sum(-1)
    close(ours, full)
    mix, inputs = torch.linspace(-1, 2, N, dtype=torch.float64), [hidden, weight, bias]
    for a, b in zip(
        torch.autograd.grad((ours * mix).sum(), inputs), torch.autograd.grad((full * mix).sum(), inputs), strict=True
    ):
        close(a, b)
