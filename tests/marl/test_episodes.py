"""Which steps of recorded episodes count, and what stands behind their end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import episode_lists, pymarl_mask, recorded

from rolecall.marl.episodes import EpisodeBatch
from rolecall.maths.roles import Role, Verdict

C, N, E, P = Role.CONTENT, Role.NO_CHOICE, Role.AFTER_END, Role.PAD


def note_batch(rows=1):
    """The note's table: seven slots, all filled, the end at step 3, its flag 0 again afterwards."""
    batch = recorded([6] * rows, ["silent"] * rows, time=7)
    batch.terminated[:, 3] = True
    return batch


def test_nothing_counts_behind_the_end():
    batch = note_batch()
    #  filled      1 1 1 1 1 1 1
    #  terminated  0 0 0 1 0 0 0
    assert batch.valid[0].int().tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert pymarl_mask(batch.filled, batch.terminated) == [[1, 1, 1, 1, 0, 1]], "the one-step form lets step 5 back in"


def test_thirty_two_episodes_of_a_hundred_and_twenty_slots():
    lengths = [1 + (37 * i) % 120 for i in range(32)]
    ends = ["end", "cut", "silent", "end"] * 8
    batch = recorded(lengths, ends, time=121)
    assert batch["filled"].shape == batch["terminated"].shape == (32, 121, 1)
    for b, length in enumerate(lengths):
        assert batch.team_roles[b].tolist() == [C] * length + [E] * (121 - length)
    assert batch.lengths.tolist() == lengths
    assert batch.bootstrap.tolist() == [how != "end" for how in ends]


@given(episode_lists(ends=("end",)))
def test_ended_episodes_have_pymarls_mask(episodes):
    """What PyMARL's runner records when the environment ends the episode."""
    batch = recorded(*episodes, time=9)
    assert batch.valid[:, :-1].int().tolist() == pymarl_mask(batch.filled, batch.terminated)


@given(st.lists(st.sampled_from(["end", "silent"]), min_size=1, max_size=5))
def test_episodes_that_fill_the_batch_have_pymarls_mask(ends):
    """A time limit at the batch's width: the last slot is cut by `[:, :-1]`, so PyMARL is right there too."""
    batch = recorded([8] * len(ends), ends, time=9)
    assert batch.valid[:, :-1].int().tolist() == pymarl_mask(batch.filled, batch.terminated)


@given(episode_lists())
def test_the_slot_behind_a_cut_never_counts(episodes):
    """PyMARL's mask counts it when an episode is cut off before the batch's width."""
    lengths, ends = episodes
    batch = recorded(lengths, ends, time=9, garbage=True)
    assert batch.valid.sum(1).tolist() == lengths
    for b, (length, how) in enumerate(zip(lengths, ends, strict=True)):
        theirs = sum(pymarl_mask(batch.filled[b : b + 1], batch.terminated[b : b + 1])[0])
        assert theirs == (length if how == "end" or length == 8 else length + 1)


def test_a_value_is_taken_only_behind_a_cut():
    batch = recorded([2, 3, 4], ["end", "cut", "silent"], time=5)
    values = torch.arange(15.0).view(3, 5)
    values[0, 2] = torch.nan
    assert batch.behind(values).tolist() == [0.0, 8.0, 14.0]


def test_termination_and_truncation_in_one_step_is_an_end():
    batch = recorded([2], ["end"], time=4)
    batch.truncated[0, 1] = True
    assert batch.bootstrap.tolist() == [False]


def test_dead_and_absent_agents_and_forced_moves_have_no_choice():
    batch = recorded([4], ["end"], time=6, actions=3)
    batch.present[0, 2:, 1] = False  # dies after step 1
    batch.avail_actions[0, 1, 0, 1:] = False  # may do one thing only
    assert batch.roles[0].T.tolist() == [[C, N, C, C, E, E], [C, C, N, N, E, E]]
    assert batch.verdicts[0, :, 1].tolist() == [Verdict.TRAINED] * 2 + [Verdict.NO_CHOICE] * 2 + [Verdict.AFTER_END] * 2
    assert batch.eligible.sum() == 5


def test_an_episode_that_never_began_is_padding():
    batch = recorded([2, 2], ["end", "end"], time=4)
    batch.filled[1] = False
    assert batch.team_roles[1].tolist() == [P] * 4
    assert batch.bootstrap.tolist() == [False, False]


@pytest.mark.parametrize("team", [True, False])
def test_rewards_are_those_of_steps_that_happened(team):
    batch = recorded([2, 4], ["end", "cut"], time=6, garbage=True, team=team)
    paid = torch.where(batch.valid[..., None], batch.reward, 0.0)
    assert torch.equal(batch.paid(2), paid.expand(-1, -1, 2))
    assert torch.equal(batch.paid(1), paid.sum(-1, keepdim=True))


@given(episode_lists())
def test_padding_changes_nothing(episodes):
    narrow, wide = (recorded(*episodes, time=time, garbage=True) for time in (9, 14))
    assert wide.trimmed().obs.shape[1] == max(episodes[0]) + 1
    assert torch.equal(narrow.valid, wide.valid[:, :9])
    assert not wide.valid[:, 9:].any()
    assert torch.equal(narrow.bootstrap, wide.bootstrap)


def test_one_hots_are_zero_where_nothing_was_done():
    batch = recorded([2], ["cut"], time=4)
    assert batch["actions_onehot"].sum((2, 3)).tolist() == [[2.0, 2.0, 0.0, 0.0]]
    assert torch.equal(batch.actions_onehot[0, :2].argmax(-1, keepdim=True), batch.actions[0, :2])


def test_pymarls_dictionary_becomes_a_batch():
    ours = recorded([3, 5], ["end", "silent"], time=6)
    theirs = {
        "obs": ours.obs,
        "state": ours.obs.flatten(2),
        "actions": ours.actions,
        "avail_actions": ours.avail_actions.int(),
        "reward": ours.reward,
        "terminated": ours.terminated.to(torch.uint8),
        "filled": ours.filled.long(),
    }
    batch = EpisodeBatch.from_pymarl(theirs)
    assert torch.equal(batch.valid, ours.valid)
    assert torch.equal(batch["state"], theirs["state"])
    assert batch.max_t_filled() == 6
    with pytest.raises(KeyError, match="no 'probs'"):
        batch["probs"]


def test_shapes_that_do_not_fit_are_named():
    batch = recorded([2], ["end"], time=4)
    with pytest.raises(ValueError, match=r"reward has shape \(1, 4, 3\)"):
        EpisodeBatch(**{**batch.tensors(), "reward": torch.zeros(1, 4, 3)})
    with pytest.raises(ValueError, match="present has shape"):
        EpisodeBatch(**{**batch.tensors(), "present": torch.ones(1, 4, 5, dtype=torch.bool)})
    with pytest.raises(ValueError, match="filled must be a bool tensor"):
        EpisodeBatch(**{**batch.tensors(), "filled": batch.filled.long()})


def test_reading_a_batch_warns_of_nothing():
    """Indexing with lists of slices, which torch deprecates, is used nowhere: warnings are errors here."""
    batch = recorded([2, 3], ["end", "cut"], time=5)
    assert len(batch.rows([1]).rows(torch.tensor([0])).rows(slice(0, 1)).trimmed()) == 1
