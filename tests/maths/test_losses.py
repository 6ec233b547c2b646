"""Losses per position and per pair: goldens worked by hand, loop references, gradients, limits, bad input."""

import math
from itertools import product

import pytest
import references_losses as reference
import torch

from rolecall.maths import losses
from rolecall.maths.reduce import aggregate

LOG2 = math.log(2)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def every(like):
    return torch.ones(like.shape, dtype=torch.bool)


def equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


def gradient(function, x, *others, **options):
    """d(sum of the losses) / dx."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x, *others, **options).sum(), x)[0]


def random_inputs(seed, shape=(4, 6)):
    """(logprobs, old_logprobs, advantages, mask), with rows that do not count at all among them."""
    random = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, *shape, generator=random, dtype=torch.float64).unbind()
    mask = torch.rand(shape, generator=random) > 0.3
    mask[0] = False
    return logprobs - 2, old * 0.5 + logprobs - 2, advantages, mask


seeds = pytest.mark.parametrize("seed", range(4))

# Every loss of the policy, as f(logprobs, old or behaviour log-probs, advantages, mask).
POLICY = {
    "nll": lambda p, q, a, m: losses.nll(p, m),
    "reinforce": lambda p, q, a, m: losses.reinforce(p, a, m),
    "ppo_clip": lambda p, q, a, m: losses.ppo_clip(p, q, a, m, clip_low=0.2, clip_high=0.28),
    "ppo_clip dual": lambda p, q, a, m: losses.ppo_clip(p, q, a, m, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": lambda p, q, a, m: losses.gspo(p, q, a, m, clip_low=0.1, clip_high=0.2),
    "cispo": lambda p, q, a, m: losses.cispo(p, q, a, m, clip_high=0.5),
    "replay_clipped": losses.replay_clipped,
    "replay_shaped": losses.replay_shaped,
}
policy = pytest.mark.parametrize("loss", POLICY.values(), ids=POLICY.keys())
WEIGHTS = {
    f"{level} {kind}": lambda p, q, a, m, level=level, kind=kind: losses.importance_weights(
        p, q, m, level=level, kind=kind, low=0.5, high=1.5
    )
    for level in ("token", "sequence")
    for kind in ("truncate", "mask")
}
OTHERS = {
    "ratio": lambda p, q, a, m: losses.ratio(p, q, m),
    "value_clip": lambda p, q, a, m: losses.value_clip(p, q, a, m, clip=0.2),
    "value without clip": lambda p, q, a, m: losses.value_clip(p, q, a, m, clip=None),
    "entropy": lambda p, q, a, m: losses.entropy(torch.stack([p, q, a], dim=-1), m),
}
ALL = POLICY | WEIGHTS | OTHERS
all_losses = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())


# goldens


def test_ratio_is_the_quotient_of_probabilities():
    logprobs, old = tensor([0.5, 0.25, 0.5]).log(), tensor([0.25, 0.25, 0.1]).log()
    equal(losses.ratio(logprobs, old, torch.tensor([[True, True, False]])), [[2.0, 1.0, 0.0]])


def test_nll_and_reinforce():
    logprobs, mask = tensor([-1.0, -2.0, -3.0]), torch.tensor([[True, False, True]])
    equal(losses.nll(logprobs, mask), [[1.0, 0.0, 3.0]])
    equal(losses.reinforce(logprobs, tensor([2.0, 5.0, -0.5]), mask), [[2.0, 0.0, -1.5]])
    equal(losses.reinforce(logprobs, torch.ones_like(logprobs), mask), losses.nll(logprobs, mask))


# rho = 2, 1/2, 1.1 with A = 1, then with A = -1; the clip leaves 1.25, 0.8, 1.1.
RHO = tensor([2.0, 0.5, 1.1, 2.0, 0.5, 1.1])
SIGNS = tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])


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
    rho, one = tensor([100.0]), tensor([1.0])
    actual = losses.ppo_clip(rho.log(), 0 * one, -one, every(one), clip_low=0.2, clip_high=0.2)
    equal(actual, [[100.0]], atol=1e-9)


def test_dual_clip_caps_the_loss_of_bad_actions():
    rho, advantages = tensor([5.0, 2.0, 5.0, 0.5]), tensor([-1.0, -1.0, 1.0, -2.0])
    arguments = rho.log(), torch.zeros_like(rho), advantages, every(rho)
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    equal(losses.ppo_clip(*arguments, **options), [[3.0, 2.0, -1.2, 1.6]])
    equal(gradient(losses.ppo_clip, *arguments, **options), [[0.0, 2.0, 0.0, 0.0]])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_must_exceed_one(dual_clip):
    one = tensor([1.0])
    with pytest.raises(ValueError, match=f"^dual_clip must be larger than 1, got {dual_clip}$"):
        losses.ppo_clip(one, one, one, every(one), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def test_dual_clip_a_little_above_one_is_taken():
    one = tensor([1.0])
    actual = losses.ppo_clip(one, 0 * one, -one, every(one), clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    equal(actual, [[1.5]])


def test_gspo_has_one_ratio_per_sequence():
    # Row 0: log ratios 2 log 2 and 0, so s = 2; the clip at 1.5 holds for A = 1. Row 1: log 4 alone counts, s = 4, A < 0.
    logprobs = tensor([2 * LOG2, 0.0, 9.0], [2 * LOG2, 7.0, 9.0])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    advantages = tensor([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0])
    actual = losses.gspo(logprobs, 0 * logprobs, advantages, mask, clip_low=0.5, clip_high=0.5)
    equal(actual, [[-1.5, -1.5, 0.0], [4.0, 0.0, 0.0]])


def test_gspo_clips_below_as_well():
    logprobs = tensor([-2 * LOG2, 0.0])
    options = {"clip_low": 0.25, "clip_high": 0.5}
    equal(losses.gspo(logprobs, 0 * logprobs, tensor([-1.0, -1.0]), every(logprobs), **options), [[0.75, 0.75]])


def test_cispo_clips_the_weight_and_never_the_gradient():
    logprobs = tensor([-1.0, -1.0, -1.0])
    old = logprobs - tensor([4.0, 0.25, 1.0]).log()
    advantages = tensor([2.0, 2.0, -3.0])
    arguments = old, advantages, every(old)
    equal(losses.cispo(logprobs, *arguments, clip_high=0.5), [[1.5 * 2, 0.25 * 2, -3.0]])
    equal(gradient(losses.cispo, logprobs, *arguments, clip_high=0.5), [[-1.5 * 2, -0.25 * 2, 3.0]])
    equal(losses.cispo(logprobs, *arguments, clip_high=0.5, clip_low=0.5), [[1.5 * 2, 0.5 * 2, -3.0]])


def test_cispo_leaves_the_lower_side_free_unless_asked():
    logprobs = tensor([-1.0])
    actual = losses.cispo(logprobs, logprobs + 9.0, tensor([1.0]), every(logprobs), clip_high=0.5)
    equal(actual, [[math.exp(-9.0)]])


def test_replay_clipped_has_agentevolvers_ranges():
    # 1.7 is clipped to 1.6 and 0.5 to 0.8; a bad action's loss is capped at 3.
    rho, advantages = tensor([1.7, 0.5, 4.0, 1.5]), tensor([1.0, -1.0, -1.0, 1.0])
    actual = losses.replay_clipped(rho.log(), torch.zeros_like(rho), advantages, every(rho))
    equal(actual, [[-1.6, 0.8, 3.0, -1.5]])


def test_replay_clipped_takes_other_ranges():
    rho, advantages = tensor([1.7, 0.5, 4.0]), tensor([1.0, -1.0, -1.0])
    actual = losses.replay_clipped(
        rho.log(), torch.zeros_like(rho), advantages, every(rho), clip_low=0.1, clip_high=0.3, dual_clip=None
    )
    equal(actual, [[-1.3, 0.9, 4.0]])


def test_replay_shaped_saturates():
    w, advantages = tensor([1.0, 0.1, 4.0]), tensor([1.0, -2.0, 3.0])
    arguments = w.log(), torch.zeros_like(w), advantages, every(w)
    equal(losses.replay_shaped(*arguments), [[-1 / 1.1, 1.0, -12 / 4.1]])
    equal(losses.replay_shaped(*arguments, offset=1.0), [[-0.5, 2 * 0.1 / 1.1, -12 / 5]])


WEIGHED = tensor([4.0, 0.5, 1.0], [0.1, 8.0, 3.0])


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
    one = tensor([0.0, -1e4])
    options = {"level": "token", "kind": "mask"}
    equal(losses.importance_weights(one, 0 * one, every(one), low=1.0, high=1.0, **options), [[1.0, 0.0]])
    equal(losses.importance_weights(one, 0 * one, every(one), high=1.0, **options), [[1.0, math.exp(-20)]], atol=1e-20)


def test_importance_weights_carry_no_gradient():
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    weights = losses.importance_weights(logprobs, logprobs * 2, every(logprobs), level="token", kind="mask", high=9.0)
    assert not weights.requires_grad


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1.0), (2.0, 1.0)])
def test_importance_weights_need_a_band(low, high):
    one = tensor([0.0])
    with pytest.raises(ValueError, match=f"^the band must be 0 <= low <= high, got low={low}, high={high}$"):
        losses.importance_weights(one, one, every(one), level="token", kind="mask", low=low, high=high)


def test_value_clip_takes_the_larger_error():
    # V, V_old, R: moved 1 towards R (the clipped error is larger), moved away (the plain one is), inside the range.
    values, old, returns = tensor([1.0, -1.0, 0.1]), tensor([0.0, 0.0, 0.0]), tensor([2.0, 2.0, 2.0])
    actual = losses.value_clip(values, old, returns, every(values), clip=0.25)
    equal(actual, [[1.75**2 / 2, 9 / 2, 1.9**2 / 2]])
    equal(gradient(losses.value_clip, values, old, returns, every(values), clip=0.25), [[0.0, -3.0, -1.9]])


def test_value_loss_without_clip_is_half_the_squared_error():
    values, returns = tensor([1.0, -1.0]), tensor([2.0, 2.0])
    equal(losses.value_clip(values, 0 * values, returns, every(values), clip=None), [[0.5, 4.5]])


def test_value_clip_works_on_both_sides_of_the_old_value():
    values, old, returns = tensor([-1.0, 1.0]), tensor([0.0, 0.0]), tensor([-2.0, 2.0])
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
        equal(actual, reference.table(function, m, *inputs))

    exp, clipped = math.exp, reference.surrogate
    check(losses.ratio(p, q, m), lambda p, q: exp(p - q), p, q)
    check(losses.nll(p, m), lambda p: -p, p)
    check(losses.reinforce(p, a, m), lambda p, a: -a * p, p, a)
    check(POLICY["ppo_clip"](p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.28), p, q, a)
    check(POLICY["ppo_clip dual"](p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.28, 3), p, q, a)
    check(losses.replay_clipped(p, q, a, m), lambda p, q, a: clipped(exp(p - q), a, 0.2, 0.6, 3), p, q, a)
    check(
        losses.cispo(p, q, a, m, clip_high=0.5, clip_low=0.3),
        lambda p, q, a: -reference.clip(exp(p - q), 0.7, 1.5) * a * p,
        p,
        q,
        a,
    )
    check(losses.replay_shaped(p, q, a, m), lambda p, q, a: -a * exp(p - q) / (exp(p - q) + 0.1), p, q, a)
    s = reference.sequence_log_ratios(p, q, m, reduce="mean")
    check(POLICY["gspo"](p, q, a, m), lambda s, a: clipped(exp(s), a, 0.1, 0.2), s, a)


@seeds
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weights_are_their_loop(seed, kind):
    p, q, _, m = random_inputs(seed)
    token, sequence = p - q, reference.sequence_log_ratios(p, q, m, reduce="sum")
    for level, log_ratios in (("token", token), ("sequence", sequence)):
        actual = losses.importance_weights(p, q, m, level=level, kind=kind, low=0.5, high=1.5)
        equal(actual, reference.table(lambda x: reference.importance(x, kind, 0.5, 1.5), m, log_ratios))


@seeds
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_clip_is_its_loop(seed, clip):
    values, old, returns, mask = random_inputs(seed)
    expected = reference.table(lambda v, o, r: reference.value_loss(v, o, r, clip), mask, values, old, returns)
    equal(losses.value_clip(values, old, returns, mask, clip=clip), expected)


@seeds
def test_entropy_is_its_loop(seed):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [[reference.entropy(position) for position in row] for row in logits.tolist()]
    equal(losses.entropy(logits, torch.ones(2, 3, dtype=torch.bool)), expected)


@seeds
def test_preference_losses_are_their_loops(seed):
    pairs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = list(zip(*pairs.tolist(), strict=True))
    log_sigmoid = reference.log_sigmoid
    equal(losses.bradley_terry(pairs[0], pairs[1], margin=pairs[2]), [-log_sigmoid(c - r - m) for c, r, m, _ in rows])
    margins = [0.5 * ((c - ref_c) - (r - ref_r)) for c, r, ref_c, ref_r in rows]
    expected = [-0.8 * log_sigmoid(m) - 0.2 * log_sigmoid(-m) for m in margins]
    equal(losses.dpo(*pairs, beta=0.5, label_smoothing=0.2), expected)


# gradients


@pytest.mark.parametrize("name", ["nll", "reinforce", "ppo_clip", "ppo_clip dual", "replay_clipped", "replay_shaped"])
def test_gradients_are_those_of_finite_differences(name):
    p, q, a, m = random_inputs(1, (3, 4))
    assert torch.autograd.gradcheck(lambda p: POLICY[name](p, q, a, m), p.requires_grad_())


@pytest.mark.parametrize("name", ["value_clip", "value without clip", "entropy", "ratio"])
def test_other_gradients_are_those_of_finite_differences(name):
    p, q, a, m = random_inputs(2, (3, 4))
    assert torch.autograd.gradcheck(lambda p: OTHERS[name](p, q, a, m), p.requires_grad_())


def test_preference_gradients_are_those_of_finite_differences():
    pairs = [x.requires_grad_() for x in torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()]
    assert torch.autograd.gradcheck(lambda c, r: losses.bradley_terry(c, r, margin=0.3), pairs[:2])
    assert torch.autograd.gradcheck(lambda *x: losses.dpo(*x, beta=0.7, label_smoothing=0.1), pairs)


@seeds
def test_cispo_gradient_is_the_clipped_weight_times_the_advantage(seed):
    p, q, a, m = random_inputs(seed)
    weight = (p - q).exp().clamp(0.0, 1.5)
    equal(gradient(POLICY["cispo"], p, q, a, m), torch.where(m, -weight * a, 0))


@seeds
def test_gspo_has_the_gradient_of_the_sequence_formula(seed):
    """With one advantage per sequence and the mean over each sequence it is the clipped loss of s_i itself."""
    p, q, a, m = random_inputs(seed)
    a = a[:, :1].expand_as(a)

    def formula(p):
        count = m.sum(1)
        s = (torch.where(m, p - q, 0).sum(1) / count.clamp(min=1)).exp()
        loss = torch.maximum(-a[:, 0] * s, -a[:, 0] * s.clamp(0.9, 1.2))
        return loss[count > 0].mean()

    def ours(p):
        return aggregate(POLICY["gspo"](p, q, a, m), m, mode="seq-mean-token-mean")

    equal(ours(p), formula(p))
    equal(gradient(ours, p), gradient(formula, p))


def test_gspo_has_the_exact_value_of_its_sequence_ratio_in_float32():
    """The straight-through term is exactly 0, however large the log ratio of a single position."""
    logprobs, old = torch.tensor([[-900.0, -0.1, -0.3]]), torch.tensor([[-1.7, -898.3, -0.1]])
    a, mask = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)
    value = losses.gspo(logprobs, old, a, mask, clip_low=1.0, clip_high=100.0)
    assert value.unique().numel() == 1


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_clip dual", "gspo", "cispo", "replay_clipped"])
@seeds
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, seed):
    p, _, a, m = random_inputs(seed)
    if name == "gspo":  # its gradient is that of REINFORCE under the same reduction
        a = a[:, :1].expand_as(a)
    equal(gradient(POLICY[name], p, p.clone(), a, m), gradient(losses.reinforce, p, a, m))


@seeds
def test_at_ratio_one_shaped_replay_has_a_twelfth_of_the_gradient(seed):
    p, _, a, m = random_inputs(seed)
    equal(gradient(losses.replay_shaped, p, p.clone(), a, m), 0.1 / 1.21 * gradient(losses.reinforce, p, a, m))


@policy
def test_gradients_go_to_the_policy_alone(loss):
    p, q, a, m = random_inputs(0)
    inputs = [x.clone().requires_grad_() for x in (p, q, a)]
    loss(*inputs, m).sum().backward()
    assert inputs[0].grad.abs().sum() > 0
    assert [x.grad for x in inputs[1:]] == [None, None]


def test_the_value_losss_gradient_goes_to_the_values_alone():
    values, old, returns, mask = random_inputs(0)
    inputs = [x.clone().requires_grad_() for x in (values, old, returns)]
    losses.value_clip(*inputs, mask, clip=0.2).sum().backward()
    assert inputs[0].grad.abs().sum() > 0
    assert [x.grad for x in inputs[1:]] == [None, None]


# limits


@all_losses
def test_what_does_not_count_reaches_nothing(loss):
    p, q, a, m = random_inputs(3)
    for junk in (torch.nan, torch.inf, -torch.inf):
        clean = [torch.where(m, x, 0).requires_grad_() for x in (p, q, a)]
        dirty = [torch.where(m, x, junk).requires_grad_() for x in (p, q, a)]
        expected, actual = loss(*clean, m), loss(*dirty, m)
        assert actual.equal(expected)
        assert actual[~m].eq(0).all()
        if actual.requires_grad:
            expected.sum().backward()
            actual.sum().backward()
        for x, y in zip(clean, dirty, strict=True):
            assert (x.grad is None) == (y.grad is None)
            if x.grad is not None:
                assert y.grad.equal(x.grad)
                assert y.grad[~m].eq(0).all()


@all_losses
def test_nothing_to_count_is_zero(loss):
    p, q, a, m = random_inputs(3)
    assert loss(p, q, a, torch.zeros_like(m)).eq(0).all()


@all_losses
def test_a_broken_record_gives_no_inf(loss):
    for dtype, gap, advantage in product((torch.float32, torch.bfloat16), (1e4, -1e4), (1.0, -1.0)):
        old = torch.tensor([[-1.0, -1.0]], dtype=dtype)
        logprobs = (old + torch.tensor([[gap, 0.0]], dtype=dtype)).requires_grad_()
        value = loss(logprobs, old, torch.full_like(old, advantage), every(old))
        assert value.isfinite().all()
        if value.requires_grad:
            value.sum().backward()
            assert logprobs.grad.isfinite().all()


# bad input

FULL, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
SHORT = torch.zeros(2, 2)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
BAND = {"level": "token", "kind": "mask", "high": 2.0}
TAKES = {
    losses.ratio: (["logprobs", "old_logprobs"], {}),
    losses.nll: (["logprobs"], {}),
    losses.reinforce: (["logprobs", "advantages"], {}),
    losses.ppo_clip: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.gspo: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.cispo: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.replay_shaped: (["logprobs", "behaviour_logprobs", "advantages"], {}),
    losses.importance_weights: (["logprobs", "behaviour_logprobs"], BAND),
    losses.value_clip: (["values", "old_values", "returns"], {"clip": 0.2}),
}


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, (names, _) in TAKES.items() for name in names]
)
def test_a_wrong_shape_is_named(function, name):
    names, options = TAKES[function]
    arguments = [SHORT if each == name else FULL for each in names]
    with pytest.raises(ValueError, match=rf"^{name} has shape \(2, 2\) but mask has shape \(2, 3\)"):
        function(*arguments, MASK, **options)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize("function", [*TAKES, losses.replay_clipped, losses.entropy])
def test_a_mask_of_numbers_is_refused(function):
    names, options = TAKES.get(function, (["a", "b", "c"], {}))
    arguments = [FULL[..., None]] if function is losses.entropy else [FULL for _ in names]
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        function(*arguments, MASK.long(), **options)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: losses.importance_weights(FULL, FULL, MASK, level="word", kind="mask", high=2.0),
            "unknown level 'word'; choose one of 'token', 'sequence'",
        ),
        (
            lambda: losses.importance_weights(FULL, FULL, MASK, level="token", kind="clip", high=2.0),
            "unknown kind 'clip'; choose one of 'truncate', 'mask'",
        ),
        (
            lambda: losses.entropy(torch.zeros(2, 2, 5), MASK),
            "logits has shape (2, 2) but mask has shape (2, 3)",
        ),
        (
            lambda: losses.bradley_terry(torch.zeros(3), torch.zeros(2)),
            "rejected has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.bradley_terry(torch.zeros(3), torch.zeros(3), margin=torch.zeros(1)),
            "margin has shape (1,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(2), torch.zeros(3), torch.zeros(3), beta=0.1),
            "rejected has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(3), beta=0.1),
            "ref_chosen has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(2), beta=0.1),
            "ref_rejected has shape (2,) but chosen has shape (3,)",
        ),
    ],
)
def test_wrong_input_is_named(call, sentence):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared below
        call()
    assert sentence in str(raised.value)
