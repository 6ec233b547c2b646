"""Set-ups that are as they should be: the audit looks at everything and warns of nothing."""

import pytest
from audit_rewards import compute_score, right, right_in_chat
from audit_setups import RG, chat_sums, sums, verl_sums
from pyarrow import parquet

import rolecall
from rolecall.recipes.audit import Level
from rolecall.train.progress import Quiet
from smollm2 import smollm2_path

SETTINGS = {"sampling": {"max_new_tokens": 12}, "eval": {"every": 10}}


def silent(audit, *, skipped):
    """No warning, no error, and what was skipped is what cannot apply."""
    assert [f"{f.check}: {f.summary} {f.evidence}" for f in (*audit.errors, *audit.warnings)] == []
    assert {f.check for f in audit.findings if f.level is Level.SKIPPED} == set(skipped)


def test_the_built_in_model_on_a_built_in_task(tiny_model):
    audit = rolecall.audit(model=tiny_model, rows="addition:digits=1", **SETTINGS)
    silent(audit, skipped=["history"])
    assert audit["groups"].level is Level.OK
    assert audit["gold"].level is Level.OK


def test_own_rows_and_an_own_reward(tiny_model):
    silent(rolecall.audit(model=tiny_model, rows=sums(), reward=right, **SETTINGS), skipped=["history"])


def test_a_chat_model_whose_pad_is_its_stop(chat_model):
    audit = rolecall.audit(model=chat_model, rows=chat_sums(), reward=right_in_chat, **SETTINGS)
    silent(audit, skipped=["seam"])
    assert "the same token" in audit["padding"].summary


def test_a_reasoning_gym_task(tiny_model):
    silent(rolecall.audit(model=tiny_model, rows=RG, **SETTINGS), skipped=["history"])


def test_verl_rows_and_a_verl_reward(chat_model):
    silent(rolecall.audit(model=chat_model, rows=verl_sums(), reward=compute_score, **SETTINGS), skipped=["seam"])


def test_demonstrations(chat_model):
    rows = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}, *more]}
        for row in chat_sums()
        for more in [[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]]
    ]
    audit = rolecall.audit(job="sft", model=chat_model, rows=rows)
    silent(audit, skipped=[])
    roles = audit.samples[0].roles
    assert roles.count("STOP") == 2
    assert {"PROMPT", "CONTENT"} < set(roles)


@pytest.mark.slow
def test_a_real_chat_model():
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}? Answer with a number only."}],
            "answer": str(a + b),
        }
        for a in range(6)
        for b in range(6)
    ]
    audit = rolecall.audit(
        model=str(smollm2_path()), rows=rows, reward="number", groups=4, samples=4, sampling={"max_new_tokens": 48}
    )
    silent(audit, skipped=["seam", "held-out"])


def test_what_is_shown_is_what_the_first_step_draws(tiny_model, tmp_path):
    settings = {"model": tiny_model, "rows": "addition:digits=1", "prompts": 4, "samples": 2, "seed": 5}
    settings["sampling"] = {"max_new_tokens": 8}
    shown = rolecall.audit(**settings, groups=3, show=6).samples
    run = rolecall.rl(
        **settings, algorithm={"entropy_coef": 0.01}, steps=1, out=str(tmp_path / "run"), progress=Quiet()
    )
    (file,) = (run.path / "rollouts").glob("*.parquet")
    drawn = {tuple(ids) for ids in parquet.read_table(file)["ids"].to_pylist()}
    assert len(shown) == 6
    assert {sample.ids for sample in shown} <= drawn
