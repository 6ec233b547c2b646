"""What rewards are called, what they may be, and what they read of the run."""

from functools import partial

import pytest

from rolecall.rewards import RewardPool, Sample
from rolecall.rewards.records import RewardError
from rolecall.rewards.sources import Named, pack

ONE = [Sample(prompt="1+1=", completion="2", row={"answer": "2"})]


class Graded:
    """A callable object, whose settings travel with it."""

    def __init__(self, worth=1.0):
        self.worth = worth

    def __call__(self, completion_text):
        return self.worth

    def halved(self, completion_text):
        return self.worth / 2


def scaled(completion_text, factor):
    return float(factor)


def scores(rewards):
    with RewardPool(rewards, workers=1) as pool:
        return dict(pool.score(ONE)[0].scores)


def test_every_kind_of_callable_is_a_reward():
    found = scores([lambda completion: 0.5, partial(scaled, factor=3), Graded(2.0), Graded(4.0).halved, "exact"])
    assert found == {"lambda": 0.5, "scaled": 3.0, "Graded": 2.0, "halved": 2.0, "exact": 1.0}


def test_rewards_of_the_same_name_are_numbered():
    found = scores([lambda completion: 0.0, lambda completion: 1.0, partial(scaled, factor=2), scaled_by(5)])
    assert found == {"lambda_1": 0.0, "lambda_2": 1.0, "scaled_1": 2.0, "scaled_2": 5.0}


def scaled_by(factor):
    return partial(scaled, factor=factor)


def test_a_number_does_not_take_the_name_of_another_reward():
    def lambda_1(completion):
        return 7.0

    assert len({p.name for p in pack([lambda completion: 0.0, lambda completion: 1.0, lambda_1])}) == 3


def test_a_mapping_gives_the_names():
    rewards = {"first": lambda completion: 0.25, "second": "exact"}
    assert scores(rewards) == {"first": 0.25, "second": 1.0}
    assert scores([Named(name=name, source=source) for name, source in rewards.items()]) == scores(rewards)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (Graded, "reward `Graded` is a class: give an instance, `Graded()`"),
        (["exact", "exact"], "reward 'exact' is given twice; keep one"),
        ({"": "exact"}, "a reward's name is empty"),
        ({"a": 3}, "reward `a` is a int, not a function or the name of one"),
        ({}, "no reward function given"),
    ],
)
def test_what_is_no_reward_is_one_sentence(reward, sentence):
    with pytest.raises(RewardError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        pack(reward)


def reads_state(completions, trainer_state, **kwargs):
    state = trainer_state
    facts = [state.global_step, state.max_steps, state.epoch, state.num_train_epochs]
    flags = [state.is_world_process_zero, state.is_local_process_zero]
    assert getattr(state, "total_flos", "none") == "none"
    assert not hasattr(state, "log_history")
    return [float(sum(facts) + sum(flags))] * len(completions)


def test_a_reward_reads_the_state_that_there_is():
    with RewardPool(reads_state, workers=1) as pool:
        assert pool.score(ONE)[0].total == 2.0  # nothing is trained: all numbers are 0
        assert pool.score(ONE, state={"global_step": 3, "max_steps": 10, "epoch": 0.5})[0].total == 15.5


@pytest.mark.parametrize("style", ["batch", "sample"])
def test_a_field_that_is_not_there_stops_the_run_with_a_sentence(style):
    def batch(completions, trainer_state, **kwargs):
        return [float(len(trainer_state.log_history))] * len(completions)

    def sample(completion, trainer_state):
        return float(len(trainer_state.log_history))

    with RewardPool({"batch": batch, "sample": sample}[style], workers=1) as pool, pytest.raises(RewardError) as caught:
        pool.score(ONE)
    assert str(caught.value) == (
        f"reward `{style}` asks for trainer_state.log_history, which is not there; it has epoch, global_step, "
        "is_local_process_zero, is_world_process_zero, max_steps, num_train_epochs"
    )
