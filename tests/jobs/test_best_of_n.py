"""Best-of-n runs: the answers they leave, the curve, resuming, and what they refuse."""

import json
import os
import signal
from pathlib import Path

import pytest

import rolecall
from rolecall.errors import UserError
from rolecall.maths.best_of import expected_best
from rolecall.train.progress import Quiet

SMALL = {"model": "tiny", "n": 3, "count": 5, "prompts": 2, "sampling": {"max_new_tokens": 4}, "progress": Quiet()}
ROWS = [{"prompt": f"{word}:", "number": i} for i, word in enumerate(("go", "on", "up", "at", "in", "to"))]


def evenness(completion_ids, **kwargs):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def shortness(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def read(run):
    lines = [json.loads(line) for line in (run.path / "answers.jsonl").read_text().splitlines()]
    return lines, json.loads((run.path / "best_of_n.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("bon") / "run"
    return rolecall.best_of_n(rows=ROWS, reward=evenness, judge=shortness, out=str(place), **SMALL)


def test_every_row_gets_its_best_answer(finished):
    lines, _ = read(finished)
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines:
        assert line["score"] == max(line["scores"])
        assert line["completion"] is not None
        assert line["judge"] <= -1


def test_the_curve_is_the_mean_over_prompts_of_the_unbiased_estimate(finished):
    import torch

    lines, found = read(finished)
    assert (found["prompts"], found["n"], found["unscored"]) == (5, 3, 0)
    assert [row["k"] for row in found["best_of"]] == [1, 2, 3]
    for row in found["best_of"]:
        each = [float(expected_best(torch.tensor(line["scores"], dtype=torch.float64), k=row["k"])) for line in lines]
        assert row["mean"] == pytest.approx(sum(each) / 5)
    assert found["judge_of_best"][2]["mean"] == pytest.approx(sum(line["judge"] for line in lines) / 5)


def test_its_answers_are_demonstrations(finished, tmp_path):
    run = rolecall.sft(
        model="tiny", rows=str(finished.path / "answers.jsonl"), steps=1, out=str(tmp_path / "sft"), progress=Quiet()
    )
    assert run.outcome.step == 1


def test_every_number_is_documented(finished):
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = page.split("\n## Best of n")[1].split("\n## ")[0]
    names = {name.replace("best_of/", "best_of/{k} ").split(" ")[0] for line in finished.metrics for name in line}
    names = {name.replace("/evenness/", "/{name}/") for name in names - {"step"}}
    assert all(f"`{name}`" in section for name in names), names


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(finished, tmp_path, monkeypatch):
    from rolecall.recipes import best_of_n

    place = tmp_path / "run"
    update = best_of_n.BestOfN.update

    def stopping(self, experience):
        update(self, experience)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(best_of_n.BestOfN, "update", stopping)
    how = {"rows": ROWS, "reward": evenness, "judge": shortness, "out": str(place)}
    stopped = rolecall.best_of_n(**how, **SMALL)
    assert stopped.outcome.exit_code == 143
    assert not (place / "answers.jsonl").exists()
    monkeypatch.setattr(best_of_n.BestOfN, "update", update)
    done = rolecall.best_of_n(**how, resume=True, progress=Quiet())
    assert done.outcome.exit_code == 0
    for name in ("answers.jsonl", "best_of_n.json", "metrics.jsonl"):
        assert (place / name).read_bytes() == (Path(finished.path) / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": {"temperature": 0}}, "the same answer n times"),
        ({"n": 0}, "at least 1"),
        ({"rows": ROWS, "split": "test"}, "split is for tasks"),
        ({"rows": ROWS, "reward": "task"}, "these rows are of none"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        rolecall.best_of_n(**{**SMALL, "out": str(tmp_path / "run"), "reward": "exact", **settings})
    assert not (tmp_path / "run").exists()
