"""Whole runs of agents, computed again by `agents.QMIX` and `agents.MAPPO` from the settings and the first weights."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hunt import Hunt
from safetensors.torch import load_file

import rolecall
from agents import EVALUATE, MAPPO, QMIX, mean
from rolecall.config.marl import MARLOptions
from rolecall.config.merge import resolve
from rolecall.marl.envs import open_envs
from rolecall.recipes.marl import networks
from rolecall.train.state import read_state

CHOSE, NO_CHOICE = (2, 1), (5, 4)
"""Role and verdict of a step at which an agent had a choice, and of one at which it had none."""
CLOSE = {"rel": 1e-3, "abs": 1e-5}

COMMON = {
    "env": f"{Path(__file__).with_name('hunt.py')}:make",
    "episodes": 6,
    "limit": 6,
    "steps": 3,
    "seed": 3,
    "quiet": True,
    "agent.hidden": 6,
    "optim.lr": 1e-2,
    "optim.weight_decay": 0.1,
    "optim.warmup_steps": 2,
    "eval.every": 3,
    "eval.episodes": 5,
    "record.every": 1,
    "record.episodes": 6,
}


def walk(kind, tmp_path, **settings):
    """Train, compute everything again, compare; returns the run, the reference and the state of the last checkpoint."""
    settings = COMMON | settings
    run = rolecall.marl(out=str(tmp_path / "run"), **settings)
    options = resolve(MARLOptions, [("test", settings)]).options
    envs = open_envs(options.env, 1, limit=options.limit)
    first = networks(options, envs.spec).state_dict()
    envs.close()
    reference = kind(json.loads((run.path / "config.json").read_text()), first, Hunt)
    check_evaluation(reference, run.evaluations[0])
    for step, metrics in enumerate(line for line in run.metrics if "loss" in line):
        episodes, found = reference.learn(step)
        check_record(reference, episodes, pq.read_table(run.path / f"rollouts/step-{step + 1:06d}.parquet").to_pylist())
        found |= {
            "return": mean(sum(e.reward) for e in episodes),
            "episode_length": mean(len(e) for e in episodes),
            "truncated_ratio": mean(not e.ended for e in episodes),
            "env_steps": reference.env_steps,
        }
        for name, number in found.items():
            assert metrics[name] == pytest.approx(number, **CLOSE), f"{name} of step {step}"
    check_evaluation(reference, run.evaluations[-1])
    (checkpoint,) = (run.path / "checkpoints").glob("step-000003")
    state = read_state(checkpoint, "trainer")
    check_weights(reference.weights, state["module"], first)
    saved = load_file(run.model / "agents.safetensors")
    assert all(torch.equal(state["module"][f"agents.{name}"], w) for name, w in saved.items())
    return run, reference, state["learner"], first


def check_evaluation(reference, recorded):
    episodes = reference.play(0, phase=EVALUATE)
    assert recorded["eval_return"] == pytest.approx(mean(sum(e.reward) for e in episodes), **CLOSE)


def check_record(reference, episodes, rows):
    assert len(rows) == len(episodes) * 2
    for row in rows:
        episode, a = episodes[row["episode"]], reference.names.index(row["agent"])
        steps = range(len(episode))
        assert row["seed"] == episode.seed
        assert row["policy_version"] == row["step"] - 1, "the weights before the step's update"
        assert row["ids"] == [episode.actions[t][a] for t in steps]
        expected = [CHOSE if episode.chose(t, a) else NO_CHOICE for t in steps]
        assert list(zip(row["roles"], row["verdicts"], strict=True)) == expected
        assert row["rewards"] == pytest.approx(episode.reward)
        assert row["finish"] == ("environment" if episode.ended else "max_turns")


def check_weights(ours, recorded, first):
    """Off by a thousandth of the way they went."""
    assert ours.keys() == recorded.keys()
    moved = sum(float((w.detach() - first[name].double()).square().sum()) for name, w in ours.items())
    off = sum(float((w.detach() - recorded[name].double()).square().sum()) for name, w in ours.items())
    assert moved > 0
    assert math.sqrt(off / moved) < 2e-3


Q = {
    "algo": "qmix",
    "q.buffer": 9,
    "q.batch": 5,
    "q.updates": 3,
    "q.embed": 4,
    "q.hyper": 5,
    "q.epsilon_end": 0.2,
    "q.epsilon_steps": 60,
    "q.epsilon_spread": 0.8,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"q.tau": 0.3, "agent.recurrent": True, "agent.last_action": True, "q.beta": 0.7},
        {"q.tau": None, "q.target_every": 2, "q.double": False},
    ],
)
def test_steps_of_qmix(tmp_path, settings):
    _, reference, state, first = walk(QMIX, tmp_path, **Q, **settings)
    check_weights(reference.target, state["target"], first)
    held = state["buffer"]
    assert held["priorities"].tolist() == pytest.approx(reference.priorities, **CLOSE)
    assert len(set(reference.priorities)) > 2
    for i, episode in enumerate(reference.ring):
        n, stored = len(episode), {name: tensor[i] for name, tensor in held["episodes"].items()}
        assert stored["filled"].sum() == n + 1
        assert stored["actions"][:n, :, 0].tolist() == episode.actions
        assert stored["reward"][:n, 0].tolist() == pytest.approx(episode.reward)
        assert bool(stored["terminated"].any()) == episode.ended
        assert bool(stored["truncated"].any()) != episode.ended
        assert stored["present"][: n + 1].tolist() == episode.there
        for t in range(n + 1):
            torch.testing.assert_close(stored["obs"][t], torch.stack(episode.obs[t]).float())
            assert [torch.nonzero(may)[:, 0].tolist() for may in stored["avail_actions"][t]] == episode.avail[t]
    kinds = {(e.ended, len(e)) for e in reference.ring}
    assert kinds == {(True, 4), (False, 5), (False, 6)}, "episodes that ended, cut themselves off, met the limit"


@pytest.mark.parametrize(
    "settings",
    [
        {"ppo.minibatches": 2, "ppo.entropy_end": 0.001, "optim.lr": 3e-2, "optim.critic_lr": 1e-2},
        {"agent.recurrent": True, "optim.max_grad_norm": 0.5},
    ],
)
def test_steps_of_mappo(tmp_path, settings):
    ppo = {"epochs": 3, "clip": 0.02, "value_clip": 0.05, "gamma": 0.9, "lam": 0.8}
    common = {f"ppo.{name}": value for name, value in ppo.items()}
    run, reference, state, _ = walk(MAPPO, tmp_path, algo="mappo", **common, **settings)
    centre, scale = reference.moments()
    held = state["moments"]
    assert float(held["mean"]) == pytest.approx(centre, rel=1e-4)
    assert float(held["square"] - held["mean"] ** 2) == pytest.approx(scale**2, rel=1e-3)
    assert all(0.0 < line["clip_ratio/region_mean"] < 0.9 for line in run.metrics if "loss" in line)
