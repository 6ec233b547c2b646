"""One, two and four processes ask, draw, score and train alike: ranks change how the work is spread, and rounding."""

import json

import pytest
import torch
from forked_ranks import processes
from safetensors.torch import load_file

from rolecall.experience.store import read_rollouts

REWARD = """
def letters(completions, **columns):
    return [len(set(text)) / 6 + text.count("1") for text in completions]
"""
SHORT = ["--rows", "sorting:length=2", "--prompts", "4", "--samples", "4", "--steps", "2", "--quiet"]
SHORT += ["--reward", "rewards.py:letters", "--sampling.max_new_tokens", "6", "--optim.lr", "3e-4"]
CASES = {
    "grpo": [
        *("--preset", "grpo", "--algorithm.minibatches", "2", "--algorithm.epochs", "2"),
        *("--eval.every", "2", "--eval.rows", "3", "--eval.samples", "2", "--algorithm.kl_coef", "0.01"),
    ],
    "ppo": [
        "--preset",
        "ppo",
        "--algorithm.kl_coef",
        "0.05",
        "--algorithm.minibatches",
        "3",
        "--algorithm.epochs",
        "1",
    ],
}


@pytest.mark.parametrize("counts", [(2,), pytest.param((4,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_change_nothing_but_rounding(tmp_path, case, counts):
    (tmp_path / "rewards.py").write_text(REWARD)
    for count in (1, *counts):
        processes(count, tmp_path, "rl", *SHORT, *CASES[case], "--out", f"runs/of-{count}")
    runs = {count: tmp_path / f"runs/of-{count}" for count in (1, *counts)}
    metrics = {n: [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()] for n, run in runs.items()}
    weights = {n: load_file(run / "model" / "model.safetensors") for n, run in runs.items()}
    for count in counts:
        for step in (1, 2):
            whole, part = (read_rollouts(runs[n] / f"rollouts/step-{step:06d}.parquet") for n in (1, count))
            drawn = {(t.group, t.episode): t.ids for t in whole.trajectories}
            assert len(part.trajectories) == len(whole.trajectories) // count, "rank 0 has its share"
            assert all(drawn[t.group, t.episode] == t.ids for t in part.trajectories)
        for alone, together in zip(metrics[1], metrics[count], strict=True):
            assert alone.keys() == together.keys()
            assert together == pytest.approx(alone, rel=2e-3, abs=2e-5)
        for name, tensor in weights[1].items():
            torch.testing.assert_close(weights[count][name], tensor, rtol=0, atol=1e-5)
