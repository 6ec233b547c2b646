"""Whole commands on a device that is not the host: nothing is mixed, and the host seldom waits."""

import json
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState

from away import DEVICE, Mixed, Watch, in_child
from rolecall.cli import main
from rolecall.train.step import Updater

REWARD = """
def letters(completions, **columns):
    return [len(set(text)) / 6 + text.count("1") for text in completions]
"""
SHORT = ["--rows", "sorting:length=2", "--prompts", "2", "--samples", "4", "--steps", "2"]
SHORT += [
    "--reward",
    "rewards.py:letters",
    "--sampling.max_new_tokens",
    "4",
    "--optim.lr",
    "3e-4",
    "--optim.token_budget",
    "40",
]
ROWS = ["--rows", "addition", "--steps", "2", "--batch", "5", "--optim.token_budget", "60"]
KL = ["--algorithm.kl_coef", "0.05"]
EVAL = ["--eval.every", "2", "--eval.rows", "3", "--eval.samples", "2"]
GRPO, PPO = ["rl", "--preset", "grpo", *SHORT], ["rl", "--preset", "ppo", *SHORT]
LORA = ["--policy.lora_rank", "4"]
COMMANDS = {
    "grpo, evaluated": [*GRPO, *KL, *EVAL],
    "ppo, critic of its own": [*PPO, *KL, "--algorithm.bootstrap_truncated", "true", "--algorithm.minibatches", "2"],
    "sft, padded": ["sft", *ROWS, "--policy.gradient_checkpointing"],
    "rm": ["rm", *ROWS, "--rows", "pairs.jsonl"],
    "dpo": ["dpo", *ROWS],
}
MORE = {
    "ppo, shared critic, exact KL": [
        *(*PPO, *KL, "--algorithm.critic", "shared"),
        *("--algorithm.kl_in", "loss", "--algorithm.kl_kind", "exact"),
    ],
    "KL in the loss": [*PPO, *KL, "--algorithm.kl_in", "loss", "--algorithm.critic", "shared"],
    "exact KL, new reference": [*GRPO, *KL, "--algorithm.kl_kind", "exact", "--algorithm.reference_every", "1"],
    "lora": [*GRPO, *KL, *LORA],
    "lora, dropout": [*GRPO, *LORA, "--policy.lora_dropout", "0.1", "--algorithm.old_logprobs", "detach"],
    "lora on 4 bits": [*GRPO, *LORA, "--policy.quantize", "int4"],
    "recomputed activations": [*GRPO, "--policy.gradient_checkpointing"],
    "mixed precision": [*GRPO, "--policy.mixed_precision", "bf16"],
    "bfloat16": [*GRPO, "--policy.dtype", "bfloat16"],
    "replay": [*GRPO, "--steps", "3", "--replay.share", "0.5"],
    "cut vocabulary": [*GRPO, "--sampling.top_k", "5"],
    "expert iteration": ["expert-iteration", *SHORT, "--prompts", "5", "--keep", "best"],
    "sft": ["sft", *ROWS],
    "dpo, evaluated": ["dpo", *ROWS, "--eval.every", "2", "--eval.rows", "3"],
}
PER_MICRO_BATCH = 4


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


def commanded(command: list[str], out: str, watch: Watch) -> dict:
    """Runs it on the device: its exit code, and of each optimiser step (micro-batches, how often the host waited)."""
    steps, descend = [], Updater.descend

    def counted(self, parts, *args, **kwargs):
        watch.waits.clear()
        found = descend(self, parts, *args, **kwargs)
        steps.append((len(parts), watch.waits.total()))
        return found

    where = property(lambda self: torch.device(DEVICE))
    with (
        mock.patch("rolecall.jobs.running.open_device", return_value="cuda"),
        mock.patch.object(PartialState, "default_device", where),
        mock.patch.object(Updater, "descend", counted),
    ):
        return {"code": main([*command, "--out", out, "--quiet"]), "steps": steps}


def odd_steps(watch: Watch) -> dict:
    """What the device makes of a tensor of the host, and of a look at one of its own."""
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    try:
        there + here
    except Mixed as error:
        found = str(error)
    sums = (there + torch.tensor(2.0)).sum()  # a number of the host is no mix
    before = watch.waits.total()
    assert float(sums) == 9
    assert there[there > 0].shape == (3,)
    there.copy_(here.pin_memory(), non_blocking=True)
    after = watch.waits.total()
    there.copy_(here)
    return {"mixed": found, "waits": after - before, "blocking": watch.waits.total() - after}


def all_of(watch: Watch, names: dict[str, list[str]]) -> dict[str, dict]:
    """All these commands, on the device; and what it does with odd ones."""
    odd = odd_steps(watch)
    return {"odd": odd} | {n: commanded(command, f"there-{i}", watch) for i, (n, command) in enumerate(names.items())}


def in_both(names: dict[str, list[str]]) -> dict[str, dict]:
    """The commands on the device, and the same ones here for comparison."""
    found = in_child(all_of, names)
    for i, command in enumerate(names.values()):
        hf = ["--engine.name", "hf"] if command[0] in ("rl", "expert-iteration") else []
        assert main([*command, *hf, "--out", f"here-{i}", "--quiet"]) == 0
    return found


def last_step(run) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line][-1]


def check(names: dict[str, list[str]], place) -> None:
    found = in_both(names)
    odd = found.pop("odd")
    assert "aten.add.Tensor" in odd["mixed"]  # the device refuses a mix, and counts what waits
    assert (odd["waits"], odd["blocking"]) == (2, 1)
    for i, name in enumerate(names):
        assert found[name]["code"] == 0, name
        assert all(waits <= PER_MICRO_BATCH * parts for parts, waits in found[name]["steps"]), (name, found[name])
        here, there = (last_step(place / f"{side}-{i}") for side in ("here", "there"))
        close = {"rel": 0.1, "abs": 0.01} if "mixed" in name or "bf" in name else {"rel": 1e-3, "abs": 1e-4}
        assert there["loss"] == pytest.approx(here["loss"], **close), name
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], **close), name
    assert any(parts > 2 for step in found.values() for parts, _ in step["steps"])


def test_a_step_of_every_kind_mixes_no_devices_and_seldom_waits(place):
    check(COMMANDS, place)


@pytest.mark.slow
def test_everything_else_that_trains(place):
    check(MORE, place)
