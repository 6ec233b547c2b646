"""Rewards and environments whose workers run on machines of a Ray cluster. `make test-cluster` runs it."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from rolecall.config.agents import AgentOptions
from rolecall.errors import UserError
from rolecall.jobs.agents import open_envs
from rolecall.workers.hosts import RayHosts

pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REWARD = """
def letters(completions, **_):
    return [sum(map(ord, c)) % 7 / 6 for c in completions]
"""


def test_a_run_whose_rewards_are_scored_elsewhere_ends_with_the_same_bytes(cluster, tmp_path):
    (tmp_path / "letters.py").write_text(REWARD)

    def run(out, *more):
        command = [sys.executable, "-m", "rolecall", "rl", "--preset", "grpo", "--steps", "2", "--prompts", "2", "--samples", "4",
                   "--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--reward", "letters.py:letters", "--quiet",
                   "--out", str(out), *more]  # fmt: skip
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        assert subprocess.run(command, env=env, cwd=tmp_path, timeout=500, check=False).returncode == 0

    run("local")
    run("ray", "--reward_cluster", "ray")
    names = ("model/model.safetensors", "metrics.jsonl", "rollouts/step-000002.parquet")
    assert all((tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes() for name in names)


def test_as_many_hosts_as_there_are_places_and_too_few_are_said(cluster):
    with RayHosts(3, what="reward workers", option=None) as placed:
        assert len({host.port for host in placed.hosts}) == 3
    sentence = r"9 environment workers need 1 CPUs each, .* enough for 3: use --agent\.workers 3, or add machines"
    with pytest.raises(UserError, match=sentence), ExitStack() as stack:
        open_envs("gym:CartPole-v1", AgentOptions(workers=9, cluster="ray"), stack)


def test_an_environment_elsewhere_answers_as_one_here(cluster):
    def play(**how):
        with ExitStack() as stack:
            envs = open_envs("gym:CartPole-v1", AgentOptions(workers=2, **how), stack)
            begun = envs.ask("start", {0: ({"prompt": "p"}, 3), 1: ({"prompt": "p"}, 4)})
            return repr(begun), repr(envs.ask("step", {0: "0", 1: "1"}))

    assert play(cluster="ray") == play()
