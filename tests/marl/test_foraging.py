"""Foraging boards against lbforaging itself, number by number."""

import numpy as np
import pytest

from rolecall.marl.envs import open_envs
from rolecall.marl.envs.foraging import _first

BOARDS = ["8x8-2p-2f-coop", "8x8-2p-2f-2s-coop", "5x5-3p-2f", "6x6-4p-3f-2s", "10x10-3p-3f", "7x7-2p-1f-3s-coop"]


def walking(envs, rng, chance):
    """Actions that mostly walk to the nearest food and load, so that much happens."""
    food, players = np.divmod(envs._food_cell, envs._width), np.divmod(envs._cell, envs._width)
    actions = rng.integers(0, 6, envs._cell.shape)
    for i, p in np.argwhere(rng.random(envs._cell.shape) < chance):
        alive = np.flatnonzero(envs._alive[i])
        if not len(alive):
            continue
        k = alive[0]
        rows, columns = food[0][i, k] - players[0][i, p], food[1][i, k] - players[1][i, p]
        if abs(rows) + abs(columns) == 1:
            actions[i, p] = 5
        elif abs(rows) > 0 and (abs(columns) == 0 or rng.random() < 0.5):
            actions[i, p] = 1 if rows < 0 else 2
        else:
            actions[i, p] = 3 if columns < 0 else 4
    return actions


@pytest.mark.parametrize("board", BOARDS)
def test_every_number_is_lbforagings(board, monkeypatch):
    if board == "7x7-2p-1f-3s-coop":  # not in its registry: made under another name
        import gymnasium
        import lbforaging  # noqa: F401

        spec = gymnasium.spec("Foraging-7x7-2p-1f-coop-v3")
        gymnasium.register("Foraging-3s-7x7-2p-1f-coop-v3", spec.entry_point, kwargs={**spec.kwargs, "sight": 3})
    count = 8
    ours, theirs = open_envs(f"lbf:{board}", count), open_envs(f"lbforaging:{board}", count)
    for field in ("obs_size", "n_actions", "limit", "team"):
        assert getattr(ours.spec, field) == getattr(theirs.spec, field)
    rng = np.random.default_rng(1)
    steps, paid, ends, cuts = 0, 0, 0, 0
    for _ in range(12):
        seeds = rng.integers(0, 2**31, count).tolist()
        a, b = ours.reset(seeds), theirs.reset(seeds)
        running = np.ones(count, bool)
        while running.any():
            assert not b.faults
            for name in ("obs", "reward", "terminated", "truncated"):
                assert np.array_equal(getattr(a, name)[running], getattr(b, name)[running]), (board, name)
            steps += int(running.sum())
            paid += int((a.reward[running] > 0).sum())
            ends, cuts = ends + int(a.terminated[running].sum()), cuts + int(a.truncated[running].sum())
            running &= ~(a.terminated | a.truncated)
            actions = walking(ours, rng, chance=0.8)
            a, b = ours.step(actions, running), theirs.step(actions, running)
    assert steps > 500
    assert paid > 50
    assert ends > 10
    assert cuts > 0 or board not in BOARDS[:2]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kind", ["lbf", "lbforaging"])
def test_the_time_limit_is_a_cut_and_not_an_end(kind):
    """lbforaging itself says terminated; a target must then not stop at 0."""
    envs = open_envs(f"{kind}:8x8-2p-2f-coop", 2)
    envs.reset([1, 2])
    for t in range(50):
        frame = envs.step(np.zeros((2, 2), np.int64), np.ones(2, bool))
        assert frame.truncated.all() == (t == 49)
        assert not frame.terminated.any()


@pytest.mark.parametrize("kind", ["lbf", "lbforaging"])
def test_an_episode_is_a_function_of_its_seed_alone(kind):
    """lbforaging's own reset depends on where players stood before."""
    envs = open_envs(f"{kind}:5x5-3p-1f", 1)
    first = [envs.reset([seed]).obs.copy() for seed in range(40)]
    again = [envs.reset([seed]).obs.copy() for seed in reversed(range(40))]
    assert all(np.array_equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_what_is_seen_keeps_its_order_on_the_fullest_board():
    """More than 16 items: sorts that are stable by luck are not any more."""
    items = np.arange(20 * 3, dtype=np.float32).reshape(1, 1, 20, 3)
    seen = (np.arange(20) % 3 > 0).reshape(1, 1, 20)
    front = _first(items, seen)[0, 0]
    np.testing.assert_array_equal(front[: seen.sum()], items[0, 0][seen[0, 0]])
    np.testing.assert_array_equal(front[seen.sum() :], [(-1, -1, 0)] * int((~seen).sum()))
