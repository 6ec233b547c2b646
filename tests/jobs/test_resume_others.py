"""DPO and expert iteration: a run that is stopped and resumed is, byte for byte, the run that was not."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from resume_driver import differing

import rolecall
from rolecall.errors import UserError
from rolecall.recipes.dpo import DPOLearner
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.train.progress import Quiet

PAIRS = [{"prompt": f"{w}:", "chosen": w[::-1], "rejected": w * 2} for w in ("go", "on", "up", "at", "in")]
ROWS = [{"prompt": f"{word}:"} for word in ("go", "on", "up", "at", "in")]


def evenness(completion_ids, **kwargs):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


KINDS = {
    "dpo": (
        rolecall.dpo,
        DPOLearner,
        {"rows": PAIRS, "batch": 2, "steps": 4, "optim": {"lr": 1e-3}, "save": {"every": 1}},
    ),
    "expert-iteration": (
        rolecall.expert_iteration,
        ExpertIterationLearner,
        {
            "rows": ROWS,
            "reward": evenness,
            "threshold": 0.4,
            "prompts": 3,
            "batch": 4,
            "steps": 4,
            "sampling": {"max_new_tokens": 6},
            "optim": {"lr": 1e-3},
        },
    ),
}


def stopped_at(step, learner_class, monkeypatch):
    """Make SIGTERM arrive in the given step's update."""
    update = learner_class.update
    done = 0

    def counted(self, experience):
        nonlocal done
        done += 1
        update(self, experience)
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(learner_class, "update", counted)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed(kind, tmp_path, monkeypatch):
    job, learner, settings = KINDS[kind]
    whole = job(out=str(tmp_path / "whole"), progress=Quiet(), **settings)
    assert whole.outcome.exit_code == 0
    with monkeypatch.context() as patched:
        stopped_at(2, learner, patched)
        with pytest.raises(SystemExit, match="143"):
            job(out=str(tmp_path / "broken"), progress=Quiet(), **settings)
    given = {name: settings[name] for name in ("rows", "reward") if name in settings}
    resumed = job(out=str(tmp_path / "broken"), resume=True, progress=Quiet(), **given)
    assert resumed.outcome.exit_code == 0
    assert differing(tmp_path / "whole", tmp_path / "broken") == []
    assert json.loads((tmp_path / "broken" / "run.json").read_text())["resumed"][0]["bit_exact"]
    again = job(out=str(tmp_path / "again"), progress=Quiet(), **(settings | {"seed": 1}))
    assert any("model.safetensors" in name for name in differing(tmp_path / "whole", Path(again.path)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_came_from_python_are_asked_for_again(kind, tmp_path):
    job, _, settings = KINDS[kind]
    place = tmp_path / "run"
    job(out=str(place), progress=Quiet(), **(settings | {"steps": 1}))
    with pytest.raises(UserError, match="came from Python"):
        job(out=str(place), resume=True, progress=Quiet())
    shutil.rmtree(place)
