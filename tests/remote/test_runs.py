"""Runs on servers: adapters, another precision, and a trainer that is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from served import app_of, serving

import rolecall
from rolecall.experience.updates import read_updates
from rolecall.serving.app import App

REWARD = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"
SHORT = {
    "model": "tiny",
    "reward": REWARD,
    "steps": 4,
    "prompts": 4,
    "samples": 4,
    "sampling": {"max_new_tokens": 12},
    "optim": {"lr": 1e-3},
    "quiet": True,
}


class Counting(App):
    """Counts the requests for answers by a version that stands beside another."""

    asked = 0

    async def _generate_several(self, request):
        Counting.asked += self._is_slot
        return await super()._generate_several(request)


@pytest.fixture(scope="module")
def url():
    with serving(app_of(kind=Counting)) as address:
        yield address


def weights(run):
    return (Path(run) / "model" / "model.safetensors").read_bytes()


def test_an_adapter_is_trained_on_servers_as_without_them(url, tmp_path):
    how = SHORT | {"steps": 2, "policy": {"lora_rank": 4}, "algorithm": {"kl_coef": 0.1}}
    here = rolecall.rl(out=str(tmp_path / "here"), **how)
    there = rolecall.rl(out=str(tmp_path / "there"), engine={"servers": [url]}, **how)
    assert weights(here) == weights(there)
    assert there.metrics[-1]["kl"] == here.metrics[-1]["kl"] > 0
    for run in (here, there):  # without being asked for
        assert all(line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in run.metrics)


def test_servers_sample_ahead_of_training_as_the_engine_here_does(url, tmp_path):
    """They are compared with what the trainer said of each version when it was its own."""
    how = SHORT | {"ahead": 2, "save": {"every": 1}}
    here = rolecall.rl(out=str(tmp_path / "here"), **how)
    there = rolecall.rl(out=str(tmp_path / "there"), engine={"servers": [url]}, **how | {"steps": 2})
    there = rolecall.rl(out=str(there.path), resume=True, extend=2, quiet=True)
    assert weights(here) == weights(there)
    assert [line["async/staleness"] for line in there.metrics] == [0, 1, 2, 2]
    assert all(line["sampling/probe_difference"] < 1e-5 for line in there.metrics)


@pytest.mark.slow
def test_two_servers_sample_two_steps_at_once_each_by_its_own_version(url, tmp_path):
    here = rolecall.rl(out=str(tmp_path / "here"), **SHORT | {"ahead": 2})
    with serving(app_of()) as other:
        there = rolecall.rl(out=str(tmp_path / "there"), engine={"servers": [url, other]}, **SHORT | {"ahead": 2})
    assert weights(here) == weights(there)
    assert [line["async/staleness"] for line in there.metrics] == [0, 1, 2, 2]


def test_answers_of_another_precision_are_weighed_and_the_weights_recorded(tmp_path):
    with serving(app_of(dtype=torch.bfloat16)) as url:
        run = rolecall.rl(out=str(tmp_path / "run"), engine={"servers": [url]}, **SHORT | {"steps": 2})
    assert all(0.5 < line["sampling/weight"] < 2 for line in run.metrics)
    assert all(1e-5 < line["sampling/probe_difference"] < 0.15 for line in run.metrics)
    recorded = read_updates(sorted((run.path / "updates").iterdir())[-1])
    assert all(row.weights is not None and len(row.weights) == len(row.verdicts) for row in recorded)
    assert any(bool((row.weights != 1).any()) for row in recorded)


@pytest.mark.parametrize("more", [{}, {"policy": {"lora_rank": 4}}])
def test_steps_are_sampled_ahead_on_servers_as_without_them(url, tmp_path, more):
    """By versions that the trainer has left behind, also those that a checkpoint brings back. With an adapter two of them stand side
    by side on the server."""
    how = SHORT | more | {"ahead": 2, "save": {"every": 3, "keep": 9}}
    here = rolecall.rl(out=str(tmp_path / "here"), **how)
    out = str(tmp_path / "there")
    before = Counting.asked
    rolecall.rl(out=out, engine={"servers": [url]}, **how | {"steps": 3})
    assert (Counting.asked > before) == bool(more)
    there = rolecall.rl(out=out, resume=True, steps=4)
    assert weights(there) == weights(here)
    assert [line["policy_version"] for line in there.metrics] == [1, 2, 3, 4]


def test_a_trainer_that_is_killed_goes_on_to_the_same_bytes(url, tmp_path):
    """While its servers stay up, with whatever weights they had."""
    whole = rolecall.rl(out=str(tmp_path / "whole"), save={"every": 1}, **SHORT)
    out = tmp_path / "killed"
    words = [
        "--steps",
        "4",
        "--prompts",
        "4",
        "--samples",
        "4",
        "--sampling.max_new_tokens",
        "12",
        "--optim.lr",
        "1e-3",
    ]
    words += ["--reward", REWARD, "--save.every", "1", "--engine.servers", url, "--out", str(out), "--quiet"]
    trainer = subprocess.Popen([sys.executable, "-m", "rolecall", "rl", *words])
    end = time.monotonic() + 200
    while not any((out / "checkpoints").glob("step-00000[123]/manifest.json")):
        assert time.monotonic() < end
        assert trainer.poll() is None
        time.sleep(0.002)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    resumed = rolecall.rl(out=str(out), resume=True)
    assert resumed.metrics[-1]["step"] == 4
    assert weights(resumed) == weights(whole)
