import dataclasses
import math
import pickle

import pytest
import torch

from rolecall.types import Batch, Completion, Finish, Request, Sampling, Trajectory


def completion(**changes):
    base = {"ids": (5, 2), "behaviour_logprobs": (-0.5, -0.1), "finish": Finish.STOP, "policy_version": 3}
    return Completion(**{**base, "prompt": 0, "sample": 1, "seed": 7, **changes})


def batch(**changes):
    return Batch(
        **{
            "ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
            "roles": torch.tensor([[1, 2, 3], [1, 2, 0]], dtype=torch.uint8),
            "groups": torch.tensor([0, 1]),
            "rewards": torch.tensor([[0.0, 0, 1], [0, 2, 0]]),
            "scores": torch.tensor([1.0, 2.0]),
            **changes,
        }
    )


def test_only_limits_truncate():
    assert {finish for finish in Finish if finish.truncated} == {Finish.LENGTH, Finish.MAX_TURNS, Finish.TIMEOUT}
    assert Finish("length") is Finish.LENGTH
    assert f"{Finish.STOP}" == "stop"


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, False),
        ({"top_p": 1.0, "min_p": 0.0}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_sampling_knows_when_some_tokens_can_never_be_drawn(options, cuts):
    assert Sampling(**options).cuts_support is cuts


def test_greedy_answers_are_scored_at_temperature_one():
    assert Sampling(temperature=0.0).scoring_temperature == 1
    assert Sampling(temperature=0.7).scoring_temperature == 0.7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature must be 0 .greedy. or more, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 .greedy. or more, got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0; leave it out"),
        ({"top_p": 0.0}, "top_p must lie in .0, 1., got 0"),
        ({"top_p": 1.1}, "top_p must lie in .0, 1., got 1.1"),
        ({"min_p": -0.1}, "min_p must lie in .0, 1., got -0.1"),
    ],
)
def test_impossible_sampling_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


def test_a_request_needs_a_token_and_an_answer():
    with pytest.raises(ValueError, match="prompt 4 is empty"):
        Request(prompt_ids=(), sampling=Sampling(), prompt=4)
    with pytest.raises(ValueError, match="n must be at least 1 answer, got 0"):
        Request(prompt_ids=(1,), sampling=Sampling(), n=0)


def test_a_misaligned_record_never_exists():
    with pytest.raises(ValueError, match="completion: behaviour_logprobs has 1 entries but there are 2 ids"):
        completion(behaviour_logprobs=(-0.5,))
    with pytest.raises(ValueError, match="trajectory: roles has 1 entries but there are 2 ids"):
        Trajectory(ids=(1, 2), roles=(1,))
    with pytest.raises(ValueError, match="trajectory: behaviour_logprobs has 3 entries but there are 2 ids"):
        Trajectory(ids=(1, 2), roles=(1, 2), behaviour_logprobs=(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="at least one token"):
        Trajectory(ids=(), roles=())
    for turn in ((1, 3), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match=rf"turn \[{turn[0]}, {turn[1]}\) does not lie within .* 2 tokens"):
            Trajectory(ids=(1, 2), roles=(1, 2), turns=(turn,))


def test_a_stopped_answer_holds_its_stop_and_a_broken_one_may_be_empty():
    with pytest.raises(ValueError, match="at least that stop token"):
        completion(ids=(), behaviour_logprobs=())
    assert completion(ids=(), behaviour_logprobs=(), finish=Finish.ABORT).ids == ()


def test_sampled_tokens_are_those_with_a_logprob():
    trajectory = Trajectory(ids=(1, 2, 3), roles=(1, 2, 3), behaviour_logprobs=(math.nan, -0.5, 0.0))
    assert trajectory.sampled == (False, True, True)
    assert Trajectory(ids=(1, 2), roles=(1, 2)).sampled == (False, False)


def test_records_are_frozen_comparable_and_picklable():
    record = completion()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.seed = 8
    assert record == completion()
    assert record != completion(seed=8)
    assert pickle.loads(pickle.dumps(record)) == record
    trajectory = Trajectory(ids=(1, 2), roles=(1, 2), scores={"exact": 1.0, "style": None})
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory


def test_a_batch_names_what_is_computed():
    assert [name for name, _ in batch().tensors()] == ["ids", "roles", "groups", "rewards", "scores"]
    assert len(batch()) == 2


def test_three_kinds_of_logprobs_are_three_tensors():
    names = ("behaviour_logprobs", "old_logprobs", "ref_logprobs")
    filled = batch(**{name: torch.full((2, 3), float(i)) for i, name in enumerate(names)})
    for moved in (filled.rows(slice(0, 1)), filled.trimmed(2), filled.to("cpu")):
        assert [getattr(moved, name).unique().tolist() for name in names] == [[0], [1], [2]]


def test_rows_are_chosen_in_order_from_every_field():
    chosen = batch().rows(torch.tensor([1, 0, 1]))
    assert chosen.ids[:, 0].tolist() == [4, 1, 4]
    assert chosen.groups.tolist() == [1, 0, 1]
    assert chosen.scores.tolist() == [2, 1, 2]
    assert chosen.rewards.sum(dim=1).tolist() == [2, 1, 2]
    assert chosen.values is None
    assert batch().rows(slice(1, 2)).ids.tolist() == [[4, 5, 6]]


def test_trimming_cuts_time_and_leaves_rows_alone():
    short = batch().trimmed(2)
    assert short.ids.tolist() == [[1, 2], [4, 5]]
    assert short.rewards.tolist() == [[0, 0], [0, 2]]
    assert short.scores.tolist() == [1, 2]


def test_moving_keeps_every_field():
    moved = batch().to("cpu")
    assert all(a.equal(b) for (_, a), (_, b) in zip(moved.tensors(), batch().tensors(), strict=True))


def test_a_batch_is_a_rectangle():
    with pytest.raises(ValueError, match=r"ids must be \[batch, time\], got shape \(3,\)"):
        batch(ids=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"batch.rewards has shape \(2, 2\), expected \(2, 3\) to fit ids"):
        batch(rewards=torch.zeros(2, 2))
    for name in ("groups", "scores", "policy_versions"):
        with pytest.raises(ValueError, match=rf"batch.{name} has shape \(3,\), expected \(2,\)"):
            batch(**{name: torch.zeros(3)})
