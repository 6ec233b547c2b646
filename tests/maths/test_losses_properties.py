"""What holds of every loss and KL estimate for all batches: order, padding, untrained spans, split, junk where masked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_table import ALL
from strategies_losses import positions

from rolecall.maths import losses
from rolecall.maths.kl import KINDS, exact_kl, kl_estimate
from rolecall.maths.reduce import MODES, aggregate, denominator_of

settings_ = settings(max_examples=12)
ESTIMATES = {
    f"{kind}{' straight' * straight}": lambda p, q, a, m, kind=kind, straight=straight: kl_estimate(
        p, q, m, kind=kind, straight_through=straight
    )
    for kind in KINDS
    for straight in (False, True)
}
PER_POSITION = ALL | ESTIMATES
per_position = pytest.mark.parametrize("function", PER_POSITION.values(), ids=PER_POSITION.keys())


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def insert(tensor, at, width):
    """An untrained span full of NaN."""
    filler = False if tensor.dtype == torch.bool else torch.nan
    span = torch.full((len(tensor), width), filler, dtype=tensor.dtype)
    return torch.cat([tensor[:, :at], span, tensor[:, at:]], dim=1)


def value_and_gradient(function, logprobs, *others):
    """The values, and the gradient at the log-probs of their weighted sum (0 if there is none)."""
    logprobs = logprobs.clone().requires_grad_()
    values = function(logprobs, *others)
    if not values.requires_grad:
        return values, torch.zeros_like(logprobs)
    return values.detach(), torch.autograd.grad(values.sum(), logprobs)[0]


@per_position
@settings_
@given(x=positions(), data=st.data())
def test_rows_do_not_see_each_other(function, x, data):
    """Any choice of rows, in any order, gives those rows of the whole: order and split in one."""
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(x.mask) - 1), min_size=1, unique=True)))
    values, grad = value_and_gradient(function, *x)
    some_values, some_grad = value_and_gradient(function, *(tensor[rows] for tensor in x))
    close(some_values, values[rows])
    close(some_grad, grad[rows])


@per_position
@settings_
@given(x=positions(), at=st.integers(0, 6), width=st.integers(1, 4))
def test_untrained_spans_and_padding_change_nothing(function, x, at, width):
    at = min(at, x.mask.shape[1])
    values, grad = value_and_gradient(function, *x)
    long_values, long_grad = value_and_gradient(function, *(insert(tensor, at, width) for tensor in x))
    kept = torch.ones(long_values.shape[1], dtype=torch.bool)
    kept[at : at + width] = False
    close(long_values[:, kept], values)
    close(long_grad[:, kept], grad)
    assert long_values[:, ~kept].eq(0).all()
    assert long_grad[:, ~kept].eq(0).all()


@pytest.mark.parametrize("mode", MODES)
@settings_
@given(x=positions(), cut=st.integers(0, 4))
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(mode, x, cut):
    norm = 7.0 if mode == "seq-mean-token-sum-norm" else None

    def loss(logprobs, old, advantages, mask, denominator=None):
        per_position = losses.ppo_clip(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28)
        return aggregate(per_position, mask, mode=mode, norm=norm, denominator=denominator)

    total = denominator_of(x.mask, mode=mode)
    parts = [tuple(tensor[:cut] for tensor in x), tuple(tensor[cut:] for tensor in x)]
    values, grads = zip(
        *(value_and_gradient(lambda *y: loss(*y, denominator=total), *part) for part in parts), strict=True
    )
    value, grad = value_and_gradient(loss, *x)
    close(sum(values), value)
    close(torch.cat(grads), grad)


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip", "gspo", "cispo", "replay_clipped", "replay_shaped"])
@settings_
@given(x=positions(), factor=st.sampled_from([0.5, 2.0, 10.0]))
def test_losses_scale_with_the_advantages(name, x, factor):
    values, grad = value_and_gradient(ALL[name], *x)
    scaled, scaled_grad = value_and_gradient(ALL[name], x.logprobs, x.old, x.advantages * factor, x.mask)
    close(scaled, values * factor)
    close(scaled_grad, grad * factor)


@settings_
@given(x=positions())
def test_ppo_clip_is_never_below_the_unclipped_loss_and_dual_clip_never_above_its_cap(x):
    unclipped = losses.ppo_clip(*x, clip_low=1.0, clip_high=1e9)
    clipped = losses.ppo_clip(*x, clip_low=0.2, clip_high=0.2)
    dual = losses.ppo_clip(*x, clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    assert (clipped >= unclipped).all()
    assert (dual <= clipped).all()
    assert (dual <= 2.0 * torch.where(x.mask, x.advantages, 0).abs() + 1e-12).all()


@settings_
@given(x=positions())
def test_estimates_that_cannot_be_negative_are_not(x):
    for kind in ("clamp", "k2", "k3", "abs"):
        assert (kl_estimate(x.logprobs, x.old, x.mask, kind=kind) >= 0).all()


@settings_
@given(x=positions(), shift=st.floats(-5, 5))
def test_pairs_see_differences_only(x, shift):
    chosen, rejected = (torch.nan_to_num(tensor, 0.0, 0.0, 0.0).flatten() for tensor in (x.logprobs, x.old))
    close(losses.bradley_terry(chosen + shift, rejected + shift), losses.bradley_terry(chosen, rejected))
    reference = torch.zeros_like(chosen)
    close(
        losses.dpo(chosen, rejected, reference + shift, reference + shift, beta=0.3),
        losses.dpo(chosen, rejected, reference, reference, beta=0.3),
    )
    close(losses.dpo(chosen, rejected, reference, reference, beta=1.0), losses.bradley_terry(chosen, rejected))
    swapped = losses.dpo(rejected, chosen, reference, reference, beta=0.3, label_smoothing=0.75)
    close(swapped, losses.dpo(chosen, rejected, reference, reference, beta=0.3, label_smoothing=0.25))


@settings_
@given(seed=st.integers(0, 2**31), shift=st.floats(-50, 50))
def test_exact_kl_and_entropy_see_distributions_only(seed, shift):
    random = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 2, 3, 5, generator=random, dtype=torch.float64).unbind()
    mask = torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(exact_kl(logits + shift, ref - shift), exact_kl(logits, ref), rtol=0, atol=1e-10)
    torch.testing.assert_close(losses.entropy(logits + shift, mask), losses.entropy(logits, mask), rtol=0, atol=1e-10)
    assert (exact_kl(logits, ref) >= 0).all()
    uniform = torch.zeros_like(logits)
    entropy = losses.entropy(logits, mask)
    torch.testing.assert_close(
        exact_kl(logits, uniform), torch.log(torch.tensor(5.0)).double() - entropy, rtol=0, atol=1e-6
    )
