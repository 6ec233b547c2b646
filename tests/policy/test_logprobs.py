"""Log-probs against full logits, and gradients against autograd through them."""

import pytest
import torch

from rolecall.maths.kl import exact_kl
from rolecall.policy.head_ops import Head
from rolecall.policy.logprobs import exact_token_kl, fused_loss, token_logprobs

N, WIDTH, VOCAB = 13, 5, 17


def problem(seed=0, dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(VOCAB, (N,), generator=generator)
    return hidden, weight, offset, targets


def full_scores(hidden, weight, bias, targets, *, temperature=1.0, logit_scale=1.0, soft_cap=None):
    """The same with all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"logit_scale": 0.25, "temperature": 1.3},
    {"soft_cap": 2.0},
    {"soft_cap": 3.0, "temperature": 0.5, "logit_scale": 2.0},
]


def test_golden():
    # Two tokens with logits (0, log 3): p = 1/4, 3/4; entropy = log 4 - 3/4 log 3.
    weight = torch.tensor([[0.0], [3.0]]).log().nan_to_num(neginf=0.0)
    scores = token_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]))
    torch.testing.assert_close(scores.logprobs.exp(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(scores.entropy, torch.full((2,), 1.386294 - 0.75 * 1.098612))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_full_logits(options, chunk, bias):
    hidden, weight, offset, targets = problem(bias=bias)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    mix = torch.linspace(-1, 2, N, dtype=torch.float64)
    ours = token_logprobs(hidden, weight, targets, bias=offset, chunk=chunk, **options)
    full = full_scores(hidden, weight, offset, targets, **options)
    for mine, theirs in zip(ours, full, strict=True):
        torch.testing.assert_close(mine, theirs)
    our_gradients = torch.autograd.grad((ours.logprobs * mix + ours.entropy * mix.flip(0)).sum(), inputs)
    full_gradients = torch.autograd.grad((full[0] * mix + full[1] * mix.flip(0)).sum(), inputs)
    for mine, theirs in zip(our_gradients, full_gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_gradient_of_one_output_alone(used):
    hidden, weight, _, targets = problem()
    ours = getattr(token_logprobs(hidden, weight, targets, chunk=4), used)
    full = full_scores(hidden, weight, None, targets)[used == "entropy"]
    for mine, theirs in zip(
        torch.autograd.grad(ours.sum(), [hidden, weight]),
        torch.autograd.grad(full.sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_gradcheck():
    hidden, weight, offset, targets = problem(bias=True)
    assert torch.autograd.gradcheck(
        lambda h, w, b: tuple(token_logprobs(h, w, targets, bias=b, chunk=5, temperature=0.8, soft_cap=4.0)),
        (hidden, weight, offset),
    )


def test_bf16_scores_in_fp32_within_a_band():
    hidden, weight, _, targets = problem(dtype=torch.float32)
    exact = token_logprobs(hidden, weight, targets)
    rough = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert rough.logprobs.dtype == torch.float32
    assert 0 < float((exact.logprobs - rough.logprobs).detach().abs().mean()) < 0.03


def test_no_positions():
    hidden, weight, _, _ = problem()
    scores = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    scores.logprobs.sum().backward()
    assert scores.logprobs.shape == (0,)
    assert bool((weight.grad == 0).all())


@pytest.mark.parametrize("chunk", [1, 4, 6, 100])
def test_fused_loss_equals_the_loss_through_token_logprobs(chunk):
    hidden, weight, offset, targets = problem(bias=True)
    values = torch.linspace(0, 1, N, dtype=torch.float64).requires_grad_()
    advantages = torch.linspace(-1, 1, N, dtype=torch.float64)
    row_ends = [3, 7, 13]
    row = torch.tensor([0] * 3 + [1] * 4 + [2] * 6)

    def loss(logprobs, entropy, values, start, stop):
        # Looks along a row, as sequence-level ratios do: the mean log-prob of each row, squared.
        rows = row[start:stop]
        total = -(advantages[start:stop] * logprobs).sum() - 0.1 * entropy.sum() + (values**2).sum()
        for r in rows.unique():
            total = total + logprobs[rows == r].mean() ** 2
        return total

    head = Head(weight=weight, bias=offset, temperature=0.9)
    inputs = [hidden, weight, offset, values]
    fused = fused_loss(hidden, head, targets, loss, row_ends=row_ends, values=values, chunk=chunk)
    plain_scores = token_logprobs(hidden, weight, targets, bias=offset, temperature=0.9)
    plain = loss(*plain_scores, values, 0, N)
    torch.testing.assert_close(fused.loss, plain)
    torch.testing.assert_close(fused.logprobs, plain_scores.logprobs)
    torch.testing.assert_close(fused.entropy, plain_scores.entropy)
    assert not fused.logprobs.requires_grad
    for mine, theirs in zip(
        torch.autograd.grad(3 * fused.loss, inputs), torch.autograd.grad(3 * plain, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_exact_kl_equals_the_one_on_full_logits():
    hidden, weight, offset, _ = problem(bias=True)
    ref_hidden, ref_weight, _, _ = problem(seed=1)
    head = Head(weight=weight, bias=offset, temperature=0.8)
    ref_head = Head(weight=ref_weight, temperature=0.8)
    ours = exact_token_kl(hidden, head, ref_hidden, ref_head, chunk=4)
    full = exact_kl((hidden @ weight.T + offset) / 0.8, (ref_hidden @ ref_weight.T).detach() / 0.8)
    torch.testing.assert_close(ours, full)
    mix = torch.linspace(-1, 2, N, dtype=torch.float64)
    inputs = [hidden, weight, offset]
    for mine, theirs in zip(
        torch.autograd.grad((ours * mix).sum(), inputs), torch.autograd.grad((full * mix).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert float(exact_token_kl(hidden, head, hidden, head).detach().abs().max()) == 0


def test_wrong_shapes_are_named():
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match=r"hidden has shape \(13, 4\) but the head is \(17, 5\)"):
        token_logprobs(hidden[:, :4], weight, targets)
    with pytest.raises(ValueError, match=r"targets has shape \(12,\) but hidden has 13"):
        token_logprobs(hidden, weight, targets[1:])
