"""Held-out answers scored by another reward than the one that trains."""

import pytest

import rolecall
from rolecall.errors import UserError
from rolecall.train.progress import Quiet

SMALL = {"model": "tiny", "steps": 1, "prompts": 2, "samples": 2, "sampling": {"max_new_tokens": 4}}


def minus_letters(completions, **kwargs):
    return [-1 - float(sum(c.encode()) % 7) for c in completions]


def test_a_run_logs_both(tmp_path):
    run = rolecall.rl(
        rows="sorting:length=2",
        reward=minus_letters,
        eval={"every": 1, "rows": 4, "reward": ("task",)},
        out=str(tmp_path / "run"),
        progress=Quiet(),
        **SMALL,
    )
    last = run.evaluations[-1]
    assert last["eval_reward"] == last["eval_accuracy"] == 0.0
    assert last["eval_train_reward"] < 0
    assert run.metrics[1]["rewards/minus_letters/mean"] < 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": "sorting", "eval": {"reward": ("task",)}}, "give eval.every too"),
        (
            {"rows": [{"prompt": f"{i}"} for i in range(200)], "eval": {"every": 1, "reward": ("task",)}},
            "these rows are of none",
        ),
        ({"rows": "sorting", "eval": {"every": 1, "reward": ("exakt",)}}, "did you mean 'exact'"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        rolecall.rl(reward=minus_letters, out=str(tmp_path / "run"), progress=Quiet(), **SMALL, **settings)
    assert not (tmp_path / "run").exists()
