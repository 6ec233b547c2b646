"""Processes that train, placed by Ray, end as those of torchrun do. `make test-cluster` runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolecall.workers.ray_ranks import Found, environments, exit_code

pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REWARD = """
def letters(completions, **_):
    return [sum(map(ord, c)) % 7 / 6 for c in completions]
"""
RL = ["rl", "--preset", "grpo", "--prompts", "4", "--samples", "4", "--sampling.max_new_tokens", "6", "--optim.lr", "1e-3",
      "--reward", "letters.py:letters", "--save.every", "1", "--rank-timeout", "30", "--quiet"]  # fmt: skip
RAY = [sys.executable, "-m", "rolecall.workers.ray_ranks", "--ranks", "2", *RL]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node",
    "2",
    "--master_port",
    "29617",
    "-m",
    "rolecall",
    *RL,
]
NAMES = ("model/model.safetensors", "metrics.jsonl", "rollouts/step-000003.parquet")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "letters.py").write_text(REWARD)
    return tmp_path


def begun(command, place, *more):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *more], cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def done(command, place, *more, code=0):
    process = begun(command, place, *more)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == code, said.decode()
    return said.decode()


def bytes_of(run):
    return [(run / name).read_bytes() for name in NAMES]


@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
def test_ranks_that_ray_places_end_in_the_bytes_of_torchrun_also_after_one_was_killed(cluster, place, shard):
    done(TORCHRUN, place, "--steps", "3", "--train.shard", shard, "--out", "torchrun")
    cut = begun(RAY, place, "--steps", "3", "--train.shard", shard, "--out", "ray")
    end = time.monotonic() + 300
    while time.monotonic() < end and not list(place.glob("ray/checkpoints/step-000001/manifest.json")):
        assert cut.poll() is None, cut.communicate()[0].decode()
        time.sleep(0.02)
    os.kill(rank_process(1, "ray"), signal.SIGKILL)
    said, _ = cut.communicate(timeout=300)
    assert cut.returncode == 75, said.decode()
    done(RAY, place, "--steps", "3", "--out", "ray", "--resume")
    assert bytes_of(place / "ray") == bytes_of(place / "torchrun")
    assert json.loads((place / "ray" / "run.json").read_text())


def rank_process(rank, out):
    """The process of a rank of the run with this directory."""
    for entry in Path("/proc").iterdir():
        try:
            words, env = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rolecall" in words and out.encode() in words and f"RANK={rank}".encode() in env:
            return int(entry.name)
    raise AssertionError("there is no such rank")


def test_ranks_of_a_job_with_workers_of_the_same_cluster_sample_two_steps_ahead(cluster, place):
    """Two ranks take two of the three machines' CPUs, and their workers half of one each."""
    more = ("--steps", "3", "--async.ahead", "2", "--engine.workers", "1")
    done(TORCHRUN, place, *more, "--out", "local")
    done(TORCHRUN, place, *more, "--engine.cluster", "ray", "--out", "ray")
    assert bytes_of(place / "ray") == bytes_of(place / "local")


def test_too_few_cpus_and_a_wrong_command_are_said(cluster, place):
    command = [sys.executable, "-m", "rolecall.workers.ray_ranks", "--ranks", "9", "rl"]
    assert "9 processes that train need 1 CPUs each, and the Ray cluster has 3" in done(command, place, code=2)
    assert "sampels" in done([*RAY, "--sampels", "3"], place, code=2)


def test_what_ranks_find_set():
    places = [
        Found(machine="a", address="10.0.0.1", port=5, gpus=("0",)),
        Found(machine="a", address="10.0.0.1", port=6, gpus=("3",)),
        Found(machine="b", address="10.0.0.2", port=7, gpus=("1",)),
    ]
    found = environments(places, ray_address="10.0.0.9:6379")
    assert [env["RANK"] for env in found] == ["0", "1", "2"]
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "0"]
    assert [env["LOCAL_WORLD_SIZE"] for env in found] == ["2", "2", "1"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0,3", "0,3", "1"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) for env in found} == {("10.0.0.1", "5", "3")}


@pytest.mark.parametrize(
    ("codes", "all_of_them"), [((0, 0), 0), ((-9, 75), 75), ((75, 2), 2), ((-9, -9), 75), ((1, -9), 1)]
)
def test_the_exit_code_of_several(codes, all_of_them):
    assert exit_code(codes) == all_of_them
