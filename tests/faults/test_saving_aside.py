"""A checkpoint is completed while the next steps go on: never two at once, never lost at the end, the bytes of its own step."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from test_loop import Counting, looped

from rolecall.train import manifest
from rolecall.train.checkpoint import latest


@pytest.fixture
def slow(monkeypatch):
    """Completing takes a while; when each began and ended, and by which thread."""
    real, moments = manifest.seal, []

    def seal(directory, step, config):
        moments.append(("begin", step, time.monotonic(), threading.current_thread()))
        time.sleep(0.3)
        real(directory, step, config)
        moments.append(("end", step, time.monotonic(), threading.current_thread()))

    monkeypatch.setattr(manifest, "seal", seal)
    return moments


def test_the_step_goes_on_while_a_checkpoint_is_written(tmp_path, slow):
    stepped = {}
    learner = Counting(on_step=lambda step: stepped.setdefault(step, time.monotonic()))
    outcome, _, _, saved = looped(tmp_path, learner, steps=4, save_every=2)
    ended = {step: when for what, step, when, _ in slow if what == "end"}
    assert stepped[3] < ended[2], "step 3 was done before the checkpoint of step 2 was complete"
    assert slow[0][3] is not threading.main_thread()
    assert (outcome.exit_code, saved) == (0, ["step-000002", "step-000004"])


def test_a_save_waits_for_the_one_before_it(tmp_path, slow):
    looped(tmp_path, steps=4, save_every=1)
    assert [(what, step) for what, step, *_ in slow] == [(w, s) for s in range(1, 5) for w in ("begin", "end")]


def test_the_end_waits_for_the_save(tmp_path, slow):
    outcome, _, _, saved = looped(tmp_path, steps=2, save_every=2)
    assert saved == ["step-000002"]
    assert outcome.exit_code == 0
    assert latest(tmp_path / "run" / "checkpoints", strict=True).step == 2


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, slow):
    child = os.fork()
    if child == 0:

        def on_step(step):
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)  # the checkpoint of step 4 is being completed

        looped(tmp_path, Counting(on_step=on_step), steps=6, save_every=2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name.partition("-00")[0] for path in checkpoints.iterdir() if ".tmp-" in path.name] == ["step"]
    assert latest(checkpoints, strict=True).step == 2


def test_what_is_saved_is_the_state_of_its_step(tmp_path, slow):
    """Though the learner has moved on when the checkpoint is complete."""
    looped(tmp_path, steps=6, save_every=2, keep=3)
    for step in (2, 4, 6):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "state.json"
        extra, learner = json.loads(path.read_text())
        assert (extra["step"], learner) == (step, {"done": step})


def test_a_disk_that_is_full_only_when_a_checkpoint_is_completed_is_said_at_the_next(tmp_path, monkeypatch):
    real, tries = manifest.seal, []

    def seal(directory, step, config):
        tries.append(step)
        if step in (1, 2):
            raise OSError(28, "No space left on device", str(directory))
        real(directory, step, config)

    monkeypatch.setattr(manifest, "seal", seal)
    outcome, said, _, saved = looped(tmp_path, steps=4, save_every=1)
    assert [text.partition(" was")[0] for text in said if "was not written" in text] == [
        "checkpoint of step 1",
        "checkpoint of step 2",
    ]
    assert (outcome.exit_code, saved) == (0, ["step-000003", "step-000004"])
