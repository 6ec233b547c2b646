"""Sampling ahead of training: which weights answer a step is a function of its number, so nothing depends on the clock."""

import json
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_driver import ROWS, Letters, differing, interrupt, options
from safetensors.torch import load_file

from rolecall.config.merge import ConfigError
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts
from rolecall.jobs import data, rl, running
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.units import UnitPool
from rolecall.train.exit_codes import ExitCode
from rolecall.train.ranks import Ranks
from rolecall.train.timing import Timer

STEPS = 5
SMALL = {"steps": STEPS, "save.every": 0}


class Slow(Letters):
    """Takes as long as its numbers say."""

    def __init__(self, delays=lambda: 0.0):
        self.delays, self.threads = delays, set()

    def score(self, samples, *, state=None):
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delays())
        return super().score(samples, state=state)


def run(kind, out, *, reward=None, callbacks=(), **more):
    before, data.open_reward = data.open_reward, lambda *args, **kwargs: reward or Slow()
    try:
        return running.run(options(kind, out, **SMALL | more), callbacks=callbacks)
    finally:
        data.open_reward = before


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """By the number of steps ahead, with a checkpoint after each step."""
    place = tmp_path_factory.mktemp("ahead")
    for ahead in (1, 3):
        run("grpo", place / str(ahead), ahead=ahead, **{"save.every": 1, "save.keep": 9})
    return place


@pytest.mark.parametrize("ahead", [1, 3])
def test_every_step_is_sampled_by_the_version_that_its_number_says(finished, ahead):
    path = finished / str(ahead)
    assert [line["async/staleness"] for line in lines(path)] == [min(s, ahead) for s in range(STEPS)]
    for step in range(STEPS):
        version = max(0, step - ahead)
        found = read_rollouts(path / "rollouts" / f"step-{step + 1:06d}.parquet")
        assert {t.policy_version for t in found.trajectories} == {version}
        if version:
            weights = load_file(path / "checkpoints" / f"step-{version:06d}" / "model.safetensors")
            assert found.model == weights_hash(weights, torch.float32)


def test_what_is_ahead_is_sampled_beside_training_and_0_is_the_run_without(tmp_path):
    reward = Slow()
    run("grpo", tmp_path / "ahead", reward=reward, ahead=1, steps=2)
    assert reward.threads == {"rolecall-ahead"}
    run("grpo", tmp_path / "without", reward=reward, steps=2)
    run("grpo", tmp_path / "zero", ahead=0, steps=2)
    assert reward.threads == {"rolecall-ahead", "MainThread"}
    assert differing(tmp_path / "without", tmp_path / "zero") == []


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), ahead=st.sampled_from([1, 3]))
def test_the_bytes_do_not_depend_on_how_long_anything_takes(finished, tmp_path_factory, seed, ahead):
    rng = random.Random(seed)
    scoring, training = rng.choice([(0.0, 0.12), (0.12, 0.0), (0.06, 0.06)])
    reward = Slow(lambda: rng.random() * scoring)
    out = tmp_path_factory.mktemp("delays") / "run"

    class Pausing:
        def on_step(self, control, metrics):
            time.sleep(random.Random(seed + control.step).random() * training)

    run("grpo", out, reward=reward, callbacks=[Pausing()], ahead=ahead, **{"save.every": 1, "save.keep": 9})
    assert differing(out, finished / str(ahead)) == []


@pytest.mark.parametrize(
    ("kind", "seed"), [("ahead", 1), pytest.param("ahead-agents", 2, marks=pytest.mark.slow), ("ahead-replay", 3)]
)
def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_bytes(tmp_path, kind, seed):
    """Three kinds of run: answers, episodes and replay. Each is killed in a save, stopped and killed."""
    result = interrupt(kind, tmp_path, seed=seed, saves=1, terms=2)
    assert result["differing"]
    assert all(files == [] for files in result["differing"]), result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ahead", "ahead-agents", "ahead-replay", "ahead-lessons"])
def test_killed_twenty_times(tmp_path, kind):
    result = interrupt(kind, tmp_path, seed=7, saves=10, terms=20)
    assert all(files == [] for files in result["differing"]), result


def test_a_pool_of_workers_samples_the_same(finished, tmp_path):
    run("grpo", tmp_path / "pool", ahead=1, **{"engine.workers": 1, "save.every": 1, "save.keep": 9})
    odd = differing(tmp_path / "pool", finished / "1")
    assert [name for name in odd if not name.endswith("manifest.json")] == []  # it holds engine.workers
    last = json.loads((tmp_path / "pool" / "timing.jsonl").read_text().splitlines()[-1])
    assert {"wait", "generate", "workers/busy"} <= last.keys()


POOLED = {"ahead": 3, "engine.workers": 2, "save.every": 1, "save.keep": 9}


def unlike(one, other):
    """The files in which runs with other engines differ; a manifest holds engine.workers."""
    return [name for name in differing(one, other) if not name.endswith("manifest.json")]


def test_two_workers_sample_two_steps_at_once_each_by_its_own_version(finished, tmp_path, monkeypatch):
    met, stream = threading.Barrier(2, timeout=100), UnitPool.stream

    def together(self, requests, version=None):
        if requests[0].step < 4:  # steps 0 and 1, then 2 and 3: each waits until the other is asked for
            met.wait()
        return stream(self, requests, version)

    monkeypatch.setattr(UnitPool, "stream", together)
    rng = random.Random(5)
    run("grpo", tmp_path / "pool", reward=Slow(lambda: rng.random() * 0.1), **POOLED)
    assert unlike(tmp_path / "pool", finished / "3") == []
    assert [line["async/staleness"] for line in lines(tmp_path / "pool")] == [0, 1, 2, 3, 3]


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), workers=st.integers(2, 4))
def test_bytes_of_steps_sampled_at_once_do_not_depend_on_delays(finished, tmp_path_factory, seed, workers):
    rng, out = random.Random(seed), tmp_path_factory.mktemp("delays") / "run"
    stream = UnitPool.stream

    class Pausing:
        def on_step(self, control, metrics):
            time.sleep(rng.random() * 0.3)

    def late(self, requests, version=None):
        time.sleep(rng.random() * 0.3)
        for completion in stream(self, requests, version):
            time.sleep(rng.random() * 0.02)
            yield completion

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitPool, "stream", late)
        reward = Slow(lambda: rng.random() * 0.3)
        run("grpo", out, reward=reward, callbacks=[Pausing()], **POOLED | {"engine.workers": workers})
    assert unlike(out, finished / "3") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [("grpo", {"policy.lora_rank": 4, "algorithm.reference_every": None}), ("agents", {}), ("replay", {}), ("ppo", {})],
)
def test_steps_sampled_at_once_equal_those_of_one_engine(tmp_path, kind, more):
    """With an adapter (also resumed), episodes, replay, and evaluations in between."""
    run(kind, tmp_path / "one", **POOLED | more | {"engine.workers": 0 if "policy.lora_rank" in more else 1})
    run(kind, tmp_path / "pool", **POOLED | more)
    assert unlike(tmp_path / "one", tmp_path / "pool") == []
    if "policy.lora_rank" in more:
        run(kind, tmp_path / "cut", **POOLED | more | {"steps": 3})
        run(kind, tmp_path / "cut", **POOLED | more | {"resume": True})
        assert lines(tmp_path / "cut") == lines(tmp_path / "pool")


def test_steps_can_be_added_but_no_step_can_be_sampled_by_weights_that_are_gone(finished, tmp_path):
    run("grpo", tmp_path / "run", ahead=1, steps=2)
    run("grpo", tmp_path / "run", ahead=1, steps=STEPS, resume=True)
    assert lines(tmp_path / "run") == lines(finished / "1")
    with pytest.raises(
        UserError, match=r"step 6 is sampled by version 3 of the weights with async\.ahead 2, which the"
    ):
        run("grpo", tmp_path / "run", ahead=2, steps=6, resume=True)
    run("grpo", tmp_path / "run", ahead=0, steps=6, resume=True)


def test_a_reward_that_hangs_does_not_keep_a_stopped_run_from_saving(finished, tmp_path):
    calls = iter([0.0, 0.0, 60.0])

    class Hanging(Slow):
        def score(self, samples, *, state=None):
            if (pause := next(calls)) > 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(pause)
            return super().score(samples, state=state)

    begun = time.monotonic()
    stopped = run("grpo", tmp_path / "run", reward=Hanging(), ahead=1, grace=0.3).outcome
    assert time.monotonic() - begun < 20
    assert stopped.exit_code == ExitCode.TERMINATED
    assert stopped.step in (1, 2)
    run("grpo", tmp_path / "run", ahead=1, resume=True)
    assert lines(tmp_path / "run") == lines(finished / "1")


def test_what_goes_wrong_while_sampling_is_the_error_of_the_run(tmp_path):
    class Broken(Slow):
        def score(self, samples, *, state=None):
            raise UserError("this reward is no good")

    with pytest.raises(UserError, match="this reward is no good"):
        run("grpo", tmp_path / "run", reward=Broken(), ahead=1)


def test_what_cannot_be_sampled_ahead_is_refused(tmp_path):
    def made(processes, asked, **more):
        job = SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes))
        return rl._ahead(job, options("grpo", tmp_path, ahead=1, **more), asked, Ranks(), None, Timer(), None)

    with pytest.raises(UserError, match="agree on further prompts, which they cannot while they train"):
        made(2, rl._Asked(reward=Slow()), **{"algorithm.resample": 2})
    with pytest.raises(UserError, match="lessons are learned from the episodes of all processes"):
        made(2, rl._Asked(reward=Slow()), **{"lessons.share": 0.5})


def test_the_correction_is_chosen_and_said(tmp_path):
    def line(**more):
        return options("grpo", tmp_path, rows=ROWS, **more).ahead_line

    assert line() is None
    assert line(ahead=2).endswith("beside training; corrected by token weights within 0 .. 2 (truncate)")
    assert options("grpo", tmp_path, ahead=1).old_source == "recompute"
    assert "the loss clips" in line(ahead=2, **{"algorithm.old_logprobs": "behaviour"})
    assert "the gradient is biased" in line(ahead=2, **{"replay.weigh_fresh": False})
    with pytest.raises(ConfigError, match=r"async\.ahead is a number of steps, 0 or more"):
        options("grpo", tmp_path, ahead=-1)
    with pytest.raises(ConfigError, match="nothing can be sampled ahead"):
        options("grpo", tmp_path, ahead=1, from_run="runs/x")
