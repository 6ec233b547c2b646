"""The whole pipeline on a real language model: SFT, reward model, PPO against it, GRPO, through the same step."""

import pytest
from transformers import AutoModelForCausalLM

import rolecall
from rolecall.train.exit_codes import ExitCode
from rolecall.train.progress import Quiet
from smollm2 import smollm2_path

ROWS = [
    {"prompt": [{"role": "user", "content": f"Say the number {n}."}], "answer": str(n), "completion": f"{n}"}
    for n in range(8)
]
PAIRS = [
    {
        "prompt": row["prompt"],
        "chosen": [{"role": "assistant", "content": row["answer"]}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for row in ROWS
]


def says_it(completions, answer, **_):
    return [float(right in completion[0]["content"]) for completion, right in zip(completions, answer, strict=True)]


@pytest.mark.slow
def test_sft_reward_model_ppo_and_grpo_on_smollm2(tmp_path):
    model = str(smollm2_path())
    common = {"progress": Quiet(), "save": {"every": 0}, "optim": {"lr": 1e-5}, "steps": 2}
    demos = [{"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]} for row in ROWS]
    sft = rolecall.sft(model=model, rows=demos, batch=4, out=str(tmp_path / "sft"), **common)
    judge = rolecall.rm(model=str(sft.path), rows=PAIRS, batch=2, out=str(tmp_path / "rm"), **common)
    rollout = {"rows": ROWS, "prompts": 2, "sampling": {"max_new_tokens": 8}}
    ppo = rolecall.rl(
        preset="ppo", model=str(sft.path), reward=str(judge.path), out=str(tmp_path / "ppo"), **rollout, **common
    )
    grpo = rolecall.rl(
        preset="grpo",
        model=str(sft.path),
        reward=says_it,
        samples=2,
        algorithm={"kl_coef": 0.01},
        out=str(tmp_path / "grpo"),
        **rollout,
        **common,
    )
    for run in (sft, judge, ppo, grpo):
        assert run.outcome.exit_code is ExitCode.DONE
        assert run.metrics[-1]["grad_norm"] > 0
    assert grpo.metrics[0]["engine_in_sync"] == ppo.metrics[0]["engine_in_sync"] == 1
    assert grpo.metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    AutoModelForCausalLM.from_pretrained(grpo.model)
