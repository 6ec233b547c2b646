"""The checks alone, on small numbers: what they let through, what they find, and whom they name."""

from math import inf, nan

import pytest
import torch

from rolecall.maths.reduce import denominator_of, position_weights
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.model import Outputs
from rolecall.train import tripwires
from rolecall.train.step import Term, trained
from rolecall.train.tripwires import Finding, Tripwire
from rolecall.types import Batch

P, C, S, PAD = int(Role.PROMPT), int(Role.CONTENT), int(Role.STOP), int(Role.PAD)
ROLES = torch.tensor([[P, C, C, S], [P, C, PAD, PAD], [P, P, PAD, PAD]], dtype=torch.uint8)
ELIGIBLE = TrainRule().eligible(ROLES)


def test_rewards_add_up_whatever_untrained_positions_of_the_kl_hold():
    kl = torch.tensor([[nan, 1.0, 2.0, 3.0], [nan, 4.0, inf, inf], [nan, nan, nan, nan]])
    rewards = torch.tensor([[0, -0.1, -0.2, 0.7], [0, -0.4, 0, 0], [0, 0, 0, 0.0]])
    scores = torch.tensor([1.0, nan, 5.0])  # the second failed, the third has no position to sit on
    assert tripwires.reward_sum(rewards, scores, kl, ELIGIBLE, kl_coef=0.1) is None
    found = tripwires.reward_sum(rewards, scores, kl, ELIGIBLE, kl_coef=0.2)
    assert found is not None
    assert list(found.rows) == [0, 1]


def test_a_reward_beside_the_eligible_positions_is_found_even_if_the_sum_is_right():
    rewards = torch.tensor([[0, 0, 0, 1.0], [0, 2.0, 1.0, 0], [0, 0, 0, 0]])
    found = tripwires.reward_sum(rewards, torch.tensor([1.0, 2.0, 0.0]), None, ELIGIBLE, kl_coef=0.0)
    assert found is not None
    assert (list(found.rows), found.numbers["rewards elsewhere"]) == ([1], 1.0)


@pytest.mark.parametrize("check", [tripwires.first_ratio, tripwires.kl_at_start])
def test_log_probs_are_compared_where_they_train_only(check):
    one = torch.tensor([[nan, -1.0, -2.0, -3.0], [0.0, -1.0, nan, inf], [0.0, 0.0, 0.0, 0.0]])
    near = one.clone()
    near[0, 1] += 5e-5
    assert check(near, one, ELIGIBLE, bound=1e-4) is None
    near[1, 1] += 2e-4
    assert check(near, one, ELIGIBLE, bound=1e-4).rows[0] == 1
    near[0, 1] = nan
    assert check(near, one, ELIGIBLE, bound=1e-4).rows[0] == 0


def test_the_engine_is_compared_on_average():
    one = torch.zeros(3, 4)
    other = torch.where(ELIGIBLE, 0.0, 9.0)
    other[1, 1] = 0.4
    assert tripwires.engine_mismatch(one, other, ELIGIBLE, band=0.11) is None
    found = tripwires.engine_mismatch(one, other, ELIGIBLE, band=0.09)
    assert found is not None
    assert (list(found.rows), found.numbers["mean |difference| of log-probs"]) == ([1], pytest.approx(0.1))
    assert tripwires.engine_mismatch(one, other, torch.zeros_like(ELIGIBLE), band=0.0) is None


def test_bands_are_wide_only_where_bfloat16_is_involved():
    full, half = torch.float32, torch.bfloat16
    assert tripwires.engine_band(full, full) == tripwires.ratio_bound(full) == 1e-4
    assert {tripwires.engine_band(*kinds) for kinds in ((half, full), (full, half), (half, half))} == {0.15}
    assert tripwires.ratio_bound(half) == 0.1


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [((1, 2), 1e-30, "untrained-contribution"), ((1, 3), nan, "untrained-contribution"), ((0, 2), nan, "not-finite")],
)
def test_contributions_are_exactly_0_elsewhere_and_finite_inside(place, value, name):
    parts = {"policy": torch.where(ELIGIBLE, 0.5, 0.0), "kl": torch.where(ELIGIBLE, 0.25, 0.0)}
    assert tripwires.contributions(parts, ELIGIBLE) is None
    parts["kl"][place] = value
    found = tripwires.contributions(parts, ELIGIBLE)
    assert found is not None
    assert (found.name, list(found.rows)) == (name, [place[0]])
    assert "'kl'" in found.what


def test_a_sum_may_differ_by_rounding_of_what_was_added():
    assert tripwires.loss_sum(1e-7, 0.0, size=1.0) is None
    assert tripwires.loss_sum(1e-5, 0.0, size=1.0) is not None
    assert tripwires.loss_sum(nan, 0.0, size=1.0) is not None


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_contributions_are_recounted_in_every_mode(mode):
    term = Term(values=torch.full((3, 4), 2.0), mask=ELIGIBLE, mode=mode, coef=0.5)
    count = {"t": denominator_of(ELIGIBLE, mode=mode)}
    recorded = position_weights(ELIGIBLE, mode=mode)  # 0.5 x 2
    assert tripwires.denominators({"t": term}, count, {"t": recorded}) is None
    found = tripwires.denominators({"t": term}, count, {"t": recorded * 1.001})
    assert found is not None
    total = float(recorded.sum())
    assert found.numbers == pytest.approx(
        {"term as recorded": 1.001 * total, "term recounted": total, "denominator": float(count["t"])}
    )


def probed(values, critic=None, kl=None) -> Finding | None:
    """The gradient probe on a loss with these values, [batch, time], on trained positions."""
    batch = Batch(
        ids=torch.zeros(3, 4, dtype=torch.long),
        roles=ROLES,
        groups=torch.zeros(3, dtype=torch.long),
        verdicts=TrainRule().verdicts(ROLES),
        advantages=torch.ones(3, 4),
    )
    outputs = Outputs(torch.full((3, 4), -0.5), torch.zeros(3, 4), critic, kl)
    return tripwires.untrained_gradient(
        lambda out, part: {"t": Term(values=values(out, part), mask=trained(part), mode="token-mean")}, outputs, batch
    )


def test_the_gradient_probe():
    assert probed(lambda out, batch: out.logprobs * batch.advantages) is None
    assert probed(lambda out, batch: torch.ones(3, 4)) is None  # no gradient at all
    leak = probed(lambda out, batch: out.logprobs.flip(1))
    assert leak is not None
    assert leak.name == "untrained-gradient"
    harmful = probed(lambda out, batch: out.logprobs * batch.advantages.sum(dim=1, keepdim=True))
    assert harmful is not None
    assert "changes the loss" in harmful.what


def test_the_gradient_probe_reaches_every_output():
    critic, kl = torch.full((3, 4), 0.25), torch.full((3, 4), 2.0)
    for number, name in enumerate(("logprobs", "entropy", "values", "kl")):
        assert probed(lambda out, batch, number=number: out[number] ** 2, critic, kl) is None
        leak = probed(lambda out, batch, number=number: out[number].flip(1) * 3, critic, kl)
        assert leak is not None
        assert f", through {name}" in leak.what
        assert leak.numbers == {"max |gradient| there": pytest.approx(3 / int(ELIGIBLE.sum()))}


@pytest.mark.parametrize(
    ("moved", "could", "should", "fine"),
    [
        (True, True, True, True),
        (False, False, False, True),
        (True, True, False, True),  # gradient 0, but momentum
        (False, True, False, True),  # gradient 0 and none
        (True, False, False, False),
        (False, True, True, False),
    ],
)
def test_weights_move_when_they_should(moved, could, should, fine):
    assert (tripwires.weights_moved(moved=moved, could=could, should=should, exact=True) is None) == fine


def test_bfloat16_is_suspected_only_where_it_is_used():
    found = [tripwires.weights_moved(moved=False, could=True, should=True, exact=exact) for exact in (True, False)]
    assert ["bfloat16" in f.remedy for f in found if f is not None] == [False, True]


def test_a_sync_means_weights_and_version():
    assert tripwires.engine_sync(engine="a", trainer="a", version=2, expected=2) is None
    assert tripwires.engine_sync(engine="a", trainer="b", version=2, expected=2) is not None
    assert tripwires.engine_sync(engine="a", trainer="a", version=1, expected=2) is not None


def test_a_tripwire_in_words():
    trip = Tripwire(
        Finding(name="n", what="it is off", remedy="Do this.", numbers={"found": 2.0, "allowed": 1.0}),
        step=7,
        samples=[(4, 1), (5, 0)],
    )
    assert str(trip) == (
        "tripwire n at step 7: it is off (found 2, allowed 1); worst: group 4 episode 1, group 5 episode 0. Do this."
    )
