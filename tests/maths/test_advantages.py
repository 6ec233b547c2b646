"""Advantages from scores: goldens worked by hand, loop references, flat groups, failed rewards, gradients, bad input."""

import math
from itertools import product

import loops
import pytest
import torch
from masking import equal

from rolecall.conformance import references
from rolecall.maths import advantages

SCORES = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 7, -3, -3])


def random_scores(seed):
    """(scores, groups, include): three groups of 1 to 6 rows mixed up, a few failed rewards holding NaN."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, generator=random, dtype=torch.float64)
    groups = torch.randint(5, 9, (12,), generator=random)
    include = torch.rand(12, generator=random) > 0.2
    return torch.where(include, scores, torch.nan), groups, include


# goldens


def test_grpo_divides_by_the_unbiased_std_of_the_group():
    # Group 7: mean 1/2, variance 4 (1/4) / 3 = 1/3. Group -3: mean 3, variance 2 / 1.
    half = math.sqrt(3) / 2
    root = math.sqrt(1 / 2)
    equal(advantages.grpo(SCORES, GROUPS, eps=0.0), [half, -half, -half, half, -root, root])


def test_grpo_adds_eps_to_the_std_and_not_to_the_variance():
    equal(advantages.grpo(SCORES, GROUPS)[0], 0.5 / (math.sqrt(1 / 3) + 1e-4))
    equal(advantages.grpo(SCORES, GROUPS, eps=0.5)[5], 1 / (math.sqrt(2) + 0.5))


def test_grpo_with_batch_scale_divides_all_groups_by_one_std():
    # Mean 8/6; squares 2 (1/9) + 2 (16/9) + 4/9 + 64/9 = 34/3; variance 34/15.
    std = math.sqrt(34 / 15)
    equal(advantages.grpo(SCORES, GROUPS, scale="batch", eps=0.0), [x / std for x in (0.5, -0.5, -0.5, 0.5, -1.0, 1.0)])


@pytest.mark.parametrize("function", [advantages.dr_grpo, lambda *a: advantages.grpo(*a, scale=None)])
def test_dr_grpo_only_centres(function):
    equal(function(SCORES, GROUPS), [0.5, -0.5, -0.5, 0.5, -1.0, 1.0])


def test_rloo_subtracts_the_mean_of_the_others():
    # For the first: the others score 0, 0, 1, so 1 - 1/3.
    equal(advantages.rloo(SCORES, GROUPS), [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2.0, 2.0])


def test_opo_weighs_the_baseline_by_length():
    # (1·1 + 2·0 + 3·0 + 2·1) / 8 = 0.375 and (1·2 + 3·4) / 4 = 3.5.
    lengths = torch.tensor([1, 2, 3, 2, 1, 3])
    equal(advantages.opo(SCORES, lengths, GROUPS), [0.625, -0.375, -0.375, 0.625, -1.5, 0.5])


def test_opo_of_equal_lengths_is_dr_grpo():
    equal(advantages.opo(SCORES, torch.full((6,), 9), GROUPS), advantages.dr_grpo(SCORES, GROUPS))


def test_opo_gives_no_weight_to_an_answer_without_trained_positions():
    equal(advantages.opo(SCORES[4:], torch.tensor([1, 0]), GROUPS[4:]), [0.0, 2.0])


def test_opo_of_a_group_without_trained_positions_takes_no_baseline():
    equal(advantages.opo(SCORES[:2], torch.tensor([0, 0]), GROUPS[:2]), [1.0, 0.0])


def test_remax_subtracts_the_greedy_answers_score():
    equal(advantages.remax(SCORES[:3], torch.tensor([0.25, 1.0, 0.0]).double()), [0.75, -1.0, 0.0])


def test_reinforce_subtracts_a_number_or_one_per_row():
    equal(advantages.reinforce(SCORES[3:]), [1.0, 2.0, 4.0])
    equal(advantages.reinforce(SCORES[3:], 0.5), [0.5, 1.5, 3.5])
    equal(advantages.reinforce(SCORES[3:], torch.tensor([1.0, 0.0, 5.0]).double()), [0.0, 2.0, -1.0])


def test_baselines_are_means_given_to_every_row():
    equal(advantages.batch_mean(SCORES), [8 / 6] * 6)
    equal(advantages.group_mean(SCORES, GROUPS), [0.5] * 4 + [3.0] * 2)


def test_ema_baseline_starts_at_the_first_mean_and_then_mixes():
    first = advantages.EMABaseline(decay=0.9).update(torch.tensor([1.0, 3.0]))
    second = first.update(torch.tensor([4.0, 6.0]))
    assert (first.value, first.started) == (2.0, True)
    assert second.value == pytest.approx(0.9 * 2 + 0.1 * 5, abs=1e-12)


def test_ema_baseline_that_started_at_zero_mixes_with_zero():
    assert advantages.EMABaseline(decay=0.5, started=True).update(torch.tensor([4.0])).value == 2.0


def test_ema_baseline_leaves_failed_rewards_out_and_ignores_a_batch_of_them():
    nothing = torch.tensor([torch.nan, torch.nan])
    start = advantages.EMABaseline(decay=0.9)
    assert start.update(nothing, include=torch.tensor([False, False])) == start
    assert start.update(torch.tensor([torch.nan, 3.0]), include=torch.tensor([False, True])).value == 3.0


@pytest.mark.parametrize("decay", [0.0, 0.999])
def test_ema_baseline_takes_decays_from_zero_to_below_one(decay):
    assert advantages.EMABaseline(decay=decay).decay == decay


@pytest.mark.parametrize("decay", [-0.001, 1.0])
def test_ema_baseline_refuses_other_decays(decay):
    with pytest.raises(ValueError, match=rf"^decay must lie in \[0, 1\), got {decay}$"):
        advantages.EMABaseline(decay=decay)


def test_reinforce_pp_whitens_discounted_returns():
    # Returns 0.5, 1 and 1.5, 3: mean 1.5, variance (1 + 0.25 + 0 + 2.25) / 4.
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    root = math.sqrt(0.875 + 1e-8)
    equal(
        advantages.reinforce_pp(rewards, torch.ones(2, 2, dtype=torch.bool), gamma=0.5),
        [[-1 / root, -0.5 / root], [0.0, 1.5 / root]],
    )


def test_reinforce_pp_does_not_discount_unless_asked():
    # Returns 1, 1 and 3, 3.
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    root = math.sqrt(1 + 1e-8)
    equal(
        advantages.reinforce_pp(rewards, torch.ones(2, 2, dtype=torch.bool)),
        [[-1 / root, -1 / root], [1 / root, 1 / root]],
    )


def test_reinforce_pp_baseline_whitens_over_tokens():
    # Centred -1 at three positions and 1 at one: mean -1/2, variance (3/4 + 9/4) / 4.
    mask = torch.tensor([[True, True, True], [True, False, False]])
    actual = advantages.reinforce_pp_baseline(SCORES[:2].flip(0) * 2 + 1, GROUPS[:2], mask)
    low, high = -0.5 / math.sqrt(0.75 + 1e-8), 1.5 / math.sqrt(0.75 + 1e-8)
    equal(actual, [[low, low, low], [high, 0.0, 0.0]])


def test_whitening_takes_the_moments_of_all_ranks_when_given():
    moments = (torch.tensor(1.0).double(), torch.tensor(4.0).double())
    mask = torch.ones(2, 1, dtype=torch.bool)
    root = math.sqrt(4 + 1e-8)
    equal(advantages.reinforce_pp(torch.tensor([[3.0], [1.0]]).double(), mask, moments=moments), [[2 / root], [0.0]])
    equal(advantages.reinforce_pp_baseline(SCORES[4:], GROUPS[4:], mask, moments=moments), [[-2 / root], [0.0]])


def test_flat_groups_names_rows_with_nothing_to_compare():
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, torch.nan, 2.0, torch.nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4])
    include = torch.tensor([True, True, True, True, True, False, True, False])
    assert advantages.flat_groups(scores, groups, include=include).tolist() == [
        True, True, False, False, True, False, True, False,
    ]  # fmt: skip


# flat groups, groups of one, failed rewards

BY_GROUP = {
    "grpo": advantages.grpo,
    "grpo batch": lambda s, g, include=None: advantages.grpo(s, g, scale="batch", include=include),
    "grpo without eps": lambda s, g, include=None: advantages.grpo(s, g, eps=0.0, include=include),
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "opo": lambda s, g, include=None: advantages.opo(s, torch.arange(1, len(s) + 1), g, include=include),
    "reinforce": lambda s, g, include=None: advantages.reinforce(
        s, advantages.group_mean(s, g, include=include), include=include
    ),
    "reinforce over the batch": lambda s, g, include=None: advantages.reinforce(
        s, advantages.batch_mean(s, include=include), include=include
    ),
}
by_group = pytest.mark.parametrize("function", BY_GROUP.values(), ids=BY_GROUP.keys())


@by_group
def test_a_flat_group_is_exactly_zero(function):
    for dtype, score, size in product((torch.float32, torch.float64), (0.1, 1 / 3, 1e8 + 0.1, -0.7), (1, 2, 3, 7)):
        scores = torch.full((size,), score, dtype=dtype)
        assert function(scores, torch.zeros(size, dtype=torch.long)).tolist() == [0.0] * size


def test_the_sum_of_three_tenths_is_not_three_times_a_tenth():
    """Why exactness needs care: a plain mean leaves a residue, which a division by its own std turns into 1e-9 / 1e-9."""
    scores = torch.full((3,), 0.1, dtype=torch.float64)
    assert (scores - scores.sum() / 3).abs().max() > 0
    assert advantages.grpo(scores, torch.zeros(3, dtype=torch.long), eps=0.0).tolist() == [0.0, 0.0, 0.0]


@by_group
def test_failed_rewards_are_as_if_never_sampled(function):
    scores = torch.tensor([1.0, torch.nan, 0.0, torch.inf, 3.0]).double()
    groups = torch.tensor([0, 0, 0, 1, 0])
    include = torch.tensor([True, False, True, False, True])
    without = function(scores[include], groups[include])
    if function is BY_GROUP["opo"]:
        without = advantages.opo(scores[include], torch.tensor([1, 3, 5]), groups[include])
    actual = function(scores, groups, include=include)
    assert actual[~include].tolist() == [0.0, 0.0]
    equal(actual[include], without)


def test_a_failed_reward_is_not_a_zero():
    scores, groups = torch.tensor([1.0, 1.0, 0.0]).double(), torch.tensor([0, 0, 0])
    failed = torch.tensor([True, True, False])
    assert advantages.grpo(scores, groups, include=failed).tolist() == [0.0, 0.0, 0.0]
    equal(advantages.grpo(scores, groups, eps=0.0), [1 / math.sqrt(3), 1 / math.sqrt(3), -2 / math.sqrt(3)])


@by_group
def test_a_batch_of_failed_rewards_is_zero(function):
    nothing = torch.full((3,), torch.nan)
    failed = torch.zeros(3, dtype=torch.bool)
    assert function(nothing, torch.tensor([0, 0, 1]), include=failed).tolist() == [0.0, 0.0, 0.0]


def test_means_over_nothing_are_zero():
    nothing, failed = torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool)
    assert advantages.batch_mean(nothing, include=failed).tolist() == [0.0, 0.0]
    assert advantages.group_mean(nothing, torch.tensor([0, 1]), include=failed).tolist() == [0.0, 0.0]


def test_reinforce_pp_baseline_leaves_failed_rows_out_of_the_moments():
    scores = torch.tensor([1.0, 3.0, torch.nan]).double()
    mask = torch.ones(3, 2, dtype=torch.bool)
    actual = advantages.reinforce_pp_baseline(
        scores, torch.tensor([0, 0, 0]), mask, include=torch.tensor([True, True, False])
    )
    one = 1 / math.sqrt(1 + 1e-8)
    equal(actual, [[-one, -one], [one, one], [0.0, 0.0]])


def test_reinforce_pp_baseline_of_flat_groups_is_exactly_zero():
    scores, mask = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.ones(4, 3, dtype=torch.bool)
    assert advantages.reinforce_pp_baseline(scores, torch.tensor([0, 0, 0, 1]), mask).eq(0).all()


def test_greedy_scores_that_failed_stay_out():
    scores, greedy = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, 0.5])
    assert advantages.remax(scores, greedy, include=torch.tensor([False, True])).tolist() == [0.0, 1.5]


# references

seeds = pytest.mark.parametrize("seed", range(5))


@seeds
@pytest.mark.parametrize("scale", ["group", "batch", None])
def test_grpo_is_its_loop(seed, scale):
    scores, groups, include = random_scores(seed)
    expected = references.grpo(scores.tolist(), groups.tolist(), include.tolist(), scale, 1e-4)
    equal(advantages.grpo(scores, groups, scale=scale, include=include), expected)


@seeds
def test_rloo_is_its_loop(seed):
    scores, groups, include = random_scores(seed)
    expected = references.rloo(scores.tolist(), groups.tolist(), include.tolist())
    equal(advantages.rloo(scores, groups, include=include), expected)


@seeds
def test_opo_is_its_loop(seed):
    scores, groups, include = random_scores(seed)
    lengths = torch.randint(1, 20, (12,), generator=torch.Generator().manual_seed(seed))
    expected = loops.opo(scores.tolist(), lengths.tolist(), groups.tolist(), include.tolist())
    equal(advantages.opo(scores, lengths, groups, include=include), expected)


@seeds
def test_reinforce_pp_is_its_loop(seed):
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 6, generator=random, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=random) > 0.4
    expected = loops.whiten(references.rows(references.discounted_returns, mask, rewards, gamma=0.9), mask)
    equal(advantages.reinforce_pp(rewards, mask, gamma=0.9), expected)


@seeds
def test_reinforce_pp_baseline_is_its_loop(seed):
    scores, groups, include = random_scores(seed)
    mask = torch.rand(12, 5, generator=torch.Generator().manual_seed(seed)) > 0.4
    centred = references.grpo(scores.tolist(), groups.tolist(), include.tolist(), None, 0.0)
    expected = loops.whiten(torch.tensor(centred, dtype=torch.float64)[:, None].expand(-1, 5), mask & include[:, None])
    equal(advantages.reinforce_pp_baseline(scores, groups, mask, include=include), expected)


# gradients


@by_group
def test_gradients_are_those_of_finite_differences(function):
    assert torch.autograd.gradcheck(lambda s: function(s, GROUPS), SCORES.clone().requires_grad_())


@by_group
def test_gradients_of_flat_groups_and_failed_rows_are_finite(function):
    scores = torch.tensor([0.1, 0.1, 0.1, torch.nan, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    include = torch.tensor([True, True, True, False, True, True])
    function(scores, torch.tensor([0, 0, 0, 0, 1, 1]), include=include)[::2].sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad[3] == 0


# bad input

WRONG = {
    "grpo groups": (lambda s, x, m: advantages.grpo(s, x.long()), "groups has shape (2,) but scores has shape (3,)"),
    "grpo include": (
        lambda s, x, m: advantages.grpo(s, s.long(), include=x.bool()),
        "include has shape (2,) but scores has shape (3,)",
    ),
    "grpo scale": (
        lambda s, x, m: advantages.grpo(s, s.long(), scale="none"),
        "unknown scale 'none'; choose one of 'group', 'batch', None",
    ),
    "include that is not bool": (
        lambda s, x, m: advantages.rloo(s, s.long(), include=s),
        "mask must be a bool tensor (True = counts), got torch.float32",
    ),
    "opo lengths": (
        lambda s, x, m: advantages.opo(s, x.long(), s.long()),
        "lengths has shape (2,) but scores has shape (3,)",
    ),
    "remax": (lambda s, x, m: advantages.remax(s, x), "baseline has shape (2,) but scores has shape (3,)"),
    "reinforce": (lambda s, x, m: advantages.reinforce(s, x), "baseline has shape (2,) but scores has shape (3,)"),
    "batch_mean": (
        lambda s, x, m: advantages.batch_mean(s, include=x.bool()),
        "include has shape (2,) but scores has shape (3,)",
    ),
    "group_mean": (
        lambda s, x, m: advantages.group_mean(s, x.long()),
        "groups has shape (2,) but scores has shape (3,)",
    ),
    "flat_groups": (
        lambda s, x, m: advantages.flat_groups(s, x.long()),
        "groups has shape (2,) but scores has shape (3,)",
    ),
    "reinforce_pp": (
        lambda s, x, m: advantages.reinforce_pp(m.float()[:1], m),
        "rewards has shape (1, 4) but mask has shape (2, 4)",
    ),
    "reinforce_pp_baseline mask": (
        lambda s, x, m: advantages.reinforce_pp_baseline(x, x.long(), m.long()),
        "mask must be a bool tensor",
    ),
    "reinforce_pp_baseline scores": (
        lambda s, x, m: advantages.reinforce_pp_baseline(s, s.long(), m),
        "scores has shape (3,) but the mask's batch has shape (2,)",
    ),
}


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(("call", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named(call, sentence):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared below
        call(torch.zeros(3), torch.zeros(2), torch.ones(2, 4, dtype=torch.bool))
    assert sentence in str(raised.value)
