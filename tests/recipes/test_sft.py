"""Supervised fine-tuning raises the log-probs of demonstrated answers, and of nothing else."""

import pytest
import torch
from accelerate import Accelerator

import rolecall
from rolecall.config.merge import resolve
from rolecall.config.parts import ChatOptions
from rolecall.config.training import SFTOptions
from rolecall.jobs.data import demonstrated
from rolecall.maths.roles import Role, Verdict
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.policy.tiny import TURN_END_ID
from rolecall.recipes.rendering import rendered_rows
from rolecall.recipes.sft import SFTLearner
from rolecall.tasks.rows import RowError
from rolecall.train.optim import make_optimizer
from rolecall.train.step import Updater, trained

PAIRS = [{"prompt": f"say {word}:", "completion": word} for word in ("one", "two", "three", "four", "five")]


def learner(rows=PAIRS, **settings):
    options = resolve(
        SFTOptions, [("test", {"batch": 4, "optim.lr": 1e-3, "optim.warmup_steps": 0, **settings})]
    ).options
    policy = load("tiny")
    found, too_long = rendered_rows(demonstrated(rows, seed=0), policy, ChatOptions(), max_length=options.max_length)
    module = PolicyModel(policy.model)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, options.optim))
    updater = Updater(accelerator, wrapped, optimizer, token_budget=options.optim.token_budget, max_grad_norm=None)
    return SFTLearner(options, updater=updater, demonstrations=found), too_long


def test_only_the_completion_and_its_stop_train():
    sft, _ = learner(PAIRS[:1], batch=1)
    batch = sft.collect(0)
    words = [Verdict(v).name for v in batch.verdicts[0].tolist()]
    assert words == ["GIVEN"] * len("say one:") + ["TRAINED"] * 4
    assert batch.ids[0, -1] == TURN_END_ID
    assert batch.roles[0, -1] == Role.STOP
    sft, _ = learner(PAIRS[:1], batch=1, train_stop=False)
    assert sft.collect(0).verdicts[0, -1] == Verdict.STOP_UNTRAINED


def test_conversations_train_what_the_assistant_said():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"},
    ]
    sft, _ = learner([{"messages": messages}], batch=1)
    batch = sft.collect(0)
    kept = batch.ids[0][trained(batch)[0]].tolist()
    assert kept == [*b"yo", TURN_END_ID, *b"no", TURN_END_ID]


def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_batch():
    sft, _ = learner(batch=5)
    batch = sft.collect(0)
    with torch.no_grad():
        logprobs = sft.updater.module.model(input_ids=batch.ids).logits.log_softmax(-1)[:, :-1]
    chosen = torch.nn.functional.pad(logprobs.gather(-1, batch.ids[:, 1:, None])[..., 0], (1, 0))
    sft.update(batch)
    assert sft.metrics()["loss"] == pytest.approx(-chosen[trained(batch)].mean().item(), rel=1e-5)
    assert sft.metrics()["num_tokens"] == trained(batch).sum()


def test_the_loss_falls_to_almost_nothing_on_five_rows():
    sft, _ = learner(batch=5, steps=60)
    losses = []
    for step in range(60):
        sft.update(sft.collect(step))
        losses.append(sft.metrics()["loss"])
    assert losses[0] > 5
    assert losses[-1] < 0.7


def test_every_row_is_seen_once_per_pass_and_the_order_comes_back():
    sft, _ = learner(batch=2)
    first = [sft.order.take(2) for _ in range(5)]
    flat = [i for rows in first for i in rows]
    assert sorted(flat[:5]) == sorted(flat[5:]) == [0, 1, 2, 3, 4]
    assert flat[:5] != flat[5:]
    other, _ = learner(batch=2)
    other.load_state_dict({"order": {"rows": 5, "seed": 0, "taken": 4}})
    assert other.order.take(2) == first[2]


def test_the_learning_rate_warms_up_and_falls():
    sft, _ = learner(batch=2, steps=6, **{"optim.warmup_steps": 2, "optim.schedule": "linear"})
    rates = []
    for step in range(6):
        sft.update(sft.collect(step))
        rates.append(sft.metrics()["learning_rate"])
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_a_text_trains_but_for_its_first_character():
    sft, _ = learner([{"text": "abc"}])
    (only,) = sft.rows
    assert [Role(role).name for role in only.roles] == ["PROMPT", "CONTENT", "CONTENT", "STOP"]


def test_rows_that_are_too_long_are_left_out_and_counted():
    sft, too_long = learner([*PAIRS, {"prompt": "x" * 50, "completion": "y"}], max_length=20)
    assert too_long == 1
    assert len(sft.rows) == 5
    with pytest.raises(RowError, match="longer than max_length 3"):
        learner(max_length=3)


def test_a_run_from_python_repeats_itself_and_an_empty_list_is_not_the_default_task(tmp_path):
    runs = [
        rolecall.sft(rows=PAIRS, steps=3, batch=2, out=str(tmp_path / name), quiet=True, **{"optim.lr": 1e-3})
        for name in ("one", "two")
    ]
    assert runs[0].metrics == runs[1].metrics
    assert len(runs[0].metrics) == 3
    weights = [(run.model / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match=r"row|columns|empty"):
        rolecall.sft(rows=[], steps=1, out=str(tmp_path / "empty"), quiet=True)
