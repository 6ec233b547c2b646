"""Rewards as large as float32 can hold are compared as small ones are; larger ones are refused by name."""

from math import isfinite

import pytest
import torch
from learners import STOP, learner_of, options_of

from rolecall.errors import out_of_range
from rolecall.maths import advantages as adv
from rolecall.rewards import Sample
from rolecall.rewards.pool import RewardPool
from rolecall.rewards.round import Round

ANSWERS = [(ord("a"), STOP), (ord("a"), ord("b"), STOP), (ord("b"), ord("b"), STOP), (STOP,)]


def closed_round(samples, **how):
    """All samples at once."""
    this = Round(**how)
    this.add(dict(enumerate(samples)))
    this.close()
    return this


def collected(scores, preset="grpo", **settings):
    """A rollout of two groups of four answers with these scores."""
    settings = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 4, "optim.lr": 1e-3, **settings}
    options = options_of(preset, **settings)
    learner = learner_of(options, lambda s: scores[s.sample_index], script=lambda _, sample: ANSWERS[sample])
    return learner, learner.collect(0)


def first_advantages(rollout):
    """The advantage of each answer of the first group, at its first token."""
    return rollout.batch.advantages[:4, 3]


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"algorithm.scale": "batch"}),
        ("reinforce++", {"algorithm.kl_coef": 0.0}),
        ("reinforce++-baseline", {"algorithm.kl_coef": 0.0}),
    ],
)
@pytest.mark.parametrize("size", [1e25, 1e37])
def test_a_large_reward_gives_the_advantages_of_a_small_one(preset, settings, size):
    unit = first_advantages(collected([1.0, 0.0, 0.5, 0.25], preset, **settings)[1])
    learner, large = collected([size, 0.0, size / 2, size / 4], preset, **settings)
    assert unit.abs().max() > 0.5
    torch.testing.assert_close(first_advantages(large), unit, rtol=1e-3, atol=1e-3)
    learner.update(large)
    found = learner.metrics()
    assert found["reward"] == pytest.approx(0.4375 * size)
    assert [name for name, value in found.items() if not isfinite(value)] == []


def test_scores_that_differ_by_less_than_float32_can_hold_are_told_apart():
    """Also where float32 holds none of them: it has only every second whole number from 2^24 on."""
    for scores in ([1.0, 0.0, 0.0, 0.0], [1.0, 3.0, 3.0, 1.0]):
        _, rollout = collected([2.0**24 + score for score in scores])
        expected = adv.grpo(torch.tensor(scores), torch.zeros(4, dtype=torch.long))
        assert torch.equal(first_advantages(rollout), expected)


def test_scores_that_float32_holds_give_the_bits_of_float32():
    scores = [1.0, 0.0, 0.25, 1.0]
    _, rollout = collected(scores)
    assert torch.equal(first_advantages(rollout), adv.grpo(torch.tensor(scores), torch.zeros(4, dtype=torch.long)))
    assert rollout.batch.rewards.dtype == rollout.batch.advantages.dtype == torch.float32


def test_a_reward_beyond_the_range_has_failed_and_is_named():
    samples = [Sample(prompt="p", completion="c", sample_index=i) for i in range(2)]
    this = closed_round(samples, styles=["sample"], workers=1, state={})
    this._record(0, 0, 1e39)
    this._record(0, 1, -1e37)
    assert this.failures[0] == {0: "it returned 1e+39, which is beyond ±1e+38: scale it down"}
    assert this.values[0] == {1: -1e37}


def test_so_has_a_weighted_sum():
    pool = RewardPool.__new__(RewardPool)
    pool.names, pool.weights = ("left", "right"), (10.0, 1.0)
    samples = [Sample(prompt="p", completion="c", sample_index=3)]
    this = closed_round(samples, styles=["sample", "sample"], workers=1, state={})
    this._record(0, 0, 5e37)
    this._record(1, 0, 1.0)
    scored = pool._scored(this, 0, samples[0])
    assert scored.total is None
    assert scored.failure.startswith("the weighted rewards left, right add up to 5e+38 on prompt 0 sample 3")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1e39])
def test_numbers_that_cannot_be_rewards(value):
    assert out_of_range(value)
    assert out_of_range(1e38) is None
