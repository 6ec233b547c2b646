"""Several steps sampled at once by Ray actors, each by its own version of the weights. `make test-cluster` runs it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REWARD = """
def letters(completions, **_):
    return [sum(map(ord, c)) % 7 / 6 for c in completions]
"""


@pytest.mark.parametrize("more", [(), ("--policy.lora_rank", "4")], ids=["whole", "adapter"])
def test_steps_that_actors_sample_at_once_are_those_of_one_process(cluster, tmp_path, more):
    (tmp_path / "letters.py").write_text(REWARD)

    def run(out, *how):
        command = [sys.executable, "-m", "rolecall", "rl", "--preset", "grpo", "--steps", "6", "--prompts", "3", "--samples", "4",
                   "--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--save.every", "1", "--async.ahead", "3",
                   "--reward", "letters.py:letters", "--quiet", "--out", out, *more, *how]  # fmt: skip
        ended = subprocess.run(
            command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=tmp_path, timeout=500, check=False
        )
        assert ended.returncode == 0

    run("alone")
    run("ray", "--engine.workers", "3", "--engine.cluster", "ray")
    names = ["model/model.safetensors", "metrics.jsonl", *(f"rollouts/step-{n:06d}.parquet" for n in range(1, 7))]
    assert [n for n in names if (tmp_path / "ray" / n).read_bytes() != (tmp_path / "alone" / n).read_bytes()] == []
