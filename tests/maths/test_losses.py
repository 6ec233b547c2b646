"""Losses per position and per pair: goldens worked by hand and loop references."""

import math

import loops
import pytest
import torch
from loss_table import POLICY, gradient, random_inputs
from masking import equal, every

from rolecall.conformance import references
from rolecall.conformance.compare import reals
from rolecall.maths import losses

LOG2 = math.log(2)


seeds = pytest.mark.parametrize("seed", range(4))


# goldens


def test_ratio_is_the_quotient_of_probabilities():
    logprobs, old = reals([0.5, 0.25, 0.5]).log(), reals([0.25, 0.25, 0.1]).log()
    equal(losses.ratio(logprobs, old, torch.tensor([[True, True, False]])), [[2.0, 1.0, 0.0]])


def test_nll_and_reinforce():
    logprobs, mask = reals([-1.0, -2.0, -3.0]), torch.tensor([[True, False, True]])
    equal(losses.nll(logprobs, mask), [[1.0, 0.0, 3.0]])
    equal(losses.reinforce(logprobs, reals([2.0, 5.0, -0.5]), mask), [[2.0, 0.0, -1.5]])
    equal(losses.reinforce(logprobs, torch.ones_like(logprobs), mask), losses.nll(logprobs, mask))


# rho = 2, 1/2, 1.1 with A = 1, then with A = -1; the clip leaves 1.25, 0.8, 1.1.
RHO = reals([2.0, 0.5, 1.1, 2.0, 0.5, 1.1])
SIGNS = reals([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])


def test_ppo_clip_takes_the_larger_of_the_two_losses():
    actual = losses.ppo_clip(RHO.log(), torch.zeros_like(RHO), SIGNS, every(RHO), clip_low=0.2, clip_high=0.25)
    #         max(-2, -1.25)  max(-0.5, -0.8)  same   max(2, 1.25)  max(0.5, 0.8)  same
    equal(actual, [[-1.25, -0.5, -1.1, 2.0, 0.8, 1.1]])


def test_ppo_clip_has_no_gradient_where_it_clips():
    actual = gradient(
        losses.ppo_clip, RHO.log(), torch.zeros_like(RHO), SIGNS, every(RHO), clip_low=0.2, clip_high=0.25
    )
    equal(actual, [[0.0, -0.5, -1.1, 2.0, 0.0, 1.1]])


def test_clipping_does_not_bound_the_ratio():
    rho, one = reals([100.0]), reals([1.0])
    actual = losses.ppo_clip(rho.log(), 0 * one, -one, every(one), clip_low=0.2, clip_high=0.2)
    equal(actual, [[100.0]], atol=1e-9)


def test_dual_clip_caps_the_loss_of_bad_actions():
    rho, advantages = reals([5.0, 2.0, 5.0, 0.5]), reals([-1.0, -1.0, 1.0, -2.0])
    arguments = rho.log(), torch.zeros_like(rho), advantages, every(rho)
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    equal(losses.ppo_clip(*arguments, **options), [[3.0, 2.0, -1.2, 1.6]])
    equal(gradient(losses.ppo_clip, *arguments, **options), [[0.0, 2.0, 0.0, 0.0]])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_must_exceed_one(dual_clip):
    one = reals([1.0])
    with pytest.raises(ValueError, match=f"^dual_clip must be larger than 1, got {dual_clip}$"):
        losses.ppo_clip(one, one, one, every(one), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def test_dual_clip_a_little_above_one_is_taken():
    one = reals([1.0])
    actual = losses.ppo_clip(one, 0 * one, -one, every(one), clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    equal(actual, [[1.5]])


def test_gspo_has_one_ratio_per_sequence():
    # Row 0: log ratios 2 log 2 and 0, so s = 2; the clip at 1.5 holds for A = 1. Row 1: log 4 alone counts, s = 4, A < 0.
    logprobs = reals([2 * LOG2, 0.0, 9.0], [2 * LOG2, 7.0, 9.0])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    advantages = reals([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0])
    actual = losses.gspo(logprobs, 0 * logprobs, advantages, mask, clip_low=0.5, clip_high=0.5)
    equal(actual, [[-1.5, -1.5, 0.0], [4.0, 0.0, 0.0]])


def test_gspo_clips_below_as_well():
    logprobs = reals([-2 * LOG2, 0.0])
    options = {"clip_low": 0.25, "clip_high": 0.5}
    equal(losses.gspo(logprobs, 0 * logprobs, reals([-1.0, -1.0]), every(logprobs), **options), [[0.75, 0.75]])


def test_cispo_clips_the_weight_and_never_the_gradient():
    logprobs = reals([-1.0, -1.0, -1.0])
    old = logprobs - reals([4.0, 0.25, 1.0]).log()
    advantages = reals([2.0, 2.0, -3.0])
    arguments = old, advantages, every(old)
    equal(losses.cispo(logprobs, *arguments, clip_high=0.5), [[1.5 * 2, 0.25 * 2, -3.0]])
    equal(gradient(losses.cispo, logprobs, *arguments, clip_high=0.5), [[-1.5 * 2, -0.25 * 2, 3.0]])
    equal(losses.cispo(logprobs, *arguments, clip_high=0.5, clip_low=0.5), [[1.5 * 2, 0.5 * 2, -3.0]])


def test_cispo_leaves_the_lower_side_free_unless_asked():
    logprobs = reals([-1.0])
    actual = losses.cispo(logprobs, logprobs + 9.0, reals([1.0]), every(logprobs), clip_high=0.5)
    equal(actual, [[math.exp(-9.0)]])


def test_replay_clipped_has_agentevolvers_ranges():
    # 1.7 is clipped to 1.6 and 0.5 to 0.8; a bad action's loss is capped at 3.
    rho, advantages = reals([1.7, 0.5, 4.0, 1.5]), reals([1.0, -1.0, -1.0, 1.0])
    actual = losses.replay_clipped(rho.log(), torch.zeros_like(rho), advantages, every(rho))
    equal(actual, [[-1.6, 0.8, 3.0, -1.5]])


def test_replay_clipped_takes_other_ranges():
    rho, advantages = reals([1.7, 0.5, 4.0]), reals([1.0, -1.0, -1.0])
    actual = losses.replay_clipped(
        rho.log(), torch.zeros_like(rho), advantages, every(rho), clip_low=0.1, clip_high=0.3, dual_clip=None
    )
    equal(actual, [[-1.3, 0.9, 4.0]])


def test_replay_shaped_saturates():
    w, advantages = reals([1.0, 0.1, 4.0]), reals([1.0, -2.0, 3.0])
    arguments = w.log(), torch.zeros_like(w), advantages, every(w)
    equal(losses.replay_shaped(*arguments), [[-1 / 1.1, 1.0, -12 / 4.1]])
    equal(losses.replay_shaped(*arguments, offset=1.0), [[-0.5, 2 * 0.1 / 1.1, -12 / 5]])


WEIGHED = reals([4.0, 0.5, 1.0], [0.1, 8.0, 3.0])


@pytest.mark.parametrize(
    ("level", "kind", "low", "expected"),
    [
        ("token", "truncate", 0.0, [[2.0, 0.5, 1.0], [0.1, 2.0, 0.0]]),
        ("token", "truncate", 0.6, [[2.0, 0.6, 1.0], [0.6, 2.0, 0.0]]),
        ("token", "mask", 0.0, [[0.0, 0.5, 1.0], [0.1, 0.0, 0.0]]),
        ("token", "mask", 0.6, [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        ("sequence", "truncate", 0.0, [[2.0, 2.0, 2.0], [0.8, 0.8, 0.0]]),
        ("sequence", "mask", 0.0, [[2.0, 2.0, 2.0], [0.8, 0.8, 0.0]]),
        ("sequence", "mask", 0.9, [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_importance_weights(level, kind, low, expected):
    # Row 0 multiplies to 2, the two positions of row 1 that count to 0.8.
    mask = torch.tensor([[True, True, True], [True, True, False]])
    # A hair above 2, because a product of exponentials need not be exactly 2.
    options = {"level": level, "kind": kind, "low": low, "high": 2.0 + 1e-9}
    equal(losses.importance_weights(WEIGHED.log(), torch.zeros_like(WEIGHED), mask, **options), expected, atol=1e-8)


def test_the_band_of_importance_weights_includes_its_ends_and_low_is_zero_unless_given():
    one = reals([0.0, -1e4])
    options = {"level": "token", "kind": "mask"}
    equal(losses.importance_weights(one, 0 * one, every(one), low=1.0, high=1.0, **options), [[1.0, 0.0]])
    equal(losses.importance_weights(one, 0 * one, every(one), high=1.0, **options), [[1.0, math.exp(-20)]], atol=1e-20)


def test_importance_weights_carry_no_gradient():
    logprobs = reals([-1.0, -2.0]).requires_grad_()
    weights = losses.importance_weights(logprobs, logprobs * 2, every(logprobs), level="token", kind="mask", high=9.0)
    assert not weights.requires_grad


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1.0), (2.0, 1.0)])
def test_importance_weights_need_a_band(low, high):
    one = reals([0.0])
    with pytest.raises(ValueError, match=f"^the band must be 0 <= low <= high, got low={low}, high={high}$"):
        losses.importance_weights(one, one, every(one), level="token", kind="mask", low=low, high=high)


def test_value_clip_takes_the_larger_error():
    # V, V_old, R: moved 1 towards R (the clipped error is larger), moved away (the plain one is), inside the range.
    values, old, returns = reals([1.0, -1.0, 0.1]), reals([0.0, 0.0, 0.0]), reals([2.0, 2.0, 2.0])
    actual = losses.value_clip(values, old, returns, every(values), clip=0.25)
    equal(actual, [[1.75**2 / 2, 9 / 2, 1.9**2 / 2]])
    equal(gradient(losses.value_clip, values, old, returns, every(values), clip=0.25), [[0.0, -3.0, -1.9]])


def test_value_loss_without_clip_is_half_the_squared_error():
    values, returns = reals([1.0, -1.0]), reals([2.0, 2.0])
    equal(losses.value_clip(values, 0 * values, returns, every(values), clip=None), [[0.5, 4.5]])


def test_value_clip_works_on_both_sides_of_the_old_value():
    values, old, returns = reals([-1.0, 1.0]), reals([0.0, 0.0]), reals([-2.0, 2.0])
    equal(losses.value_clip(values, old, returns, every(values), clip=0.5), [[1.125, 1.125]])


def test_entropy_of_known_distributions():
    forbidden = -math.inf
    logits = torch.tensor(
        [[[0.0, 0.0, 0.0], [5.0, forbidden, forbidden], [1.0, 1.0, forbidden], [forbidden] * 3]], dtype=torch.float64
    )
    mask = torch.tensor([[True, True, True, False]])
    equal(losses.entropy(logits, mask), [[math.log(3), 0.0, LOG2, 0.0]])


def test_entropy_has_finite_gradients_where_choices_are_forbidden():
    logits = torch.tensor([[[0.5, -1.0, -math.inf], [-math.inf] * 3]], dtype=torch.float64)
    actual = gradient(losses.entropy, logits, torch.tensor([[True, False]]))
    expected = gradient(losses.entropy, logits[:, :1, :2], torch.tensor([[True]]))
    equal(actual[0, 0, :2], expected[0, 0])
    assert actual[0, 0, 2] == 0
    assert actual[0, 1].tolist() == [0.0, 0.0, 0.0]


def test_bradley_terry():
    zero, three = torch.zeros(1).double(), torch.tensor([math.log(3)], dtype=torch.float64)
    equal(losses.bradley_terry(zero, zero), [LOG2])
    equal(losses.bradley_terry(three, zero), [math.log(4 / 3)])  # sigmoid(log 3) = 3/4
    equal(losses.bradley_terry(zero, three), [math.log(4)])
    equal(losses.bradley_terry(zero, zero, margin=math.log(3)), [math.log(4)])
    equal(losses.bradley_terry(three, zero, margin=three), [LOG2])


def test_bradley_terry_pushes_by_the_probability_of_the_wrong_order():
    chosen, rejected = torch.tensor([math.log(3)], dtype=torch.float64), torch.zeros(1).double()
    equal(gradient(losses.bradley_terry, chosen, rejected), [-1 / 4])
    equal(gradient(lambda r: losses.bradley_terry(chosen, r), rejected), [1 / 4])


def test_dpo():
    # Margins: chosen 3 - 1 = 2, rejected 1.5 - 0.5 = 1, so beta (2 - 1) = log 3.
    pairs = [torch.tensor([x]).double() for x in (3.0, 1.5, 1.0, 0.5)]
    beta = math.log(3)
    equal(losses.dpo(*pairs, beta=beta), [math.log(4 / 3)])
    equal(losses.dpo(*pairs, beta=beta, label_smoothing=0.1), [0.9 * math.log(4 / 3) + 0.1 * math.log(4)])
    equal(gradient(losses.dpo, *pairs, beta=beta), [-beta / 4])


def test_dpo_starts_at_log_two():
    logprobs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    equal(losses.dpo(*logprobs, *logprobs.clone(), beta=0.1), [LOG2] * 5, atol=1e-7)


def test_preferences_survive_huge_margins():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = losses.bradley_terry(far, torch.zeros(2)) + losses.dpo(far, -far, 0 * far, 0 * far, beta=1.0)
    loss.sum().backward()
    equal(loss.detach(), [0.0, 3e4])
    assert far.grad.isfinite().all()


# references


@seeds
def test_policy_losses_are_their_loops(seed):
    p, q, a, m = random_inputs(seed)

    def check(actual, function, *inputs):
        equal(actual, references.table(function, m, *inputs))

    exp, clipped = math.exp, references.surrogate
    check(losses.ratio(p, q, m), lambda p, q: exp(p - q), p, q)
    check(losses.nll(p, m), lambda p: -p, p)
    check(losses.reinforce(p, a, m), lambda p, a: -a * p, p, a)
    check(POLICY["ppo_clip"](p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.28), p, q, a)
    check(POLICY["ppo_clip dual"](p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.28, 3), p, q, a)
    check(losses.replay_clipped(p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.6, 3), p, q, a)
    check(
        losses.cispo(p, q, a, m, clip_high=0.5, clip_low=0.3),
        lambda p, q, a: -references.clip(exp(p - q), 0.7, 1.5) * a * p,
        p,
        q,
        a,
    )
    check(losses.replay_shaped(p, q, a, m), lambda p, q, a: -a * exp(p - q) / (exp(p - q) + 0.1), p, q, a)
    s = references.sequence_log_ratios(p, q, m, reduce="mean")
    check(POLICY["gspo"](p, q, a, m), lambda s, a: clipped(exp(s), a, 0.1, 0.2), s, a)


@seeds
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weights_are_their_loop(seed, kind):
    p, q, _, m = random_inputs(seed)
    token, sequence = p - q, references.sequence_log_ratios(p, q, m, reduce="sum")
    for level, log_ratios in (("token", token), ("sequence", sequence)):
        actual = losses.importance_weights(p, q, m, level=level, kind=kind, low=0.5, high=1.5)
        equal(actual, references.table(lambda x: references.importance(x, kind, 0.5, 1.5), m, log_ratios))


@seeds
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_clip_is_its_loop(seed, clip):
    values, old, returns, mask = random_inputs(seed)
    expected = references.table(lambda v, o, r: references.value_loss(v, o, r, clip), mask, values, old, returns)
    equal(losses.value_clip(values, old, returns, mask, clip=clip), expected)


@seeds
def test_entropy_is_its_loop(seed):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [[references.entropy(position) for position in row] for row in logits.tolist()]
    equal(losses.entropy(logits, torch.ones(2, 3, dtype=torch.bool)), expected)


@seeds
def test_preference_losses_are_their_loops(seed):
    pairs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = list(zip(*pairs.tolist(), strict=True))
    log_sigmoid = loops.log_sigmoid
    equal(losses.bradley_terry(pairs[0], pairs[1], margin=pairs[2]), [-log_sigmoid(c - r - m) for c, r, m, _ in rows])
    margins = [0.5 * ((c - ref_c) - (r - ref_r)) for c, r, ref_c, ref_r in rows]
    expected = [-0.8 * log_sigmoid(m) - 0.2 * log_sigmoid(-m) for m in margins]
    equal(losses.dpo(*pairs, beta=0.5, label_smoothing=0.2), expected)
