"""Several processes that sample ahead of training: each samples its share by the version that the step's number says."""

import json

import pytest
import torch
from forked_ranks import processes
from safetensors.torch import load_file

from rolecall.experience.store import read_rollouts

REWARD = """
def letters(completions, **columns):
    texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [len(set(text)) / 6 + text.count("1") for text in texts]
"""
RL = ["rl", "--preset", "grpo", "--rows", "sorting:length=2", "--prompts", "4", "--samples", "4", "--steps", "4"]
RL += ["--reward", "rewards.py:letters", "--sampling.max_new_tokens", "6", "--optim.lr", "3e-4", "--async.ahead", "1"]
RL += ["--eval.every", "2", "--eval.rows", "3", "--save.every", "1", "--save.keep", "9", "--quiet"]
"""Evaluations wait for their turn while the next step is sampled."""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def bytes_of(run):
    """All that is promised: weights, optimiser and the versions that are kept, metrics; run 0 records the rollouts of its share."""
    kept = [*(run / "model").glob("*.safetensors"), *run.glob("checkpoints/step-*/**/*.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in [*kept, run / "metrics.jsonl"]}


@pytest.mark.parametrize(
    "shard", [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("ddp", marks=pytest.mark.slow)]
)
def test_two_processes_sample_ahead_as_one_does_and_resume_to_the_same_bytes(place, shard):
    processes(1, place, *RL, "--out", "alone")
    processes(2, place, *RL, "--out", "straight", "--train.shard", shard)
    processes(2, place, *RL, "--out", "turns", "--train.shard", shard, "--steps", "2")
    processes(2, place, "rl", "--resume", "--out", "turns", "--steps", "4", "--quiet")
    straight, alone = place / "straight", place / "alone"
    assert bytes_of(place / "turns") == bytes_of(straight)
    steps = [line for line in metrics_of(straight) if "async/staleness" in line]
    assert [line["async/staleness"] for line in steps] == [0.0, 1.0, 1.0, 1.0]
    for step in range(1, 5):
        mine, theirs = (
            {(t.group, t.episode): (t.policy_version, t.ids) for t in read_rollouts(path).trajectories}
            for path in (run / f"rollouts/step-{step:06d}.parquet" for run in (straight, alone))
        )
        assert {version for version, _ in mine.values()} == {max(0, step - 2)}
        assert len(mine) == len(theirs) // 2
        assert mine.items() <= theirs.items()
    weights = load_file(alone / "model/model.safetensors")
    for name, tensor in load_file(straight / "model/model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5)
    for one, other in zip(metrics_of(straight), metrics_of(alone), strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-5)


@pytest.mark.slow
def test_episodes_that_two_processes_play_ahead_are_those_of_one(place):
    words = ["rl", "--preset", "grpo", "--env", "guessing", "--prompts", "4", "--samples", "2", "--steps", "3"]
    words += [
        "--reward",
        "rewards.py:letters",
        "--async.ahead",
        "1",
        "--sampling.max_new_tokens",
        "6",
        "--save.every",
        "1",
        "--quiet",
    ]
    processes(1, place, *words, "--out", "alone")
    processes(2, place, *words, "--out", "straight")
    processes(2, place, *words, "--out", "turns", "--steps", "2")
    processes(2, place, "rl", "--resume", "--out", "turns", "--steps", "3", "--quiet")
    assert bytes_of(place / "turns") == bytes_of(place / "straight")
    for one, other in zip(metrics_of(place / "straight"), metrics_of(place / "alone"), strict=True):
        assert {"agents/turns", "async/staleness"} <= one.keys()
        counted = {name for name in other if name.startswith("agents/")}
        assert {name: one[name] for name in counted} == {name: other[name] for name in counted}
