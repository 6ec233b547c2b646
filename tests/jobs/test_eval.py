"""`rolecall eval` asks what was held out, and says so when nothing was."""

import json
import logging

import pytest

import rolecall
from rolecall.errors import UserError
from rolecall.jobs.running import Run

SHORT = "def short(completions, **columns):\n    return [float(len(text) < 4) for text in completions]\n"
SETTINGS = {
    "steps": 1,
    "prompts": 2,
    "samples": 2,
    "sampling": {"max_new_tokens": 4},
    "quiet": True,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(60)))
    return str(path)


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "short.py"
    path.write_text(SHORT)
    return f"{path}:short"


@pytest.fixture(scope="module")
def with_split(data, reward, tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "split"
    return rolecall.rl(
        rows=data, reward=reward, eval={"every": 1, "held_out": 0.2, "rows": 3}, out=str(out), **SETTINGS
    )


def asked(run: Run, **settings) -> set[str]:
    found = rolecall.eval(model=str(run.path), sampling={"max_new_tokens": 2}, **settings)
    return set(found.prompts)


def test_the_rows_of_a_run_are_those_it_held_out(with_split, data):
    from rolecall.tasks.names import resolve
    from rolecall.tasks.rows import split

    _, test = split(resolve(data), held_out=0.2)
    held_out = {row["prompt"] for row in test}
    assert 3 < len(held_out) < 30
    assert asked(with_split) == held_out
    assert asked(with_split, rows=data) == held_out, "the file it learned from is cut the same way"
    assert len(asked(with_split, n=2)) == 2


def test_other_rows_are_asked_whole(with_split):
    assert asked(with_split, rows=[{"prompt": "a"}, {"prompt": "b"}]) == {"a", "b"}


def test_a_run_that_held_nothing_out_says_that_its_numbers_say_little(data, reward, tmp_path, caplog):
    run = rolecall.rl(rows=data, reward=reward, out=str(tmp_path / "all"), **SETTINGS)
    with caplog.at_level(logging.WARNING, logger="rolecall"):
        assert len(asked(run)) == 60
    assert "learned from all rows" in caplog.text


def test_a_model_that_is_no_run_needs_rows():
    with pytest.raises(UserError, match="which rows should tiny answer"):
        rolecall.eval(model="tiny", reward="exact_match")
