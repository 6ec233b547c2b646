"""Servers that Ray places: reserved, started, kept alive and ended. `make test-cluster` runs it."""

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.remote.placed import PlacedServers

ray = pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def options(**more):
    return EngineOptions(**{"cluster": "ray", "placed_servers": 2} | more)


def answers(url):
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def until(holds, *, seconds=120):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_servers_lie_on_several_machines_come_back_when_killed_and_end_with_the_run(cluster):
    placed = PlacedServers("tiny", options(), count=2)
    try:
        assert all(map(answers, placed.urls))
        table = ray.util.placement_group_table(placed._group)
        assert len(set(table["bundles_to_node_id"].values())) == 2
        victim = placed.pids[0]
        os.kill(victim, signal.SIGKILL)
        assert until(lambda: placed.pids[0] != victim and answers(placed.urls[0])), "under the same address"
        pids = placed.pids
    finally:
        placed.close()
    assert until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize(
    ("model", "more", "sentence"),
    [
        ("tiny", {"server_gpus": 1.0}, r"2 servers need 1 CPUs and 1 GPUs each, and the Ray cluster has 3 CPUs and 0 GPUs on 3 "
         r"machines, enough for 0: use less for each, or add machines"),
        ("tiny", {"placed_servers": 4}, r"4 servers need 1 CPUs each, .* enough for 3: use --engine\.placed_servers 3, or"),
        ("/nowhere/model", {}, r"Ray could not start the servers: .*the server on \S+ ended: .*/nowhere/model"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_one_sentence(cluster, model, more, sentence):
    how = options(**more)
    with pytest.raises(UserError, match=sentence):
        PlacedServers(model, how, count=how.placed_servers)


def test_a_run_on_placed_servers_ends_with_the_bytes_of_one_without(cluster, tmp_path):
    reward = tmp_path / "letters.py"
    reward.write_text("def letters(completions, **_):\n    return [sum(map(ord, c)) % 7 / 6 for c in completions]\n")

    def run(out, *more):
        command = [sys.executable, "-m", "rolecall", "rl", "--preset", "grpo", "--steps", "2", "--prompts", "2", "--samples", "4",
                   "--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--reward", f"{reward}:letters", "--quiet",
                   "--out", str(out), *more]  # fmt: skip
        assert (
            subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=500, check=False).returncode == 0
        )

    run(tmp_path / "local")
    run(tmp_path / "ray", "--engine.cluster", "ray", "--engine.placed_servers", "2")
    assert (tmp_path / "ray/model/model.safetensors").read_bytes() == (
        tmp_path / "local/model/model.safetensors"
    ).read_bytes()
