"""A pool of Ray actors answers as one engine does, whatever becomes of its actors and machines. `make test-cluster` runs it.

Three machines are faked by processes of Ray on this one.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.rollout.ray_pool import EngineActor, RayPool
from rolecall.types import Request, Sampling

ray = pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HOW = {"name": "native", "dtype": None, "max_rows": 256}
BUSY = min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
"""How many times as long as usual everything takes here."""
SILENCE = 4.0 * BUSY


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


def requests(count=6, *, length=60):
    sampling = Sampling(max_new_tokens=length, stop_ids=())
    return [
        Request(prompt_ids=tuple(range(65, 70 + i)), sampling=sampling, n=4, prompt=i, seed=5, step=0)
        for i in range(count)
    ]


def alone(engine, asked):
    """What one engine says to each prompt by itself: a worker's unit."""
    return [c for request in asked for c in engine.generate([request])]


@pytest.fixture
def measured():
    return {}


@pytest.fixture
def pool(tiny, cluster, measured):
    def add(name, value):
        measured[name] = measured.get(name, 0.0) + value

    options = EngineOptions(workers=2, cluster="ray", worker_silence=SILENCE)
    made = RayPool(tiny, options, how=HOW, reads={}, add=add)
    yield made
    made.close()


def test_actors_on_several_machines_answer_as_one_engine_does_also_with_new_weights(tiny, pool):
    engine = open_engine(tiny, **HOW)
    assert pool.generate(requests()) == alone(engine, requests())
    other = {name: p * 1.5 for name, p in tiny.model.named_parameters()}
    for held in (pool, engine):
        held.load(other, 3)
    assert pool.hash() == engine.hash()
    assert pool.generate(requests()) == alone(engine, requests())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_killed_or_stopped_actor_was_asked_is_answered_by_another(tiny, pool, measured, number):
    asked = requests(length=400)
    usual = time.monotonic()
    expected = pool.generate(asked)
    usual = time.monotonic() - usual
    assert expected == alone(open_engine(tiny, **HOW), asked)
    ready = [place for place in pool._places if place.about is None]
    victim, place = pool.pids[0], ready[0]

    def end_it_at_work():
        while place.job is None:
            time.sleep(0.01)
        os.kill(victim, number)

    threading.Thread(target=end_it_at_work, daemon=True).start()
    begun = time.monotonic()
    assert pool.generate(asked) == expected
    assert time.monotonic() - begun < 60 + 5 * usual, "Ray itself never replaces one that is stopped"
    assert measured["workers/lost"] >= 1
    assert "workers/differing" not in measured


def test_a_machine_that_is_removed_and_one_that_joins_change_nothing(tiny, cluster, pool):
    """Two workers on three machines of one processor. The two that are not the head go; a new one takes over."""
    engine = open_engine(tiny, **HOW)
    for node in cluster.extra:
        cluster.remove_node(node)
    asked = requests(length=200)
    found = pool.generate(asked)
    assert found == alone(engine, asked), "by what is left"
    cluster.extra = [cluster.add_node(num_cpus=1) for _ in range(2)]
    end = time.monotonic() + 300
    while len(pool.pids) < 2 and time.monotonic() < end:
        assert pool.generate(requests(2)) == alone(engine, requests(2))
        time.sleep(0.5)
    assert len(pool.pids) == 2, "the one that waited for room was placed"
    assert pool.generate(asked) == found


class Unknown(EngineActor):
    """Of a module that no other machine has."""


def test_what_cannot_work_is_said(tiny, cluster, monkeypatch):
    with pytest.raises(
        UserError,
        match=r"9 rollout workers need 1 CPUs each, and the Ray cluster has 3 CPUs on 3 machines, enough for 3: use --engine.workers 3, or",
    ):
        RayPool(tiny, EngineOptions(workers=9, cluster="ray"), how=HOW, reads={})
    ray.shutdown()
    one = EngineOptions(workers=1, cluster="ray")
    with monkeypatch.context() as patch:
        patch.setattr("rolecall.rollout.ray_pool.EngineActor", Unknown)
        with pytest.raises(UserError, match="a Ray worker cannot make its engine: ModuleNotFoundError"):
            RayPool(tiny, one, how=HOW, reads={})
    monkeypatch.setattr("rolecall.rollout.ray_pool._versions", lambda: {"rolecall": "9.9"})
    with pytest.raises(
        UserError, match=r"a Ray worker has rolecall \S+ and this process 9\.9: install the same on all"
    ):
        RayPool(tiny, one, how=HOW, reads={})


def test_a_run_ends_with_the_bytes_of_one_with_local_workers(cluster, tmp_path):
    """Also when it is killed and resumed: what it leaves on the cluster is none of the next one's business."""
    reward = tmp_path / "letters.py"
    reward.write_text("def letters(completions, **_):\n    return [sum(map(ord, c)) % 7 / 6 for c in completions]\n")

    def run(out, *more, check=True):
        command = [sys.executable, "-m", "rolecall", "rl", "--preset", "grpo", "--steps", "4", "--prompts", "3", "--samples", "4",
                   "--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--save.every", "1", "--async.ahead", "1",
                   "--reward", f"{reward}:letters", "--engine.workers", "2", "--quiet", "--out", str(out), *more]  # fmt: skip
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if check:
            assert process.wait(timeout=500) == 0
        return process

    run(tmp_path / "local")
    cut = run(tmp_path / "ray", "--engine.cluster", "ray", check=False)
    end = time.monotonic() + 500
    while time.monotonic() < end and not list((tmp_path / "ray").glob("checkpoints/step-000002")):
        time.sleep(0.05)
    cut.kill()
    cut.wait()
    run(tmp_path / "ray", "--engine.cluster", "ray", "--resume")
    for name in ("model/model.safetensors", "metrics.jsonl", "rollouts/step-000004.parquet"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert json.loads((tmp_path / "ray" / "config.json").read_text())["engine"]["cluster"] == "ray"
    assert Path(tmp_path / "ray" / "timing.jsonl").read_text().count("workers/busy")
