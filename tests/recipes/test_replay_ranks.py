"""Two processes hold one buffer: each takes its share of what is drawn, and a resumed job goes on exactly."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

REWARD = "def letters(completions, **columns):\n    return [len(set(text)) / 6 for text in completions]\n"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def two_processes(place: Path, *arguments: str) -> None:
    words = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "-m", "rolecall", "rl", *arguments],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_replay_from_one_buffer_and_go_on_exactly(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    first = ["--rows", "sorting", "--reward", "rewards.py:letters", "--prompts", "4", "--samples", "4", "--quiet"]
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
