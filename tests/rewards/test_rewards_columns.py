"""What a reward needs of the rows, and what is compared with their answers."""

import pytest

from rolecall.rewards.model import RewardSettings, write_settings
from rolecall.rewards.pool import RewardPool
from rolecall.rewards.records import RewardError, Scored, why_unscored


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Of verl's kind."""
    return float(solution_str == ground_truth)


@pytest.mark.parametrize("reward", [compute_score, "exact"])
def test_a_reward_that_compares_with_the_answer_needs_one(reward):
    with RewardPool(reward, workers=1) as pool:
        pool.check_columns(["prompt", "answer"])
        with pytest.raises(RewardError, match="compares with the row's answer, but the rows have no column"):
            pool.check_columns(["prompt", "level"])
        assert pool.lacking([{"answer": "1"}, {"answer": None}, {"level": 3}]) == {"answer": 2}


@pytest.mark.parametrize("gold", [r"\frac{1}{2}", r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}"])
def test_an_answer_is_read_as_mathematics_however_it_is_marked(gold):
    pytest.importorskip("math_verify")
    from rolecall.rewards.math_verifier import math

    assert math(r"so it is $\frac{2}{4}$", {"answer": gold}) == 1.0
    assert math(r"so it is $\frac{1}{3}$", {"answer": gold}) == 0.0
    assert math("so it is $x^2+1$", {"answer": "x^2+1"}) == 1.0


def test_settings_that_json_cannot_hold_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="nan"):
        write_settings(tmp_path, RewardSettings(offset=float("nan")))


@pytest.mark.parametrize("network", [True, False])
def test_workers_have_the_network_they_are_given(network):
    with RewardPool("exact", workers=1, network=network) as pool:
        assert pool.walls.network == network


def test_a_single_answer_without_a_score_is_explained():
    scored = Scored(scores={"near": None, "far": None}, total=None)
    assert "`near` and `far`" in why_unscored([scored], lambda i: f"row {i}")
