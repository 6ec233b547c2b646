"""Rewards given in Python: by name, several alike, and what they read of the run."""

import json
from functools import partial

import pytest

import rolecall
from rolecall.errors import UserError

SHORT = {"model": "tiny", "quiet": True, "sampling": {"max_new_tokens": 2}}
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]
SMALL = {**SHORT, "rows": ROWS, "steps": 1, "prompts": 2, "samples": 2}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fixed(completions, value, **kwargs):
    return [value + len(text) for text in completions]


def test_a_mapping_names_the_parts_in_every_job_that_takes_a_reward():
    rewards = {"fmt": partial(fixed, value=1.0), "acc": "exact"}
    run = rolecall.rl(reward=rewards, reward_weights=(1.0, 2.0), **SMALL)
    assert {"rewards/fmt/mean", "rewards/acc/mean"} <= set(run.metrics[-1])
    assert json.loads((run.path / "config.json").read_text())["reward"] == [
        "(given in Python) fmt",
        "(given in Python) acc",
    ]
    with pytest.raises(UserError, match="came from Python: resume it from Python too"):
        rolecall.rl(out=str(run.path), resume=True, extend=1, rows=ROWS)
    again = rolecall.rl(out=str(run.path), resume=True, extend=1, rows=ROWS, reward=rewards)
    assert again.outcome.step == 2

    found = rolecall.eval(model="tiny", rows=ROWS, reward=rewards, n=2, sampling={"max_new_tokens": 2})
    assert found.numbers["reward"] > 1
    chosen = rolecall.best_of_n(rows=ROWS, n=2, prompts=4, reward=rewards, judge={"other": "exact"}, **SHORT)
    assert (chosen.path / "answers.jsonl").is_file()
    imitated = rolecall.expert_iteration(
        rows=ROWS, steps=1, prompts=2, samples=2, reward=rewards, threshold=0.0, **SHORT
    )
    assert imitated.outcome.step == 1
    assert rolecall.rescore(run.path, rows=ROWS, reward=rewards).answers == 8
    assert "fmt" in str(rolecall.audit(rows=ROWS, reward=rewards, groups=2, **SHORT).findings)


def test_the_tasks_own_reward_may_be_named_too():
    run = rolecall.rl(
        **{**SMALL, "rows": "addition"}, reward={"right": "task", "long": lambda completion: len(completion)}
    )
    assert {"rewards/right/mean", "rewards/long/mean"} <= set(run.metrics[-1])


def test_two_lambdas_are_told_apart():
    run = rolecall.rl(reward=[lambda completion: len(completion), lambda completion: 1.0], **SMALL)
    assert {"rewards/lambda_1/mean", "rewards/lambda_2/mean"} <= set(run.metrics[-1])


def test_rows_may_be_a_mapping_of_columns():
    columns = {"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]}
    run = rolecall.rl(**{**SMALL, "rows": columns}, reward=["exact", lambda completion: len(completion)])
    assert json.loads((run.path / "config.json").read_text())["rows"] == "(given in Python) 2 rows"
    for wrong in ({"prompt": "1+1=", "answer": "2"}, {"prompt": ["a", "b"], "answer": ["2"]}, {}):
        with pytest.raises(UserError, match="rows given as a mapping are columns"):
            rolecall.rl(**{**SMALL, "rows": wrong}, reward="exact")


def curriculum(completions, trainer_state, log_metric, **kwargs):
    state = trainer_state
    log_metric("seen/done", state.global_step / state.max_steps)
    log_metric("seen/epoch", state.epoch)
    log_metric("seen/epochs", state.num_train_epochs)
    log_metric("seen/first", state.is_world_process_zero + state.is_local_process_zero)
    return [state.epoch + len(text) for text in completions]


def test_a_reward_follows_the_run():
    run = rolecall.rl(**{**SMALL, "steps": 4}, reward=curriculum)
    lines = [line for line in run.metrics if "seen/done" in line]
    assert [line["seen/done"] for line in lines] == [0.0, 0.25, 0.5, 0.75]
    assert [line["seen/epoch"] for line in lines] == [0.0, 0.5, 1.0, 1.5]
    assert {line["seen/epochs"] for line in lines} == {2.0}
    assert {line["seen/first"] for line in lines} == {2.0}


def steps_done(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step) + 100.0 * trainer_state.max_steps] * len(completions)


@pytest.mark.parametrize("env", [None, "guessing:high=3,tries=2"])
def test_evaluations_are_told_the_step_of_the_run(env):
    rows = {"rows": ROWS} if env is None else {"rows": None, "env": env}
    run = rolecall.rl(
        **{**SMALL, "steps": 2, **rows},
        reward={"steps": steps_done},
        algorithm={"entropy_coef": 0.01},
        eval={"every": 1, "rows": 2, "held_out": 0.5},
    )
    seen = [line["eval_reward"] for line in run.evaluations]
    assert [round(number) // 100 for number in seen] == [2, 2, 2]
    assert [round(number) % 100 for number in seen][:3] == [0, 1, 2]


def test_a_field_that_no_run_has_ends_it_with_a_sentence():
    def greedy(completions, trainer_state, **kwargs):
        return [trainer_state.total_flos for _ in completions]

    with pytest.raises(UserError, match=r"reward `greedy` asks for trainer_state\.total_flos, which is not there"):
        rolecall.rl(reward=greedy, **SMALL)
