"""What `rolecall view` says of runs that an error ended after their last step, and of those that then went on."""

import json

import pytest

import rolecall
import rolecall.jobs.running
from rolecall.errors import UserError
from rolecall.look.view.runs import Runs

HOW = {"model": "tiny", "rows": "sorting", "steps": 1, "batch": 2, "quiet": True}


def state(path):
    return Runs(path.parent).summary(path.name, path).state


def test_an_error_after_the_last_step_is_a_crash_until_the_run_goes_on(tmp_path, monkeypatch):
    def fails(*given, **more):
        raise OSError("no such device\nand more")

    out = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(rolecall.jobs.running, "_write_model", fails)
        with pytest.raises(OSError, match="no such device"):
            rolecall.sft(out=str(out), **HOW)
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    assert "no such device" in json.loads((out / "run.json").read_text())["ended"]
    assert state(out) == "crashed"
    rolecall.sft(out=str(out), resume=True, quiet=True)
    assert "ended" not in json.loads((out / "run.json").read_text())
    assert state(out) == "done"
    with pytest.raises(UserError):
        rolecall.sft(out=str(out), resume=True, quiet=True, model="nowhere/at-all")
    assert state(out) == "done", "what was refused before it began changes nothing"


def test_an_error_that_a_run_returns_is_noted_too(tmp_path):
    class Ends:
        def on_end(self, *given):
            raise ValueError("my own mistake")

    out = tmp_path / "run"
    with pytest.raises(UserError):
        rolecall.sft(out=str(out), callbacks=[Ends()], **HOW)
    assert "my own mistake" in json.loads((out / "run.json").read_text())["ended"]
    assert state(out) == "crashed"
