"""Files that may not be read: one sentence from each of view, doctor, diff and report."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from view_server import write_run

import rolecall.jobs.view
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.look.view.runs import Runs


@contextmanager
def as_somebody_else():
    """Root may read everything, so the tests of root are made as nobody."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.fixture
def place():
    """A directory that everybody may look into."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        yield Path(place)


@pytest.mark.parametrize("name", ["run.json", "config.json", "metrics.jsonl"])
def test_a_file_of_a_run_that_may_not_be_read(name, place, capsys):
    for run in ("mine", "other", "theirs"):
        write_run(place / run)
    for command, *runs in (("doctor", "mine"), ("diff", "mine", "other"), ("report", "mine")):
        assert main([command, *(str(place / run) for run in runs)]) in (0, 1)  # which imports what it needs, as root
    capsys.readouterr()
    (place / "theirs" / name).chmod(0)
    with as_somebody_else():
        state = {one.name: one for one in Runs(place).summaries()}
        assert state["mine"].state == "done"
        assert state["theirs"].state == "unreadable"
        assert state["theirs"].problem.endswith("cannot be read: Permission denied")
        for command, *runs in (("doctor", "theirs"), ("diff", "mine", "theirs"), ("report", "theirs")):
            assert main([command, *(str(place / run) for run in runs)]) == 2, command
            (said,) = capsys.readouterr().err.strip().splitlines()
            assert f"{name} cannot be read: Permission denied" in said


def test_a_directory_that_may_not_be_read(place):
    write_run(place / "runs" / "closed").chmod(0)
    with as_somebody_else():
        (closed,) = Runs(place / "runs").summaries()
        assert (closed.state, "Permission denied" in closed.problem) == ("unreadable", True)
    (place / "runs" / "closed").chmod(0o700)
    (place / "runs").chmod(0)
    try:
        with as_somebody_else(), pytest.raises(UserError, match="cannot be read: permission denied"):
            rolecall.jobs.view.view(place / "runs", ready=print)
    finally:
        (place / "runs").chmod(0o700)
