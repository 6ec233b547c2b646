"""Runs from which nothing can be learned end with an error that says why, and leave what they know on disk."""

import json

import letters_env
import pytest

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts

SMALL = {"model": "tiny", "steps": 2, "prompts": 2, "sampling.max_new_tokens": 4, "quiet": True}
BAD = "def bad(completions, **kwargs):\n    return [1 / 0 for _ in completions]\n"


@pytest.fixture
def rows(tmp_path):
    """A file whose rows stand on lines 1, 3 and 5."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps({"prompt": f"{i}+1="}) for i in range(3)) + "\n")
    return path


def ends(tmp_path, job, *parts, **settings):
    """The error that ends a run, and the lines of its metrics."""
    with pytest.raises(UserError) as raised:
        job(out=str(tmp_path / "run"), **(SMALL | settings))
    assert raised.value.exit_code == 1
    for part in parts:
        assert part in str(raised.value)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not (tmp_path / "run" / "model").exists()
    assert (tmp_path / "run" / "report.html").is_file()
    return lines


def always_fails(completions, **kwargs):
    raise KeyError("gold")


def none_at_all(completions, **kwargs):
    return [None for _ in completions]


@pytest.mark.parametrize(
    ("job", "settings"),
    [("rl", {"steps": 2, "samples": 2}), ("expert_iteration", {"steps": 2, "samples": 2}), ("best_of_n", {"n": 2})],
)
def test_a_reward_that_always_fails_ends_the_run_after_its_first_step(tmp_path, rows, job, settings):
    how = {k: v for k, v in SMALL.items() if k != "steps"} | settings
    with pytest.raises(UserError) as raised:
        getattr(rolecall, job)(out=str(tmp_path / "run"), rows=str(rows), reward=always_fails, **how)
    said = str(raised.value)
    assert said.startswith(
        "no answer of step 1 could be scored: reward `always_fails` failed on prompt 0 sample 0: KeyError: 'gold'"
    )
    assert "rows.jsonl, line " in said
    assert f"the run is in {tmp_path / 'run'}" in said
    assert raised.value.exit_code == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    held = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert all("KeyError" in details.reward_failure for details in held.details)


def test_a_reward_that_never_applies_is_named_too(tmp_path, rows):
    ends(
        tmp_path, rolecall.rl, "no answer of step 1 could be scored: the reward `none_at_all` gave None", "rows.jsonl, line",
        rows=str(rows), reward=none_at_all, samples=2,
    )  # fmt: skip


class Breaks(letters_env.Letters):
    def step(self, message):
        raise RuntimeError("the game has crashed")


def test_episodes_that_all_break_off_end_the_run(tmp_path):
    ends(
        tmp_path, rolecall.rl, "no answer of step 1 could be scored: the episode was broken off", "the game has crashed",
        env=Breaks, samples=2,
    )  # fmt: skip


def same(completions, **kwargs):
    return [1.0 for _ in completions]


@pytest.mark.parametrize("drop", [False, True])
def test_scores_that_are_all_the_same_train_nothing(tmp_path, rows, drop):
    settings = {"steps": 2, "samples": 2, "algorithm.drop_flat": drop}
    lines = ends(
        tmp_path,
        rolecall.rl,
        "nothing has trained in 2 steps: ",
        "scored the same",
        rows=str(rows),
        reward=same,
        **settings,
    )
    assert [line["reward"] for line in lines] == [1.0] * 2


def test_no_answer_that_is_good_enough_trains_nothing(tmp_path, rows):
    ends(
        tmp_path, rolecall.expert_iteration, "nothing has trained in 2 steps: no answer was good enough to imitate",
        rows=str(rows), reward=same, samples=2, steps=2, threshold=2.0,
    )  # fmt: skip


def test_a_run_that_was_broken_goes_on_when_its_reward_is_repaired(tmp_path, rows):
    with pytest.raises(UserError):
        rolecall.rl(out=str(tmp_path / "run"), rows=str(rows), reward=always_fails, samples=2, **SMALL)
    run = rolecall.rl(
        out=str(tmp_path / "run"), resume=True, rows=str(rows), reward=lengths, samples=4, steps=3, quiet=True
    )
    assert run.outcome.exit_code == 0
    assert [line["step"] for line in run.metrics] == [1, 2, 3]


def lengths(completions, **kwargs):
    return [float(sum(c.encode()) % 7) for c in completions]


def test_the_command_line_says_why_and_exits_with_1_even_if_quiet(tmp_path, rows, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    words = ["rl", "--rows", str(rows), "--reward", "bad.py:bad", "--steps", "3", "--prompts", "2", "--samples", "2"]
    assert main([*words, "--sampling.max_new_tokens", "4", "--quiet", "--out", "run"]) == 1
    said = capfd.readouterr().err
    assert "rolecall rl: no answer of step 1 could be scored: reward `bad` failed on prompt 0" in said
    assert "ZeroDivisionError: division by zero" in said


@pytest.mark.parametrize("job", ["rl", "sft", "dpo", "rm", "expert_iteration", "marl"])
def test_a_learning_rate_of_0_is_refused(job):
    with pytest.raises(UserError, match=r"lr must be above 0, got 0"):
        getattr(rolecall, job)(**{"optim.lr": 0})
