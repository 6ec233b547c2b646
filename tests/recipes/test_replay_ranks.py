"""Two processes hold one buffer: each takes its share of what is drawn, and a resumed job goes on exactly."""

import json
import os
import socket
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import rolecall.jobs.rl  # noqa: F401  (here, or every child would import it)
from rolecall.cli import main

REWARD = "def letters(completions, **columns):\n    return [len(set(text)) / 6 for text in completions]\n"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def two_processes(place: Path, *arguments: str) -> None:
    """`rolecall rl` as torchrun starts it, in two forked children that have torch loaded already."""
    port = str(free_port())
    children = []
    for rank in ("0", "1"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
                AcceleratorState._reset_state(reset_partial_state=True)
                os.chdir(place)
                code = main(["rl", *arguments])
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]


def test_two_processes_replay_from_one_buffer_and_go_on_exactly(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    first = [
        "--rows",
        "sorting:length=2",
        "--reward",
        "rewards.py:letters",
        "--prompts",
        "4",
        "--samples",
        "4",
        "--quiet",
    ]
    first += ["--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--save.every", "1"]
    first += ["--replay.share", "0.5", "--replay.sampler", "random", "--replay.replace_flat"]
    two_processes(tmp_path, *first, "--steps", "3", "--out", "runs/whole")
    two_processes(tmp_path, *first, "--steps", "2", "--out", "runs/broken")
    two_processes(tmp_path, "--steps", "3", "--out", "runs/broken", "--resume", "--quiet")
    lines = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["replay/groups"] == 0
    assert lines[2]["replay/groups"] == 4
    assert lines[2]["replay/share"] == 0.5
    assert 4 < lines[2]["replay/held"] <= 8, "of 4 groups a step, those of both processes, counted once"
    again = [json.loads(line) for line in (tmp_path / "runs/broken/metrics.jsonl").read_text().splitlines()]
    assert lines == again
    weights = [tmp_path / "runs" / name / "model" / "model.safetensors" for name in ("whole", "broken")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
