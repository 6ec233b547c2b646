"""What a step of the learners does, worked out beside it from the same parts: targets, weights, priorities, passes, seeds."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from recorded import recorded
from test_learners import Q, doubled, q_networks

from rolecall.config.marl import MARLOptions
from rolecall.config.merge import resolve
from rolecall.marl.acting import Actor
from rolecall.marl.buffer import EpisodeBuffer
from rolecall.marl.envs import open_envs
from rolecall.marl.nets import action_scores
from rolecall.marl.q_learning import q_loss
from rolecall.marl.runner import Runner, episode_seeds
from rolecall.recipes.marl import EVALUATE, TRAIN, PPOLearner, QLearner, agents_of, networks
from rolecall.train.optim import make_optimizer
from rolecall.train.step import Updater

ENV = "lbf:5x5-2p-1f"


@contextlib.contextmanager
def learner(algo, **settings):
    settings = {"env": ENV, "algo": algo, "episodes": 4, "steps": 10, "agent.hidden": 8, "optim.lr": 1e-2, **settings}
    options = resolve(MARLOptions, [("test", settings)]).options
    envs = open_envs(options.env, options.episodes)
    try:
        module = networks(options, envs.spec)
        optimizer = make_optimizer(module, options.optim)
        updater = Updater(Accelerator(cpu=True), module, optimizer, token_budget=1000, max_grad_norm=None)
        kind = PPOLearner if options.on_policy else QLearner
        yield kind(options, module=module, updater=updater, envs=envs)
    finally:
        envs.close()


def weights_of(module):
    return [p.detach().clone() for p in module.parameters()]


def close(a, b):
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


# -- Q-learning ----------------------------------------------------------------------------------------------------


def test_the_target_follows_softly_in_every_optimiser_step():
    with learner("qmix", **{"q.updates": 1, "q.tau": 0.25}) as q:
        before = weights_of(q.target)
        q.update(q.collect(0))
        after, live = weights_of(q.target), weights_of(q.module)
        assert not close(live, before)
        assert close(after, [0.75 * old + 0.25 * new for old, new in zip(before, live, strict=True)])


def test_the_target_is_copied_every_so_many_optimiser_steps():
    with learner("qmix", **{"q.updates": 1, "q.tau": None, "q.target_every": 2}) as q:
        first = weights_of(q.target)
        q.update(q.collect(0))
        assert close(weights_of(q.target), first)
        q.update(q.collect(1))
        assert close(weights_of(q.target), weights_of(q.module))
        assert not close(weights_of(q.target), first)


@pytest.mark.parametrize(
    ("algo", "settings", "steps"),
    [("qmix", {"q.updates": 3}, 3), ("mappo", {"ppo.epochs": 2, "ppo.minibatches": 2}, 4)],
)
def test_optimiser_steps_are_counted_in_every_step_of_the_run(algo, settings, steps):
    with learner(algo, **settings) as made:
        for step in range(2):
            made.update(made.collect(step))
            assert made.metrics()["optimizer_steps"] == steps
            assert made.metrics()["skipped"] == 0


def test_targets_are_mixed_by_the_target_mixer():
    batch = doubled(recorded([4, 5], ["end", "cut"], time=7))
    live, target = q_networks("qmix"), q_networks("qmix", seed=5)
    found = []
    for moved in (None, live, target):
        if moved is not None:
            with torch.no_grad():
                for parameter in moved.mixer.parameters():
                    parameter.add_(0.5)
        found.append(float(q_loss(live, target, batch, **Q).target))
    assert found[0] == pytest.approx(found[1])
    assert found[2] != pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("double", [True, False])
def test_the_best_next_action_is_an_available_one(double):
    """One step ahead, with a reward of 0: the target is gamma times the target network's value of the best that may be
    done next, though both networks would rather do something else."""
    batch = doubled(recorded([2, 2], ["cut", "cut"], time=4, actions=4))
    batch.reward[:] = 0
    live, target = q_networks("iql", actions=4), q_networks("iql", seed=5, actions=4)
    scores, theirs = (action_scores(n.agents, batch).detach() for n in (live, target))
    best = (scores if double else theirs).argmax(-1, keepdim=True)
    batch.avail_actions.scatter_(-1, best, False)
    expected = []
    for b in range(2):
        for t in (1, 2):
            for a in range(2):
                may = [i for i in range(4) if batch.avail_actions[b, t, a, i]]
                chosen = max(may, key=lambda i, at=(b, t, a): float((scores if double else theirs)[at][i]))
                expected.append(0.9 * float(theirs[b, t, a, chosen]))
    found = q_loss(live, target, batch, **{**Q, "double": double})
    assert float(found.target) == pytest.approx(sum(expected) / len(expected))


def test_drawn_episodes_are_weighed_and_get_their_errors_as_priorities():
    settings = {"q.updates": 1, "q.alpha": 0.8, "q.beta": 1.0, "q.batch": 6, "q.buffer": 50, "q.tau": None}
    with learner("vdn", **settings) as q:
        q.update(q.collect(0))
        rollout = q.collect(1)
        o, live, target = q.options.q, copy.deepcopy(q.module), copy.deepcopy(q.target)
        moments = copy.deepcopy(q.moments)
        beside = EpisodeBuffer(50, seed=q.options.seed, alpha=0.8, beta=1.0)
        beside.load_state_dict(q.buffer.state_dict())
        q.update(rollout)

        beside.add(rollout.episodes)
        moments.update(rollout.episodes.reward, rollout.episodes.valid[..., None].expand_as(rollout.episodes.reward))
        drawn = beside.sample(6)
        assert (drawn.weights < 0.9).any()
        expected = q_loss(
            *(live, target, drawn.episodes),
            gamma=o.gamma,
            lam=o.lam,
            double=o.double,
            weights=drawn.weights,
            scale=lambda rewards: rewards / moments.std.float(),
        )
        assert q.metrics()["loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5)
        held = q.buffer.state_dict()["priorities"][drawn.index]
        torch.testing.assert_close(held, expected.errors.double() + 1e-6, rtol=1e-4, atol=1e-7)


def test_rewards_are_scaled_without_a_shift():
    """With gamma 0 a target is the reward itself, over the deviation of all rewards so far."""
    settings = {"env": "climbing", "q.updates": 1, "q.gamma": 0.0, "q.lam": 0.0, "q.alpha": 0.0, "q.batch": 4}
    with learner("iql", **settings) as q:
        rollout = q.collect(0)
        q.update(rollout)
        rewards = rollout.episodes.reward[rollout.episodes.valid].double()
        assert float(rewards.mean().abs()) > 0.1
        expected = float(rewards.mean() / rewards.std(correction=0))
        assert q.metrics()["q/target"] == pytest.approx(expected, rel=1e-4)


# -- PPO -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_pass_has_the_ratio_to_the_policy_that_played(minibatches):
    """approx_kl over the passes: each is of the policy before that pass against the one of the beginning."""

    def after(passes):
        with learner("mappo", **{"ppo.epochs": max(1, passes), "ppo.minibatches": 1, "optim.lr": 3e-2}) as ppo:
            rollout = ppo.collect(0)
            if passes:
                ppo.update(rollout)
            batch = rollout.episodes
            scores = action_scores(ppo.module.agents, batch).masked_fill(~batch.avail_actions, -torch.inf)
            logprobs = scores.log_softmax(-1).gather(-1, batch.actions)[..., 0].detach()
            return logprobs[batch.eligible], ppo.metrics().get("policy/approx_kl")

    (old, _), *later = (after(passes) for passes in range(4))
    ratios = [logprobs - old for logprobs, _ in later]
    apart = [0.0, *(float((x.exp() - 1 - x).mean()) for x in ratios[:2])]
    assert apart[2] > 1.5 * apart[1] > 1e-6
    assert later[2][1] == pytest.approx(sum(apart) / 3, rel=1e-3)
    if minibatches == 2:
        with learner("mappo", **{"ppo.epochs": 3, "ppo.minibatches": 2, "optim.lr": 3e-2}) as ppo:
            ppo.update(ppo.collect(0))
            assert ppo.metrics()["policy/approx_kl"] > apart[1]


# -- playing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{"agent.recurrent": True}, {"agent.last_action": True}])
def test_nothing_is_remembered_of_the_episodes_before(shape):
    options = resolve(MARLOptions, [("test", {"env": ENV, "algo": "iql", **shape})]).options
    envs = open_envs(ENV, 4)
    try:
        agents = agents_of(options, envs.spec)
        with torch.no_grad():
            for parameter in agents.parameters():
                parameter.mul_(4.0)  # so that memory makes a difference
        used = Actor(agents, how="sample")
        runner = Runner(envs, rewards="team", seed=0)
        runner.run(used, phase=TRAIN, step=0)
        again = runner.run(used, phase=TRAIN, step=1).episodes
        fresh = runner.run(Actor(agents, how="sample"), phase=TRAIN, step=1).episodes
    finally:
        envs.close()
    assert all(torch.equal(tensor, fresh.tensors()[name]) for name, tensor in again.tensors().items())


@pytest.mark.parametrize("algo", ["qmix", "mappo"])
def test_evaluation_plays_other_episodes_than_training_and_the_same_every_time(algo):
    seeds = []

    def told(envs):
        reset = envs.reset

        def recording(given):
            seeds.append(tuple(given))
            return reset(given)

        envs.reset = recording
        return envs

    with learner(algo, **{"eval.episodes": 4}) as made:
        told(made.runner.envs)
        trials = told(open_envs(ENV, 4))
        try:
            made.collect(0)
            first = made.evaluate(trials)
            made.collect(1)
            assert made.evaluate(trials) == first
        finally:
            trials.close()
    train, evaluated, later, again = seeds
    assert evaluated == again == tuple(episode_seeds(0, EVALUATE, 0, count=4))
    assert not set(evaluated) & {*train, *later}


def test_random_choices_of_an_evaluation_are_its_own():
    """A uniform policy shows the random numbers it chose by: those of training's first step are others."""
    options = resolve(MARLOptions, [("test", {"env": "climbing", "algo": "ippo"})]).options
    envs = open_envs("climbing", 4)
    try:
        agents = agents_of(options, envs.spec)
        with torch.no_grad():
            for parameter in agents.parameters():
                parameter.zero_()
        runner = Runner(envs, rewards="team", seed=0)
        played = [runner.run(Actor(agents, how="sample"), phase=phase, step=0).episodes for phase in (TRAIN, EVALUATE)]
    finally:
        envs.close()
    assert np.mean((played[0].actions == played[1].actions).numpy()) < 0.6
