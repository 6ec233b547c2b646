"""In float64, and in fp32 to its rounding, several processes train what one does: gradients, weights, tokens and metrics of 6 steps."""

import json
import logging
from functools import partial

import pytest
import torch
from forked_ranks import nothing, processes
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rolecall.experience.store import read_rollouts

REWARD = """
def letters(completions, **columns):
    return [len(set(text)) / 6 + text.count("1") for text in completions]
"""
SHORT = ["--rows", "sorting:length=2", "--prompts", "4", "--samples", "4", "--steps", "6", "--quiet"]
SHORT += ["--reward", "rewards.py:letters", "--sampling.max_new_tokens", "6", "--optim.lr", "3e-4"]
SHORT += ["--engine.dtype", "float32", "--algorithm.kl_coef", "0.05"]
CASES = {
    "ppo": ["rl", "--preset", "ppo", *SHORT, "--algorithm.critic", "separate", "--algorithm.minibatches", "2"],
    "grpo": ["rl", "--preset", "grpo", *SHORT],
    "sft": ["sft", "--rows", "addition", "--steps", "6", "--batch", "6", "--quiet"],
}
WAYS = [(2, "ddp"), (2, "fsdp2")]
MORE = [(4, "ddp"), (4, "fsdp2")]


def in_float64():
    """Weights, critic and reference are float64, which is no option of ours: only the sampler stays in fp32."""
    from rolecall.policy.heads import ScalarHead
    from rolecall.policy.pretrained import DTYPES

    made = ScalarHead.__init__

    def init(self, *given, **named):
        made(self, *given, **named)
        self.double()

    DTYPES["float32"], ScalarHead.__init__ = torch.float64, init


def recording(run, before):
    """Then, in every optimiser step, the gradient before it is clipped; the first and the last stay, on rank 0."""
    from rolecall.policy.sharded import whole
    from rolecall.train.step import Updater

    before()
    clip = Updater._clip

    def record(self):
        named = self.accelerator.unwrap_model(self.module).named_parameters()
        held = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
        if self.accelerator.is_main_process:
            save_file(held, f"{run}-{'last' if self.moves else 'first'}.safetensors")
        return clip(self)

    Updater._clip = record


def drawn(run, step):
    trajectories = read_rollouts(run / f"rollouts/step-{step:06d}.parquet").trajectories
    return {(t.group, t.episode): t.ids for t in trajectories}


def apart(one, other):
    found, weights = load_file(one), load_file(other)
    assert found.keys() == weights.keys()
    return max(float((found[name] - weights[name]).abs().max()) for name in weights)


@pytest.mark.parametrize(
    ("case", "ways", "before", "band"),
    [
        *(pytest.param(case, WAYS, in_float64, 1e-12, id=f"{case}, float64") for case in CASES),
        pytest.param("sft", [(2, "fsdp2")], nothing, 1e-5, id="sft, fp32"),  # the others are slow
        *(pytest.param(c, MORE, in_float64, 1e-12, id=f"{c}, float64, 4", marks=pytest.mark.slow) for c in CASES),
        *(pytest.param(c, WAYS + MORE, nothing, 1e-5, id=f"{c}, fp32, 2 and 4", marks=pytest.mark.slow) for c in CASES),
    ],
)
def test_six_steps_of_several_processes_are_those_of_one(tmp_path, case, ways, before, band):
    (tmp_path / "rewards.py").write_text(REWARD)
    processes(1, tmp_path, *CASES[case], "--out", "alone", before=partial(recording, "alone", before))
    alone = tmp_path / "alone"
    weights = load_file(alone / "model/model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float64 if before is in_float64 else torch.float32}
    told = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    for count, shard in ways:
        run = tmp_path / f"{shard}-{count}"
        words = [*CASES[case], "--out", run.name, "--train.shard", shard]
        processes(count, tmp_path, *words, before=partial(recording, run.name, before))
        assert AutoConfig.from_pretrained(run / "model").architectures == ["LlamaForCausalLM"]
        found = {"weights": apart(run / "model/model.safetensors", alone / "model/model.safetensors")}
        for when in ("first", "last"):
            found[f"{when} gradient"] = apart(
                *(tmp_path / f"{name}-{when}.safetensors" for name in (run.name, "alone"))
            )
        measured = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
        logging.getLogger("ranks").info(
            "%s, %d x %s: %s", case, count, shard, measured
        )  # --log-cli-level INFO shows it
        assert max(found.values()) <= band
        also = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line.keys() for line in also] == [line.keys() for line in told]
        for mine, theirs in zip(also, told, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-5)
        for step in range(1, 7) if case != "sft" else ():
            whole, part = drawn(alone, step), drawn(run, step)
            assert len(part) == len(whole) // count, "rank 0 records its share"
            assert all(whole[name] == ids for name, ids in part.items())
