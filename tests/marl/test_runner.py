"""Rounds of episodes: what is recorded, and what becomes of environments that misbehave."""

import numpy as np
import pytest
import torch

from rolecall.config.marl import QOptions
from rolecall.marl.acting import Actor, choose
from rolecall.marl.envs import EnvError, open_envs
from rolecall.marl.nets import Agents, AgentShape
from rolecall.marl.runner import Runner, episode_seeds
from rolecall.maths.roles import Role

C, N, E = Role.CONTENT, Role.NO_CHOICE, Role.AFTER_END


HANGS = next(step for step in range(99) if [s % 4 == 0 for s in episode_seeds(0, 0, step, count=2)] == [True, False])
"""A step in which the first of two environments is unlucky."""


def agents_for(spec, **more):
    settings = {"hidden": 8, "recurrent": False, "shared": True, "last_action": False, **more}
    return Agents(AgentShape(agents=len(spec.agents), obs=spec.obs_size, actions=spec.n_actions, **settings), seed=0)


def played(name, count=4, *, step=0, rewards="team", how="sample", **options):
    shape = {k: options.pop(k) for k in ("recurrent", "last_action", "shared") if k in options}
    envs = open_envs(name, count, **options)
    try:
        runner = Runner(envs, rewards=rewards, seed=0)
        return runner.run(Actor(agents_for(envs.spec, **shape), how=how), phase=0, step=step)
    finally:
        envs.close()


def same(a, b):
    return all(torch.equal(x, b.episodes.tensors()[name]) for name, x in a.episodes.tensors().items())


@pytest.mark.parametrize("shape", [{}, {"recurrent": True, "last_action": True}, {"shared": False, "recurrent": True}])
def test_a_round_that_is_repeated_is_the_same(shape):
    a, b = (played("lbf:5x5-2p-1f", how="epsilon", **shape) for _ in range(2))
    assert same(a, b)
    assert not same(a, played("lbf:5x5-2p-1f", how="epsilon", step=1, **shape))


def test_what_is_recorded_is_what_happened():
    """Played again by hand, from the recorded seeds and actions."""
    found = played("lbf:5x5-2p-1f", 6)
    envs = open_envs("lbf:5x5-2p-1f", 6)
    frame = envs.reset(found.seeds)
    running = np.ones(6, bool)
    episodes = found.episodes
    for t in range(episodes.obs.shape[1]):
        assert np.array_equal(episodes.obs[running, t].numpy(), frame.obs[running])
        was = running.copy()
        for b in np.flatnonzero(running):
            running[b] = t < episodes.lengths[b]
        assert np.array_equal(episodes.filled[:, t, 0].numpy(), was)
        if not running.any():
            break
        frame = envs.step(episodes.actions[:, t, :, 0].numpy(), running)
        np.testing.assert_allclose(episodes.reward[running, t, 0].numpy(), frame.reward[running].sum(1), rtol=1e-6)
        assert np.array_equal(episodes.terminated[running, t, 0].numpy(), frame.terminated[running])


def test_an_environment_that_never_ends_is_cut_off():
    found = played("odd_envs:never_ends", limit=6)
    assert found.episodes.lengths.tolist() == [6] * 4
    assert found.episodes.truncated[:, 5].all()
    assert not found.episodes.terminated.any()
    assert found.episodes.bootstrap.all()
    assert found.episodes.filled[:, 6].all(), "what is seen behind the cut is there to take a value from"
    assert played("odd_envs:never_ends").episodes.lengths.tolist() == [500] * 4


def test_an_end_and_an_own_limit_are_told_apart():
    found = played("odd_envs:truncates", 8)
    for seed, length, cut in zip(found.seeds, found.episodes.lengths, found.episodes.bootstrap, strict=True):
        assert (int(length), bool(cut)) == ((4, False) if seed % 4 == 0 else (7, True))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("odd_envs:raises", "it raised RuntimeError: the board fell down"),
        ("odd_envs:not_finite", "its observation is not finite"),
        ("odd_envs:reward_not_finite", "its reward is not finite"),
    ],
)
def test_a_broken_episode_is_discarded_and_counted(name, why):
    found = played(name, 8, limit=4)
    bad = sum(seed % 4 == 0 for seed in episode_seeds(0, 0, 0, count=8))
    assert 0 < bad < 8
    assert found.faults == {why: bad}
    assert len(found.episodes) == len(found.seeds) == 8 - bad
    assert torch.isfinite(found.episodes.obs).all()
    assert found.episodes.lengths.tolist() == [4] * (8 - bad)


def test_a_hanging_environment_costs_its_episode():
    found = played("odd_envs:hangs", 2, limit=3, workers=2, deadline=4.0, step=HANGS)
    assert list(found.faults) == ["no answer within 4 s; it was killed"]
    assert found.episodes.lengths.tolist() == [3]


def test_a_round_in_which_all_break_stops_with_the_reason():
    with pytest.raises(
        EnvError, match=r"all 4 episodes of step 1 in odd_envs:always_broken broke.*the board fell down"
    ):
        played("odd_envs:always_broken", 4)


def test_an_action_mask_of_zeros_is_an_error_by_name():
    with pytest.raises(EnvError, match=r"odd_envs:no_action: agent may do nothing at step 2 \(its action mask is all"):
        played("odd_envs:no_action")


def test_an_action_mask_inside_the_observation_is_kept_to():
    """The environment asserts it; bob has two actions and so, from the second step on, no choice."""
    found = played("odd_envs:masked", 4)
    assert not found.faults
    assert found.episodes.avail_actions[:, 1:5].sum(-1).unique(dim=0).tolist() == [[[2, 1]] * 4]
    assert found.episodes.roles[0].T.tolist() == [[C] * 5 + [E], [C] + [N] * 4 + [E]]


def test_agents_that_come_and_go_have_no_choice_meanwhile():
    episodes = played("odd_envs:come_and_go", 1, rewards="individual").episodes
    assert episodes.roles[0].T.tolist() == [[C, C, N, C, C, E], [C, C, C, C, N, E]]
    assert episodes.lengths.tolist() == [5]
    assert not episodes.bootstrap.any()


def test_rewards_of_a_team_and_of_each():
    team, each = (played("odd_envs:always_good", rewards=kind).episodes.reward for kind in ("team", "individual"))
    assert team.shape[-1] == 1
    assert torch.equal(team[..., 0], each.mean(-1))
    foraging = [played("lbf:5x5-2p-1f", 8, rewards=kind).episodes.reward for kind in ("team", "individual")]
    torch.testing.assert_close(foraging[0][..., 0], foraging[1].sum(-1))


@pytest.mark.parametrize("how", ["sample", "epsilon", "greedy"])
def test_only_available_actions_are_chosen(how):
    rng = np.random.default_rng(0)
    avail = rng.random((50, 3, 6)) < 0.4
    avail[..., 2] |= ~avail.any(-1)
    for _ in range(20):
        scores = rng.normal(size=avail.shape).astype(np.float32) * 10
        chosen = choose(scores, avail, rng, how=how, epsilon=0.7)
        assert np.take_along_axis(avail, chosen[..., None], -1).all()


def test_choices_have_the_chances_they_should():
    rng = np.random.default_rng(0)
    avail = np.tile([True, True, False, True], (20_000, 1, 1))
    scores = np.tile(np.log(np.array([0.5, 0.2, 9.0, 0.3], np.float32)), (20_000, 1, 1))
    drawn = np.bincount(choose(scores, avail, rng, how="sample")[:, 0], minlength=4) / 20_000
    np.testing.assert_allclose(drawn, [0.5, 0.2, 0, 0.3], atol=0.015)
    cold = choose(scores, avail, rng, how="sample", temperature=0.5)  # the squares: 25, 4 and 9 of 38
    np.testing.assert_allclose(np.bincount(cold[:, 0], minlength=4) / 20_000, [25 / 38, 4 / 38, 0, 9 / 38], atol=0.015)
    drawn = np.bincount(choose(scores, avail, rng, how="epsilon", epsilon=0.3)[:, 0], minlength=4) / 20_000
    np.testing.assert_allclose(drawn, [0.8, 0.1, 0, 0.1], atol=0.015)
    each = np.repeat([0.0, 0.3], 10_000)[:, None]  # half of the environments never explore
    chosen = choose(scores, avail, rng, how="epsilon", epsilon=each)[:, 0]
    assert (chosen[:10_000] == 0).all()
    np.testing.assert_allclose(np.bincount(chosen[10_000:], minlength=4) / 10_000, [0.8, 0.1, 0, 0.1], atol=0.015)


def test_environments_explore_unevenly_less_and_less():
    q = QOptions(epsilon_start=1.0, epsilon_end=0.1, epsilon_steps=100, epsilon_spread=0.6)
    assert q.shares(0, done=0.0, count=3) == [1.0, 1.0, 1.0]
    assert q.shares(100, done=0.0, count=4) == pytest.approx([0.1, 0.2, 0.4, 0.6])
    assert q.shares(100, done=0.5, count=4) == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert q.shares(100, done=1.0, count=4) == pytest.approx([0.1] * 4)
    assert q.shares(100, done=0.0, count=1) == pytest.approx([0.1])
