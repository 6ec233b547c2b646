"""Two batches as one, sequences of several rows, and where runs of ids stand: drawn on small integers."""

from math import isnan, nan

import torch

from rolecall.experience.batches import Joined, collate, join, lengths_of, runs_in
from rolecall.maths.roles import Role, Verdict
from rolecall.types import Batch, Supports, Trajectory

P, C, S, SEEN = Role.PROMPT, Role.CONTENT, Role.STOP, Role.OBSERVATION


def ints(*rows):
    return torch.tensor(rows, dtype=torch.uint8)


def listed(tensor):
    """Plain lists, with None for NaN."""
    return [[None if isnan(x) else x for x in row] if isinstance(row, list) else row for row in tensor.tolist()]


def test_two_batches_become_one_and_what_only_one_has_is_filled():
    fresh = Batch(
        ids=torch.tensor([[5, 6], [7, 8]]),
        roles=ints([P, C], [P, S]),
        groups=torch.tensor([3, 3]),
        verdicts=ints([2, 1], [2, 1]),
        old_logprobs=torch.tensor([[nan, -1.0], [nan, -2.0]]),
        scores=torch.tensor([1.0, 0.0]),
    )
    replayed = Batch(
        ids=torch.tensor([[9, 9, 2]]),
        roles=ints([P, C, S]),
        groups=torch.tensor([4]),
        old_logprobs=torch.tensor([[nan, -3.0, -4.0]]),
        rewards=torch.tensor([[0.0, 0.0, 1.5]]),
        advantages=torch.tensor([[0.0, 0.5, 0.5]]),
        weights=torch.tensor([[2.0, 2.0, 2.0]]),
        returns=torch.tensor([[0.0, 1.0, 1.0]]),
        scores=torch.tensor([0.5]),
        episodes=torch.tensor([77]),
        replayed=torch.tensor([True]),
        policy_versions=torch.tensor([6]),
    )
    both = join(fresh, replayed)
    assert listed(both.ids) == [[5, 6, 0], [7, 8, 0], [9, 9, 2]]
    assert listed(both.roles) == [[P, C, Role.PAD], [P, S, Role.PAD], [P, C, S]]
    assert listed(both.verdicts) == [[2, 1, Verdict.PADDING], [2, 1, Verdict.PADDING], [Verdict.PADDING] * 3]
    assert listed(both.old_logprobs) == [[None, -1, None], [None, -2, None], [None, -3, -4]]
    assert listed(both.rewards) == [[0, 0, 0], [0, 0, 0], [0, 0, 1.5]]
    assert listed(both.advantages) == [[0, 0, 0], [0, 0, 0], [0, 0.5, 0.5]]
    assert listed(both.weights) == [[1, 1, 1], [1, 1, 1], [2, 2, 2]]
    assert listed(both.returns) == [[None] * 3, [None] * 3, [0, 1, 1]]
    assert both.scores.tolist() == [1.0, 0.0, 0.5]
    assert both.replayed.tolist() == [False, False, True]
    assert both.episodes.tolist() == [-1, -2, 77]
    assert both.policy_versions.tolist() == [-1, -2, 6]
    assert both.supports is None
    assert lengths_of(both).tolist() == [2, 2, 3]


def test_without_fresh_old_logprobs_nobody_has_any():
    fresh = Batch(ids=torch.tensor([[5]]), roles=ints([C]), groups=torch.tensor([0]))
    replayed = Batch(ids=torch.tensor([[6]]), roles=ints([C]), groups=torch.tensor([1]), old_logprobs=torch.zeros(1, 1))
    assert join(fresh, replayed).old_logprobs is None


def test_supports_of_either_batch_stay_with_their_positions():
    plain = Batch(ids=torch.tensor([[5, 6, 7]]), roles=ints([P, C, S]), groups=torch.tensor([0]))
    cut = Batch(
        ids=torch.tensor([[5, 6]]),
        roles=ints([P, C]),
        groups=torch.tensor([1]),
        supports=Supports(
            ids=torch.tensor([6, 8], dtype=torch.int32), starts=torch.tensor([[0, 0]]), counts=torch.tensor([[0, 2]])
        ),
    )
    for fresh, replayed, counts in (
        (plain, cut, [[0, 0, 0], [0, 2, 0]]),
        (cut, plain, [[0, 2, 0], [0, 0, 0]]),
        (cut, cut, [[0, 2], [0, 2]]),
    ):
        found = join(fresh, replayed).supports
        assert found.counts.tolist() == counts
        for start, count in zip(found.starts.flatten().tolist(), found.counts.flatten().tolist(), strict=True):
            assert found.ids[start : start + count].tolist() == ([6, 8] if count else [])


def test_a_run_is_found_whole_and_in_the_policys_words_only():
    batch = Batch(
        ids=torch.tensor([[4, 5, 4, 5, 4], [4, 5, 5, 4, 5]]),
        roles=ints([P, P, C, C, S], [C, C, SEEN, C, S]),
        groups=torch.tensor([0, 0]),
    )
    assert runs_in(batch, [[4, 5]]).int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 1, 1]]
    assert runs_in(batch, [[], [4] * 6]).any().item() is False
    assert runs_in(batch, [[5, 4], [4, 5, 4, 5, 4]]).int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]


def rows():
    """Two episodes of one group: the first in two rows."""
    parts = [((1, 2, 3), 0), ((4, 5), 0), ((6,), 1)]
    return [Trajectory(ids=ids, roles=(C,) * len(ids), group=9, episode=episode) for ids, episode in parts]


def test_rows_of_an_episode_are_one_sequence_and_come_apart_again():
    joined, batch = Joined(rows()), collate(rows())
    assert (joined.cut, joined.plain, len(joined)) == (True, False, 2)
    assert joined.first(torch.tensor([10, 20, 30])).tolist() == [10, 30]
    assert joined.last(torch.tensor([10, 20, 30])).tolist() == [20, 30]
    whole = joined.join(batch.ids)
    assert whole.tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]
    assert joined.split(whole, 3).tolist() == batch.ids.tolist()
    assert joined.split(torch.tensor([7.0, 8.0]), 3).tolist() == [7.0, 7.0, 8.0]
    sequences = joined.batch(batch)
    assert sequences.ids.tolist() == whole.tolist()
    assert sequences.groups.tolist() == [9, 9]
    assert joined.names[0] == joined.names[1] != joined.names[2]


def test_rows_that_are_sequences_already_stay_as_they_are():
    joined, batch = Joined(rows()[1:]), collate(rows()[1:])
    assert (joined.cut, joined.plain) == (False, True)
    assert joined.batch(batch) is batch
    assert joined.last(batch.groups) is batch.groups
    assert joined.join(batch.ids) is batch.ids
    assert joined.split(batch.ids, 2) is batch.ids
