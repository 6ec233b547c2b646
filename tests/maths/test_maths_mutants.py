"""Small things that the goldens of the maths do not see: the device of what is created inside, and whole sentences."""

import pytest
import torch

from rolecall.maths import advantages, kl, losses, reduce, returns, roles, shaping

MASK = torch.tensor([[True, True, False], [True, False, False]])
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
IDS = torch.tensor([[5, 2, 7], [5, 6, 7]])
SCORES, GROUPS, LENGTHS = torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.tensor([2, 1])
NO, YES = torch.tensor([False, False]), torch.tensor([True, True])
ROLES = torch.tensor([[1, 2, 3], [2, 0, 0]], dtype=torch.uint8)
FILLED, ENDED = torch.tensor([[True, True, True]]), torch.tensor([[False, True, False]])

CALLS = {
    "verdicts": lambda: roles.TrainRule().verdicts(ROLES, reward_failed=NO, truncated=YES),
    "response_roles": lambda: roles.response_roles(LENGTHS, YES, width=3),
    "roles_of_ids": lambda: roles.roles_of_ids(IDS, stop_ids=[2], lengths=LENGTHS),
    "episode_roles": lambda: roles.episode_roles(FILLED, ENDED),
    "masked_whiten": lambda: reduce.masked_whiten(X, MASK),
    "aggregate": lambda: torch.stack(
        [
            reduce.aggregate(X, MASK, mode=mode, norm=5.0 if mode.endswith("norm") else None, denominator=denominator)
            for mode in reduce.MODES
            for denominator in (None, 4.0)
        ]
    ),
    "denominator_of": lambda: torch.stack([reduce.denominator_of(MASK, mode=mode) for mode in reduce.MODES]),
    "gae": lambda: returns.gae(X, X, MASK, gamma=0.9, lam=0.9, bootstrap=SCORES)[0],
    "nstep_targets": lambda: returns.nstep_targets(X, X, MASK, gamma=0.9, n=2, bootstrap=SCORES),
    "discounted_returns": lambda: returns.discounted_returns(X, MASK, gamma=0.9),
    "overlong_penalty": lambda: shaping.overlong_penalty(LENGTHS, max_length=3, buffer=2),
    "grpo": lambda: advantages.grpo(SCORES, GROUPS, scale="batch"),
    "opo": lambda: advantages.opo(SCORES, LENGTHS, GROUPS),
    "batch_mean": lambda: advantages.batch_mean(SCORES),
    "reinforce_pp_baseline": lambda: advantages.reinforce_pp_baseline(SCORES, GROUPS, MASK),
    "kl_estimate": lambda: kl.kl_estimate(X, -X, MASK, kind="k3", straight_through=True),
    "gspo": lambda: losses.gspo(-X, -X - 1, X, MASK, clip_low=0.1, clip_high=0.1),
    "entropy": lambda: losses.entropy(X[..., None].expand(2, 3, 4), MASK),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_everything_happens_on_the_device_of_the_inputs(call):
    """With another default device, whatever is created without looking at the inputs would clash with them."""
    expected = call()
    with torch.device("meta"):
        actual = call()
    assert actual.device.type == "cpu"
    assert actual.equal(expected)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: roles.response_roles(torch.tensor([0]), torch.tensor([True]), width=2),
            "an answer that was stopped by an id has at least that one token: lengths count the stop token",
        ),
        (
            lambda: roles.roles_of_ids(IDS, stop_ids=[]),
            "stop_ids is empty: pass the model's stop ids, or use response_roles with the known lengths",
        ),
        (
            lambda: roles.episode_roles(ENDED, ENDED),
            "filled must be a run of True from step 0: an episode cannot have holes",
        ),
    ],
)
def test_sentences_are_whole(call, sentence):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole sentence is compared below
        call()
    assert str(raised.value) == sentence


def test_stop_ids_are_compared_in_the_type_of_the_ids():
    assert roles.roles_of_ids(IDS.to(torch.int16), stop_ids=[2]).equal(roles.roles_of_ids(IDS, stop_ids=[2]))


def test_an_overlong_penalty_is_a_float_of_the_default_type():
    assert shaping.overlong_penalty(LENGTHS, max_length=3, buffer=2).dtype == torch.float32


def test_denominators_are_counted_in_float64():
    assert {reduce.denominator_of(MASK, mode=mode).dtype for mode in reduce.MODES} == {torch.float64}


def test_a_number_as_denominator_is_not_rounded():
    one = torch.ones(1, 1, dtype=torch.float64)
    loss = reduce.aggregate(one, one.bool(), mode="token-mean", denominator=0.1)
    assert loss.item() == pytest.approx(10.0, abs=1e-12)


@pytest.mark.parametrize("norm", [1.0, 0.5])
def test_a_norm_of_one_or_less_is_a_length_too(norm):
    assert reduce.aggregate(X, MASK, mode="seq-mean-token-sum-norm", norm=norm) == 3.5 / norm


@pytest.mark.parametrize("time", [63, 64, 65, 100, 128, 129, 200])
def test_returns_reach_from_the_end_to_the_start_whatever_the_length(time):
    rewards = torch.zeros(1, time, dtype=torch.float64)
    rewards[0, -1] = 1.0
    actual = returns.discounted_returns(rewards, torch.ones(1, time, dtype=torch.bool), gamma=0.99)
    expected = torch.tensor([[0.99 ** (time - 1 - t) for t in range(time)]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", ["filled", "terminated", "truncated"])
def test_episode_flags_must_be_bool_and_are_named(wrong, users_view):
    flags = {name: torch.zeros(1, 3, dtype=torch.bool) for name in ("filled", "terminated", "truncated")}
    flags[wrong] = flags[wrong].long()
    with pytest.raises(ValueError, match=f"{wrong} must be a bool tensor"):
        roles.episode_roles(**flags)


def test_position_weights_are_float64_whatever_the_denominator_is():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for denominator in (2.0, torch.tensor(2.0)):
        weights = reduce.position_weights(mask, mode="token-mean", denominator=denominator)
        assert weights.dtype == torch.float64
        assert weights.tolist() == [[0.5, 0.5]]
