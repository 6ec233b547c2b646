"""Runs with LoRA dropout: which ones there are, and that they are exact."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

import rolecall
from rolecall.errors import UserError
from rolecall.policy import dropout, lora
from rolecall.policy.load import load
from rolecall.train.step import Updater

TASK = "sorting:length=2"
LORA = {"lora_rank": 2, "lora_dropout": 0.5}
SFT = {"rows": TASK, "steps": 3, "batch": 4, "optim.lr": 0.05, "optim.warmup_steps": 0, "optim.token_budget": 40}
ASK = {"rows": TASK, "steps": 3, "prompts": 2, "samples": 2, "sampling": {"max_new_tokens": 2}, "optim.lr": 0.05}
RL = {**ASK, "algorithm.entropy_coef": 0.01}  # trains although an untrained model's answers all score 0
JOBS = {
    "sft": (rolecall.sft, {**SFT, "eval.every": 1, "eval.rows": 2}),
    "dpo": (rolecall.dpo, {**SFT, "eval.every": 1, "eval.rows": 2, "optim.token_budget": 80}),
    "expert_iteration": (rolecall.expert_iteration, {**ASK, "keep": "best", "epochs": 2, "batch": 1}),
    "rl": (rolecall.rl, {**RL, "optim.token_budget": 16, "eval.every": 1, "eval.rows": 2}),
}


def run(name, out, *, policy=LORA, **more):
    job, how = JOBS[name]
    return job(policy=policy, out=out, quiet=True, save={"every": 1, "keep": 9}, **how, **more)


def written(place):
    return {name: (place / name).read_bytes() for name in ("model/model.safetensors", "metrics.jsonl")}


@pytest.mark.parametrize("name", ["rl", *(pytest.param(n, marks=pytest.mark.slow) for n in JOBS if n != "rl")])
def test_same_bytes_every_time_and_when_resumed(name, tmp_path):
    torch.manual_seed(1)
    run(name, tmp_path / "whole")
    torch.manual_seed(2)
    job, how = JOBS[name]
    for steps, resume in ((1, False), (3, True)):
        changed = {**how, "steps": steps} if not resume else {**how, "steps": 1, "extend": 2}
        job(policy=LORA, out=tmp_path / "halves", quiet=True, save={"every": 1, "keep": 9}, resume=resume, **changed)
    assert written(tmp_path / "halves") == written(tmp_path / "whole")
    run(name, tmp_path / "without", policy={"lora_rank": 2})
    assert written(tmp_path / "without") != written(tmp_path / "whole")


def test_a_run_that_was_killed_ends_in_the_same_bytes(tmp_path):
    program = (
        "import os, rolecall\n"
        "class Kill(rolecall.Callback):\n"
        "    def on_step(self, state, metrics):\n"
        "        os.kill(os.getpid(), 9) if state.step == 2 else None\n"
        f"rolecall.sft(policy={LORA!r}, out={str(tmp_path / 'run')!r}, quiet=True, callbacks=[Kill()], "
        f"save={{'every': 1, 'keep': 9}}, **{JOBS['sft'][1]!r})\n"
    )
    same = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run([sys.executable, "-c", program], env=same, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    run("sft", tmp_path / "run", resume=True)
    run("sft", tmp_path / "whole")
    assert written(tmp_path / "run") == written(tmp_path / "whole")


@pytest.mark.parametrize("name", JOBS)
def test_only_the_passes_of_an_update_drop(name, tmp_path, monkeypatch):
    inside, passes, places = [0], [], set()
    descend, forward = Updater.descend, dropout.KeyedDropout.forward

    def update(self, *args, **kwargs):
        inside[0] += 1
        try:
            return descend(self, *args, **kwargs)
        finally:
            inside[0] -= 1

    def watched(self, x):
        passes.append((bool(inside[0]), self.place is not None))
        places.add(self.place)
        return forward(self, x)

    monkeypatch.setattr(Updater, "descend", update)
    monkeypatch.setattr(dropout.KeyedDropout, "forward", watched)
    run(name, tmp_path / "run")
    assert set(passes) == {(True, True), (False, False)}
    steps, minis, micros, ranks = (set(part) for part in zip(*(p for p in places if p), strict=True))
    assert len(steps) == 3
    assert ranks == {0}
    assert len(micros) > 1 or name == "expert_iteration"
    assert len(minis) == (1 if name != "expert_iteration" else 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"algorithm.minibatches": 2}, r"old log-probs from recompute.*must agree.*set algorithm\.old_logprobs detach"),
        ({"algorithm.old_logprobs": "behaviour"}, r"old log-probs from behaviour.*set algorithm\.old_logprobs detach"),
        ({"algorithm.kl_coef": 0.1}, r"the KL in the loss.*set algorithm\.kl_in reward"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"}, r"from recompute.*algorithm\.old_logprobs detach"),
        ({"replay.share": 0.5}, "stored answers.*leave out --from"),
        ({"from_run": "runs/x"}, "stored answers.*leave out --from"),
        (
            {"algorithm.name": "ppo", "algorithm.critic": "shared", "algorithm.old_logprobs": "detach"},
            r"critic on the policy's trunk.*set algorithm\.critic separate",
        ),
    ],
)
def test_what_compares_log_probs_is_refused(settings, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        rolecall.rl(policy=LORA, out=tmp_path / "run", quiet=True, **RL, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward", "algorithm.old_logprobs": "detach"},
        {"algorithm.name": "ppo", "algorithm.critic": "separate", "algorithm.old_logprobs": "detach"},
        {"policy.mixed_precision": "bf16", "algorithm.old_logprobs": "detach"},
        {"policy.gradient_checkpointing": True},
        {"policy.quantize": "int8"},
    ],
)
def test_what_else_goes_with_it(settings, tmp_path):
    policy = LORA | {key.removeprefix("policy."): x for key, x in settings.items() if key.startswith("policy.")}
    rest = {key: x for key, x in settings.items() if not key.startswith("policy.")}
    rolecall.rl(policy=policy, out=tmp_path / "run", quiet=True, **RL, **rest)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["policy/ratio_max"] == 1
        assert not any(name.startswith("sampling/") for name in metrics), "a pass that drops says nothing of the engine"


def test_trl_and_adapters_made_elsewhere(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5)
    made = rolecall.rl(peft_config=config, out=tmp_path / "run", quiet=True, **RL)
    assert json.loads((made.path / "config.json").read_text())["policy"]["lora_dropout"] == 0.5
    adapted = lora.add_adapter(load("tiny"), rank=2, alpha=4, dropout=0.5)
    lora.save_adapter(adapted, tmp_path / "adapter")
    how = {**SFT, "steps": 1}
    with caplog.at_level(logging.INFO, logger="rolecall"):
        for rate in (0.0, 0.5):
            policy = {"lora_rank": 2, "lora_dropout": rate}
            rolecall.sft(model=str(tmp_path / "adapter"), policy=policy, out=tmp_path / str(rate), quiet=True, **how)
    assert caplog.text.count("was made with dropout 0.5 and trains on with policy.lora_dropout, which is 0\n") == 1
    assert caplog.text.count("was made with dropout") == 1
    assert written(tmp_path / "0.0") != written(tmp_path / "0.5")
