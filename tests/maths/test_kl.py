"""KL estimates: values and gradients against enumeration of a small vocabulary, limits, controllers, bad input."""

import dataclasses
import math

import pytest
import torch
from masking import equal

from rolecall.conformance import references
from rolecall.maths.kl import KINDS, MAX_LOG_RATIO, AdaptiveKL, FixedKL, bounded_exp, exact_kl, kl_estimate

LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64)
REF_LOGITS = torch.tensor([1.0, 0.4, 0.5, -2.0, 0.6], dtype=torch.float64)
kinds = pytest.mark.parametrize("kind", KINDS)
EVERY = torch.ones(1, 5, dtype=torch.bool)


def estimates_of_all_tokens(logits, kind, **options):
    """(probability, estimate) of each token of the vocabulary, as if each had been sampled."""
    logprobs = logits.log_softmax(-1)
    estimate = kl_estimate(logprobs[None], REF_LOGITS.log_softmax(-1)[None], EVERY, kind=kind, **options)
    return logprobs.exp().detach(), estimate[0]


def expected_gradient(kind, **options):
    """Gradient at the logits of a loss that sums `kind` over sampled tokens, averaged over all that could be sampled."""
    logits = LOGITS.clone().requires_grad_()
    probability, estimate = estimates_of_all_tokens(logits, kind, **options)
    return torch.autograd.grad((probability * estimate).sum(), logits)[0]


def gradient(function):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


# values


def test_estimates_worked_by_hand():
    # x = log pi - log ref = log 2, 0, -log 2.
    logprobs = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]], dtype=torch.float64)
    ref = torch.tensor([[math.log(0.25), math.log(0.25), math.log(0.5)]], dtype=torch.float64)
    log2 = math.log(2)
    expected = {
        "k1": [log2, 0.0, -log2],
        "clamp": [log2, 0.0, 0.0],
        "k2": [log2**2 / 2, 0.0, log2**2 / 2],
        "k3": [0.5 - 1 + log2, 0.0, 2 - 1 - log2],
        "abs": [log2, 0.0, log2],
    }
    assert tuple(expected) == KINDS
    for kind, values in expected.items():
        equal(kl_estimate(logprobs, ref, EVERY[:, :3], kind=kind), [values])


def test_clamp_charges_tokens_the_policy_makes_more_likely():
    more, less = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]])
    assert kl_estimate(more, less, EVERY[:, :2], kind="clamp").tolist() == [[1.0, 0.0]]


@kinds
@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_their_loop(kind, seed):
    random = torch.Generator().manual_seed(seed)
    logprobs, ref = torch.randn(2, 3, 5, generator=random, dtype=torch.float64).unbind()
    mask = torch.rand(3, 5, generator=random) > 0.3
    equal(kl_estimate(logprobs, ref, mask, kind=kind), references.table(references.KL[kind], mask, logprobs, ref))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    probability, estimate = estimates_of_all_tokens(LOGITS, kind)
    equal((probability * estimate).sum(), exact_kl(LOGITS, REF_LOGITS))


@pytest.mark.parametrize("kind", ["clamp", "k2", "abs"])
def test_clamp_k2_and_abs_are_biased(kind):
    probability, estimate = estimates_of_all_tokens(LOGITS, kind)
    assert abs((probability * estimate).sum() - exact_kl(LOGITS, REF_LOGITS)) > 0.01


@kinds
def test_kl_of_equal_policies_is_exactly_zero(kind):
    logprobs = LOGITS.float().log_softmax(-1)[None]
    assert kl_estimate(logprobs, logprobs.clone(), EVERY, kind=kind).tolist() == [[0.0] * 5]


# gradients against enumeration


def test_k1_has_no_gradient_in_expectation():
    equal(expected_gradient("k1"), [0.0] * 5)


def test_k2_has_the_gradient_of_kl_from_policy_to_reference():
    exact = gradient(lambda logits: exact_kl(logits, REF_LOGITS))
    assert exact.abs().max() > 0.1
    equal(expected_gradient("k2"), exact)


def test_k3_has_the_gradient_of_the_other_kl():
    other = gradient(lambda logits: exact_kl(REF_LOGITS, logits))
    exact = gradient(lambda logits: exact_kl(logits, REF_LOGITS))
    assert (other - exact).abs().max() > 0.1
    equal(expected_gradient("k3"), other)


@kinds
def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    _, plain = estimates_of_all_tokens(LOGITS, kind)
    _, straight = estimates_of_all_tokens(LOGITS, kind, straight_through=True)
    assert straight.tolist() == plain.tolist()
    equal(expected_gradient(kind, straight_through=True), expected_gradient("k2"))


@kinds
def test_straight_through_keeps_the_value_where_k2_is_huge(kind):
    """k2 is 5e7 here; adding and subtracting it in float32 would round a value of 1e4 by several units."""
    logprobs, ref = torch.tensor([[-1e4, -0.3]]), torch.tensor([[-0.1, -1e4]])
    plain = kl_estimate(logprobs, ref, EVERY[:, :2], kind=kind)
    assert kl_estimate(logprobs, ref, EVERY[:, :2], kind=kind, straight_through=True).equal(plain)


@kinds
def test_gradients_are_those_of_finite_differences(kind):
    mask = torch.tensor([[True, False, True, True, True]])
    inputs = LOGITS.log_softmax(-1)[None].requires_grad_(), REF_LOGITS.log_softmax(-1)[None].requires_grad_()
    assert torch.autograd.gradcheck(lambda p, q: kl_estimate(p, q, mask, kind=kind), inputs)


# masks and limits


@kinds
@pytest.mark.parametrize("straight_through", [False, True])
def test_what_does_not_count_reaches_nothing(kind, straight_through):
    for junk in (torch.nan, torch.inf, -torch.inf):
        logprobs = torch.tensor([[-1.0, junk, -2.0]], requires_grad=True)
        ref = torch.tensor([[-3.0, junk, -1.0]], requires_grad=True)
        mask = torch.tensor([[True, False, True]])
        values = kl_estimate(logprobs, ref, mask, kind=kind, straight_through=straight_through)
        values.sum().backward()
        assert values[0, 1] == 0
        assert values.isfinite().all()
        for tensor in (logprobs, ref):
            assert tensor.grad[0, 1] == 0
            assert tensor.grad.isfinite().all()


@kinds
@pytest.mark.parametrize("straight_through", [False, True])
def test_a_broken_record_gives_no_inf(kind, straight_through):
    for gap in (1e4, -1e4, 80.0, -80.0):
        logprobs = torch.tensor([[gap]], requires_grad=True)
        value = kl_estimate(logprobs, torch.zeros(1, 1), EVERY[:, :1], kind=kind, straight_through=straight_through)
        value.sum().backward()
        assert value.isfinite().all()
        assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("gap", "value", "slope"),
    [
        (1e4, 1e4 - 1, 1.0),
        (30.0, 29.0, 1.0),
        (-19.0, math.exp(19) - 20, 1 - math.exp(19)),
        (-21.0, math.exp(20) - 21, 0.0),
        (-1e4, math.exp(20) - 21, 0.0),
    ],
)
def test_k3_never_pushes_away_from_the_reference(gap, value, slope):
    """A token that the policy makes far less likely than the reference must not be made less likely still."""
    logprobs = torch.tensor([[gap]], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1, 1).double(), EVERY[:, :1], kind="k3")
    estimate.sum().backward()
    torch.testing.assert_close(estimate.item(), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs.grad.item(), slope, rtol=1e-12, atol=1e-7)


def test_bounded_exp_stops_at_twenty():
    assert MAX_LOG_RATIO == 20.0
    x = torch.tensor([-1e4, -20.0, 0.0, 1.0, 20.0, 1e4], dtype=torch.float64, requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    low, high = math.exp(-20), math.exp(20)
    torch.testing.assert_close(y.tolist(), [low, low, 1.0, math.e, high, high], rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad.tolist(), [0.0, low, 1.0, math.e, high, 0.0], rtol=1e-14, atol=0)


# exact KL


def test_exact_kl_worked_by_hand():
    # 1/2 log 2 + 1/4 log 1 + 1/4 log(1/2) = 1/4 log 2
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    equal(exact_kl(logits, logits.flip(0)), math.log(2) / 4)


@pytest.mark.parametrize("seed", range(3))
def test_exact_kl_is_its_loop(seed):
    random = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 3, 2, 6, generator=random, dtype=torch.float64).unbind()
    expected = [
        [references.exact_kl(p, q) for p, q in zip(ps, qs, strict=True)]
        for ps, qs in zip(logits.tolist(), ref.tolist(), strict=True)
    ]
    equal(exact_kl(logits, ref), expected)


def test_exact_kl_adds_nothing_for_what_the_policy_cannot_choose():
    forbidden = torch.tensor([-torch.inf], dtype=torch.float64)
    logits = torch.cat([LOGITS, forbidden, forbidden]).requires_grad_()
    ref = torch.cat([REF_LOGITS, forbidden, torch.tensor([-30.0])])
    value = exact_kl(logits, ref)
    value.backward()
    equal(value, exact_kl(LOGITS, REF_LOGITS))
    assert logits.grad[5:].tolist() == [0.0, 0.0]
    equal(logits.grad[:5], gradient(lambda x: exact_kl(x, REF_LOGITS)))


def test_exact_kl_is_infinite_where_the_reference_forbids_what_the_policy_allows():
    assert exact_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -torch.inf])) == torch.inf


def test_exact_kl_of_equal_logits_is_exactly_zero_whatever_their_offset():
    assert exact_kl(LOGITS, LOGITS.clone()) == 0
    equal(exact_kl(LOGITS + 3, LOGITS), 0.0)


def test_exact_kl_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(exact_kl, (LOGITS.clone().requires_grad_(), REF_LOGITS.clone().requires_grad_()))


# controllers


def test_fixed_coefficient_stays():
    controller = FixedKL(coef=0.05)
    assert controller.update(1e9, samples=512) is controller
    assert controller.coef == 0.05


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.02),  # on target
        (6.6, 0.02 * (1 + 0.1 * 256 / 10_000.0)),  # 10 % above
        (5.4, 0.02 * (1 - 0.1 * 256 / 10_000.0)),
        (7.2, 0.02 * (1 + 0.2 * 256 / 10_000.0)),  # the limit
        (60.0, 0.02 * (1 + 0.2 * 256 / 10_000.0)),
        (0.0, 0.02 * (1 - 0.2 * 256 / 10_000.0)),
        (-3.0, 0.02 * (1 - 0.2 * 256 / 10_000.0)),  # a noisy estimate below 0
    ],
)
def test_adaptive_coefficient_follows_the_error_within_a_fifth(kl, expected):
    before = AdaptiveKL(coef=0.02, target=6.0, horizon=10_000.0)
    after = before.update(kl, samples=256)
    assert after.coef == pytest.approx(expected, rel=1e-12)
    assert (after.target, after.horizon) == (6.0, 10_000.0)
    assert before.coef == 0.02


def test_adaptive_coefficient_holds_the_target_of_a_simple_plant():
    """KL falls as the coefficient rises: kl = 0.6 / coef. The controller finds coef = 0.1."""
    controller = AdaptiveKL(coef=0.02, target=6.0, horizon=1_000.0)
    for _ in range(200):
        controller = controller.update(0.6 / controller.coef, samples=200)
    assert controller.coef == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -5.0)])
def test_adaptive_coefficient_needs_a_target_and_a_horizon(target, horizon):
    with pytest.raises(
        ValueError, match=f"^target and horizon must be positive, got target={target}, horizon={horizon}$"
    ):
        AdaptiveKL(coef=0.1, target=target, horizon=horizon)


def test_adaptive_coefficient_takes_a_target_and_horizon_below_one():
    assert AdaptiveKL(coef=0.1, target=0.5, horizon=0.5).update(0.5, samples=1).coef == 0.1


@pytest.mark.parametrize("controller", [FixedKL(coef=0.1), AdaptiveKL(coef=0.1, target=1.0, horizon=1.0)])
def test_controllers_do_not_change_in_place(controller):
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.coef = 0.2


# bad input


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("shapes", "kind", "sentence"),
    [
        (((2, 3), (2, 4), (2, 3)), "k1", "ref_logprobs has shape (2, 4) but mask has shape (2, 3)"),
        (((1, 3), (2, 3), (2, 3)), "k1", "logprobs has shape (1, 3) but mask has shape (2, 3)"),
        (((2, 3), (2, 3), (2, 3)), "k4", "unknown kind 'k4'; choose one of 'k1', 'clamp', 'k2', 'k3', 'abs'"),
    ],
)
def test_wrong_input_is_named(shapes, kind, sentence):
    logprobs, ref, mask = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared below
        kl_estimate(logprobs, ref, mask.bool(), kind=kind)
    assert sentence in str(raised.value)


@pytest.mark.usefixtures("users_view")
def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), kind="k1")


@pytest.mark.usefixtures("users_view")
def test_exact_kl_names_both_shapes():
    with pytest.raises(ValueError, match=r"^ref_logits has shape \(3, 4\) but logits has shape \(2, 4\)"):
        exact_kl(torch.zeros(2, 4), torch.zeros(3, 4))
