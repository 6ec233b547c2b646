"""The three trackers with their real packages, in a process of their own and without a network."""

import os
import sqlite3
import subprocess
import sys

import pytest

NAMES = ("tensorboard", "trackio", "wandb")


RUN = """
import sys
from rolecall.cli import main
for out in (["--out", "runs/named"], []):
    if code := main([*sys.argv[1:], *out]):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where two runs were made, one with a name and one without."""
    place = tmp_path_factory.mktemp("tracked")
    words = ["sft", "--rows", "sorting:length=2", "--steps", "2", "--batch", "4", "--save.every", "0", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words, "--save.trackers", ",".join(NAMES)],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "TRACKIO_DIR": str(place / "trackio")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.mark.parametrize("name", ["named", "sft-1"])
def test_every_tracker_gets_the_numbers(place, name):
    run = place / "runs" / name
    assert (run / "model").is_dir()
    events = list((run / "trackers" / name).glob("events.out.tfevents.*"))
    assert events
    assert any(b"grad_norm" in path.read_bytes() for path in events)
    with sqlite3.connect(place / "trackio" / f"{name}.db") as database:
        logged = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    assert [step for step, _ in logged] == [1, 2]
    assert all("grad_norm" in str(numbers) for _, numbers in logged)
    offline = list((place / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2
    assert all(b"grad_norm" in path.read_bytes() for path in offline)
    assert not (place / "trackers").exists()
    assert not (place / "runs" / "trackers").exists()


def test_a_tracker_that_cannot_start_leaves_a_place_where_the_run_can_be_tried_again(tmp_path, monkeypatch):
    from accelerate import Accelerator

    import rolecall
    from rolecall.errors import UserError

    def refused(self, name, config=None, init_kwargs=None):
        (tmp_path / "run" / "trackers").mkdir()
        (tmp_path / "run" / "trackers" / "half").touch()
        raise RuntimeError("not logged in")

    how = {"rows": "sorting:length=2", "steps": 1, "batch": 2, "quiet": True, "out": str(tmp_path / "run")}
    monkeypatch.setattr(Accelerator, "init_trackers", refused)
    with pytest.raises(UserError, match=r"wandb cannot start: not logged in; or leave out save\.trackers"):
        rolecall.sft(**how, **{"save.trackers": ("wandb",)})
    assert rolecall.sft(**how).outcome.exit_code == 0
