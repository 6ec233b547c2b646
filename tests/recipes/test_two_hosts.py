"""Two hosts, each a network namespace of its own with one cable between them: the bytes of two processes on one host."""

import os
import shutil
import subprocess
import sys
import uuid

import pytest
from forked_ranks import free_port

RL = ["-m", "rolecall", "rl", "--preset", "ppo", "--rows", "sorting:length=2", "--prompts", "4", "--samples", "4"]
RL += [
    "--steps",
    "2",
    "--save.every",
    "1",
    "--quiet",
    "--reward",
    "rewards.py:letters",
    "--sampling.max_new_tokens",
    "6",
]
RL += ["--algorithm.kl_coef", "0.05", "--train.shard", "fsdp2"]
REWARD = """
def letters(completions, **columns):
    return [len(set(text)) / 6 + text.count("1") for text in completions]
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NET = "10.213.71"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts():
    """The names of two namespaces: the first has the address .1, the second .2."""
    names = [f"rc-{uuid.uuid4().hex[:6]}-{i}" for i in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0 or ip("netns", "add", names[0]).returncode:
        pytest.skip("two hosts need root and `ip netns`")
    try:
        steps = [
            ["netns", "add", names[1]],
            ["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]],
        ]
        for i, name in enumerate(names, start=1):
            steps.append(["-n", name, "addr", "add", f"{NET}.{i}/24", "dev", "eth0"])
            steps += [["-n", name, "link", "set", device, "up"] for device in ("lo", "eth0")]
        for step in steps:
            made = ip(*step)
            if made.returncode:
                pytest.skip(f"two hosts need network namespaces: ip {' '.join(step)}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def bytes_of(run):
    kept = [*(run / "model").glob("*.safetensors"), *run.glob("checkpoints/*/parts/*"), run / "metrics.jsonl"]
    return {str(path.relative_to(run)): path.read_bytes() for path in kept}


@pytest.mark.slow
def test_two_hosts_make_the_bytes_of_two_processes_on_one(tmp_path, hosts):
    (tmp_path / "rewards.py").write_text(REWARD)
    how = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    here = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = [*TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port()), *RL, "--out", "one"]
    done = subprocess.run(one, env=here, timeout=300, check=False, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    started = []
    for rank, name in enumerate(hosts):
        place = ["--nnodes", "2", "--node_rank", str(rank), "--nproc_per_node", "1", "--master_addr", f"{NET}.1"]
        command = [*TORCHRUN, *place, "--master_port", "29500", *RL, "--out", "two"]
        inside = {**here, "GLOO_SOCKET_IFNAME": "eth0"}
        started.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=inside, **how))
    told = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(text[-2000:] for text in told)
    found = bytes_of(tmp_path / "two")
    assert sum(name.startswith("checkpoints/") for name in found) == 4, "each host wrote its part of both checkpoints"
    assert found == bytes_of(tmp_path / "one")
