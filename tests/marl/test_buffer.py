"""The ring of episodes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import episode_lists, recorded

from rolecall.marl.buffer import EpisodeBuffer, inclusion_chances, systematic_draw


def same(a, b):
    return all(torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items())


def test_a_shorter_episode_leaves_nothing_of_the_longer_one_it_replaces():
    buffer = EpisodeBuffer(1, seed=0)
    buffer.add(recorded([7], ["end"], time=9))
    short = recorded([2], ["end"], time=3, seed=1)
    buffer.add(short)
    found = buffer.sample(1).episodes
    assert found.obs.shape[1] == 3
    assert same(found, short)
    assert buffer.state_dict()["episodes"]["filled"].sum() == 3
    assert buffer.state_dict()["episodes"]["obs"][:, 3:].abs().sum() == 0


def test_a_longer_episode_may_come_later():
    buffer = EpisodeBuffer(4, seed=0)
    buffer.add(recorded([2], ["end"], time=3))
    buffer.add(recorded([8], ["cut"], time=9))
    assert sorted(buffer.sample(2).episodes.lengths.tolist()) == [2, 8]


def test_errors_of_a_skipped_step_change_no_priority():
    buffer = EpisodeBuffer(3, seed=0, alpha=1.0)
    buffer.add(recorded([3] * 3, ["end"] * 3, time=5))
    buffer.set_priorities(torch.tensor([0, 1, 2]), torch.tensor([1.0, -2.0, 3.0]))
    for errors in ([9.0, float("nan")], [float("inf"), 9.0]):
        buffer.set_priorities(torch.tensor([0, 1]), torch.tensor(errors))
    torch.testing.assert_close(
        buffer.state_dict()["priorities"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + 1e-6
    )


@pytest.mark.parametrize("held", [3, 5])
def test_what_is_drawn_is_a_copy(held):
    """Also when as many are drawn as there are."""
    buffer = EpisodeBuffer(5, seed=0)
    buffer.add(recorded([3] * held, ["end"] * held, time=5))
    before = {name: tensor.clone() for name, tensor in buffer.state_dict()["episodes"].items()}
    drawn = buffer.sample(held).episodes
    for tensor in drawn.tensors().values():
        tensor.zero_()
    assert all(torch.equal(before[name], held) for name, held in buffer.state_dict()["episodes"].items())


def test_what_is_added_is_a_copy():
    buffer = EpisodeBuffer(5, seed=0)
    episodes = recorded([3], ["end"], time=5)
    kept = episodes.obs.clone()
    buffer.add(episodes)
    episodes.obs.zero_()
    assert torch.equal(buffer.sample(1).episodes.obs, kept[:, :4])


def test_draws_use_no_random_state_of_anybody_else():
    def drawn(noise):
        buffer = EpisodeBuffer(20, seed=3)
        buffer.add(recorded([3] * 20, ["end"] * 20, time=5))
        np.random.seed(noise)
        torch.manual_seed(noise)
        before = np.random.get_state()[1].copy()
        found = [buffer.sample(4).index.tolist() for _ in range(3)]
        assert (np.random.get_state()[1] == before).all()
        return found

    assert drawn(1) == drawn(2)
    assert len({tuple(index) for index in drawn(1)}) == 3


@given(
    st.lists(episode_lists(most=5), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.6]),
)
def test_the_ring_holds_the_last_episodes_and_goes_on_exactly(rounds, capacity, cut, alpha):
    buffer, other = (EpisodeBuffer(capacity, seed=7, alpha=alpha) for _ in range(2))
    last = []
    for number, (lengths, ends) in enumerate(rounds):
        episodes = recorded(lengths, ends, time=9, seed=number)
        buffer.add(episodes)
        last = (last + [episodes.rows([i]).trimmed() for i in range(len(episodes))])[-capacity:]
        drawn = buffer.sample(2)
        buffer.set_priorities(drawn.index, torch.arange(len(drawn.index)) + float(number))
        if number == cut:
            other.load_state_dict(buffer.state_dict())
        elif number > cut:
            other.add(episodes)
            again = other.sample(2)
            assert torch.equal(drawn.index, again.index)
            assert torch.equal(drawn.weights, again.weights)
            assert same(drawn.episodes, again.episodes)
            other.set_priorities(again.index, torch.arange(len(again.index)) + float(number))
    assert len(buffer) == len(last)
    everything = buffer.sample(capacity).episodes
    found = sorted(everything.rows([i]).trimmed().obs.sum().item() for i in range(len(everything)))
    assert found == sorted(episode.obs.sum().item() for episode in last)


def test_no_episode_is_drawn_twice_at_a_time():
    buffer = EpisodeBuffer(10, seed=0, alpha=1.0)
    buffer.add(recorded([3] * 10, ["end"] * 10, time=5))
    for _ in range(20):
        assert len(set(buffer.sample(6).index.tolist())) == 6


def prioritised(priorities, **more):
    count = len(priorities)
    buffer = EpisodeBuffer(count, seed=0, **{"alpha": 1.0, "beta": 1.0, **more})
    buffer.add(recorded([1] * count, ["end"] * count, time=2, obs=1))
    buffer.set_priorities(torch.arange(count), torch.tensor(priorities))
    return buffer


def test_priorities_steer_the_draws():
    buffer = prioritised([1.0, 1.0, 1.0, 9.0])
    counts = torch.zeros(4)
    for _ in range(2000):
        drawn = buffer.sample(1)
        counts[drawn.index] += 1
        assert drawn.weights.tolist() == pytest.approx([1.0 if int(drawn.index) < 3 else 1 / 9], rel=1e-4)
    assert counts[3] / counts.sum() == pytest.approx(0.75, abs=0.03)
    assert buffer.sample(4).weights.tolist() == [1.0] * 4, "all of them are drawn: nothing to undo"
    buffer.set_priorities(torch.arange(4), torch.full((4,), torch.nan))
    assert torch.isfinite(buffer.state_dict()["priorities"]).all()


@pytest.mark.parametrize("held", [32, 64, 640])
def test_at_beta_1_weights_undo_the_draws_exactly(held):
    """Half of the episodes have ten times the priority of the others; 32 are drawn. Whatever is summed over draws with
    its weights has the mean of the buffer: here the share of the low ones, and any numbers at all."""
    buffer = prioritised([1.0] * (held // 2) + [10.0] * (held // 2))
    numbers = torch.randn(held, generator=torch.Generator().manual_seed(held)).double()
    low = high = total = weight = 0.0
    for _ in range(1500):
        index, weights = (drawn := buffer.sample(32)).index, drawn.weights.double()
        low, high = low + float(weights[index < held // 2].sum()), high + float(weights[index >= held // 2].sum())
        total, weight = total + float((weights * numbers[index]).sum()), weight + float(weights.sum())
        assert len(set(index.tolist())) == 32
    assert low / high == pytest.approx(1, abs=0.06)
    assert total / weight == pytest.approx(float(numbers.mean()), abs=0.05)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.data())
def test_chances_to_be_drawn_are_exact(sizes, data):
    """Every start of the points, and so every draw of one order, enumerated: each index is hit over as much of [0, 1) as
    its chance says."""
    count = data.draw(st.integers(1, len(sizes)))
    chances = inclusion_chances(np.array(sizes), count)
    assert chances.sum() == pytest.approx(count)
    assert (chances <= 1).all()
    below = chances < 1
    shares = chances[below] / np.array(sizes)[below]
    assert shares == pytest.approx(shares[:1].repeat(len(shares)), rel=1e-6)
    if below.any():
        assert (np.array(sizes)[~below] * shares[0] >= 1 - 1e-6).all(), "those above 1 are certain, and no others"

    class From:
        """Chance that is given."""

        def __init__(self, start):
            self.start = start

        def permutation(self, of):
            return of[::-1]

        def random(self):
            return self.start

    # The draw changes only where a point meets an end: between two of these fractions it stays.
    marks = sorted({0.0, 1.0, *(float(x) for x in chances[below][::-1].cumsum() % 1)})
    found = np.zeros(len(sizes))
    for start, end in itertools.pairwise(marks):
        drawn = systematic_draw(chances, From((start + end) / 2))
        assert len(set(drawn.tolist())) == len(drawn) == count
        found[drawn] += end - start
    assert found == pytest.approx(chances, abs=1e-6)


def test_wrong_uses_are_named():
    buffer = EpisodeBuffer(2, seed=0)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    buffer.add(recorded([3], ["end"], time=5))
    with pytest.raises(ValueError, match="obs of these episodes"):
        buffer.add(recorded([3], ["end"], time=5, obs=7))
    buffer.add(recorded([3], ["end"], time=5))
    with pytest.raises(ValueError, match="room for 1"):
        EpisodeBuffer(1, seed=0).load_state_dict(buffer.state_dict())
    with pytest.raises(ValueError, match="at least 1"):
        EpisodeBuffer(0, seed=0)
