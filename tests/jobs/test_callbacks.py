"""Callbacks through the Python functions."""

import hashlib

import pytest

import rolecall
from rolecall.errors import UserError

RL = {"rows": "sorting:length=2", "steps": 3, "prompts": 4, "samples": 4, "sampling.max_new_tokens": 4, "quiet": True}


def letters(completions, **kwargs):
    return [float(sum(c.encode()) % 7) for c in completions]


def contents(path):
    """The bytes of all that a run promises to repeat."""
    held = sorted(
        p for p in path.rglob("*") if p.is_file() and p.name not in ("timing.jsonl", "report.html", "run.json")
    )
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in held}


def test_a_run_with_a_callback_that_does_nothing_writes_the_same_bytes(tmp_path):
    for name, callbacks in (("without", []), ("with", [rolecall.Callback(), lambda control, metrics: None])):
        rolecall.rl(reward=letters, out=str(tmp_path / name), callbacks=callbacks, **RL)
    without, with_one = contents(tmp_path / "without"), contents(tmp_path / "with")
    assert {"metrics.jsonl", "model/model.safetensors", "rollouts/step-000003.parquet"} <= set(without)
    assert with_one == without


class Watching(rolecall.Callback):
    def __init__(self):
        self.heard = []

    def on_begin(self, control):
        self.heard.append("begin")

    def on_step(self, control, metrics):
        self.heard.append(f"step {control.step}")
        control.log({"mine": 10 * control.step})
        return "stop" if control.step == 2 else None

    def on_save(self, control, path):
        self.heard.append(f"save {path.name}")

    def on_end(self, control, outcome):
        self.heard.append(f"end {(control.path / 'model').is_dir()} {outcome.reason}")


SFT = {"rows": "sorting:length=2", "batch": 4}
JOBS = [
    ("sft", SFT),
    ("rm", SFT),
    ("dpo", SFT),
    ("rl", {k: v for k, v in RL.items() if k != "steps"} | {"reward": letters}),
    ("marl", {"env": "climbing", "algo": "vdn", "episodes": 4}),
]


@pytest.mark.parametrize(("job", "settings"), JOBS, ids=[name for name, _ in JOBS])
def test_every_job_calls_back_logs_and_can_be_stopped(tmp_path, job, settings):
    watching = Watching()
    how = {"steps": 9, "quiet": True, **settings}
    run = getattr(rolecall, job)(out=str(tmp_path / "run"), callbacks=[watching], **how)
    reason = "stopped at step 2 by the callback `Watching`"
    assert (run.outcome.exit_code, run.outcome.step, run.outcome.reason) == (0, 2, reason)
    assert watching.heard == ["begin", "step 1", "step 2", "save step-000002", f"end True {reason}"]
    steps = [line for line in run.metrics if "loss" in line]
    assert [line["callback/mine"] for line in steps] == [10.0, 20.0]


def test_a_callback_that_fails_at_the_end_is_an_error_of_a_run_that_is_whole(tmp_path):
    class Uploads:
        def on_end(self, control, outcome):
            raise OSError("no connection")

    with pytest.raises(UserError, match="the callback `Uploads` failed in on_end at step 1: OSError: no connection"):
        rolecall.sft(out=str(tmp_path / "run"), callbacks=[Uploads()], steps=1, quiet=True, **SFT)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_what_cannot_be_called_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match=r"give Watching\(\)"):
        rolecall.sft(out=str(tmp_path / "run"), callbacks=[Watching], steps=1, **SFT)
    assert not (tmp_path / "run").exists()
