"""A run's directory that vanishes, turns read-only or fills up while the run is under way: exit code 74 and a sentence."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rolecall.config.training import SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Built
from rolecall.jobs.running import run as run_job
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import LoopOptions


class Breaking:
    """A learner in whose second step something happens to the directory."""

    def __init__(self, happen):
        self.happen, self.done = happen, 0

    def collect(self, step):
        return step

    def update(self, step):
        self.done = step + 1
        if self.done == 2:
            self.happen()

    def metrics(self):
        return {"loss": 1.0}

    def explain(self):
        return "counted"

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def run(place: Path, happen, *, save_every=0, steps=3):
    """How the run ends: its outcome, or the error that ended it."""

    def write(directory: Path, extra):
        (directory / "state.json").write_text(json.dumps(extra))

    def build(job):
        return Built(
            learner=Breaking(happen),
            loop=LoopOptions(steps=steps, save_every=save_every, keep=2, eval_every=0, main="loss"),
            write=write,
            read=lambda directory: json.loads((directory / "state.json").read_text()),
            save_model=lambda directory: (directory.mkdir(), (directory / "weights").write_bytes(b"x" * 100_000)),
        )

    try:
        return run_job(SFTOptions(rows="none", out=str(place), quiet=True), build=build).outcome
    except UserError as error:
        return error


def mounted(*arguments: object) -> None:
    if os.geteuid() or subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode:
        pytest.skip("mounting needs root")


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, of a quarter of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted("-t", "tmpfs", "-o", "size=256k", "tmpfs", place)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("save_every", [0, 1])
@pytest.mark.parametrize("left", ["nothing", "a file", "an empty directory"])
def test_a_directory_that_vanishes(tmp_path, left, save_every):
    place = tmp_path / "run"

    def vanish():
        shutil.rmtree(place)
        if left == "a file":
            place.write_text("x")
        elif left == "an empty directory":
            place.mkdir()

    ended = run(place, vanish, save_every=save_every)
    assert ended.exit_code == ExitCode.DISK, ended
    assert "\n" not in str(ended)


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_directory_that_turns_read_only(tmp_path, save_every):
    place = tmp_path / "run"

    def turn():
        mounted("--bind", place, place)
        mounted("-o", "remount,bind,ro", place)

    try:
        ended = run(place, turn, save_every=save_every)
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)
    assert ended.exit_code == ExitCode.DISK, ended
    assert "Read-only file system" in str(ended)


def test_a_disk_without_room_for_the_model(disk):
    ended = run(disk / "run", lambda: (disk / "big").write_bytes(b"x" * 180_000))
    assert ended.exit_code == ExitCode.DISK, ended
    assert "No space left" in str(ended)
    assert not list(disk.glob("run/model*")), "nothing half written stays"
