"""The run directory: names, creation, the lock, logs, and what a resume cuts away."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.train import lock
from rolecall.train.checkpoint import latest, save
from rolecall.train.jsonl import JsonLines, read_lines
from rolecall.train.lock import LockedError, RunLock
from rolecall.train.rundir import RunDir, RunDirError, run_path

BAD_NAMES = [
    *("", ".", "..", "../x", "a/../b", "a/b", "/etc", "a\\b", "a\0b", "a\nb", "-rf", ".hidden", "a b", "%2e%2e", "~"),
    *("a\u202eb", "a\x1b[31m", "x" * 129, "é" * 65, "a:b", "a\n"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirError, match="cannot be a run's name"):
        RunDir(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["first", "grpo-lr=1e-5_seed.3", "跑步", "a..b"])
def test_ordinary_names_are_taken(tmp_path, name):
    assert run_path(tmp_path, name) == tmp_path / name


def test_a_link_out_of_the_runs_directory_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RunDirError, match="is a link to"):
        RunDir(tmp_path / "runs", "link")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_new_run_has_the_layout(tmp_path):
    with RunDir(tmp_path / "runs", "first") as run:
        run.metrics.append({"step": 1})
        run.sync()
        assert {path.name for path in run.path.iterdir()} == {
            *(".lock", "checkpoints", "metrics.jsonl", "rollouts", "timing.jsonl", "updates")
        }
        assert (run.config.name, run.run.name, run.model.name) == ("config.json", "run.json", "model")
    assert not (run.path / ".lock").exists()


def test_an_existing_run_is_neither_reused_nor_lost_by_accident(tmp_path):
    with RunDir(tmp_path, "first") as run:
        run.metrics.append({"step": 1})
        (run.path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirError, match="is not empty; give --resume"):
        RunDir(tmp_path, "first")
    with pytest.raises(RunDirError, match="contradict"):
        RunDir(tmp_path, "first", resume=True, overwrite=True)
    with RunDir(tmp_path, "first", resume=True) as run:
        assert read_lines(run.metrics.path) == [{"step": 1}]
    with RunDir(tmp_path, "first", overwrite=True) as run:
        assert read_lines(run.metrics.path) == []
        assert (run.path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "run.json", "metrics.jsonl", "timing.jsonl", "report.html", "answers.jsonl", "best_of_n.json"),
        *("rollouts", "updates", "checkpoints", "model", "curves", "trackers"),
    ],
)
def test_every_part_of_a_run_is_known_as_one(tmp_path, name):
    """Nothing of an earlier run stays beside a new one, and an empty part does not make a directory a run."""
    part = tmp_path / "run" / name
    part.parent.mkdir()
    if "." in name:
        part.touch()
    else:
        part.mkdir()
    with RunDir(tmp_path, "run"):
        pass
    held = part / "x" if part.is_dir() else part
    held.write_text("of the run before")
    with pytest.raises(RunDirError, match="is not empty"):
        RunDir(tmp_path, "run")
    with RunDir(tmp_path, "run", overwrite=True):
        assert not held.exists() or held.read_text() == ""


def test_overwrite_touches_nothing_that_is_not_a_run(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(RunDirError, match="but no run, so it is not overwritten"):
        RunDir(tmp_path, "home", overwrite=True)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_resume_needs_a_run(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, sentence in (("none", "no run to resume"), ("file", "is a file")):
        with pytest.raises(RunDirError, match=sentence):
            RunDir(tmp_path, name, resume=True)
    assert not (tmp_path / "none").exists()


def test_opening_sweeps_what_an_interrupted_write_left(tmp_path):
    with RunDir(tmp_path, "first") as run:
        left = [run.path / "config.json.tmp-1", run.rollouts / "step-000001.parquet.tmp-2"]
        for path in left:
            path.write_text("half")
        (run.checkpoints / "step-000001.tmp-3").mkdir()
    with RunDir(tmp_path, "first", resume=True) as run:
        assert not any(path.exists() for path in left)
        assert list(run.checkpoints.iterdir()) == []


def test_a_resume_cuts_everything_after_the_checkpoint(tmp_path):
    with RunDir(tmp_path, "first") as run:
        for step in range(1, 6):
            run.metrics.append({"step": step, "part": "train"})
            run.metrics.append({"step": step, "part": "eval"})
            run.timing.append({"step": step})
            for folder in (run.rollouts, run.updates):
                (folder / f"step-{step:06d}.parquet").write_text("x")
            (run.updates / f"step-{step:06d}.rank-1.parquet").write_text("x")
            save(run.checkpoints, step, lambda directory: (directory / "x.json").write_text("{}"), config={}, keep=9)
        (run.rollouts / "notes.txt").write_text("mine")
    with RunDir(tmp_path, "first", resume=True) as run:
        run.cut_after(3)
        assert [line["step"] for line in read_lines(run.metrics.path)] == [1, 1, 2, 2, 3, 3]
        assert [line["step"] for line in read_lines(run.timing.path)] == [1, 2, 3]
        assert sorted(p.name for p in run.rollouts.iterdir()) == [
            *("notes.txt", "step-000001.parquet", "step-000002.parquet", "step-000003.parquet")
        ]
        assert len(list(run.updates.iterdir())) == 6
        assert latest(run.checkpoints).step == 3
        run.metrics.append({"step": 4})
        assert [line["step"] for line in read_lines(run.metrics.path)][-2:] == [3, 4]
        run.cut_after(0)
        assert read_lines(run.metrics.path) == []


def test_thinning_keeps_the_last_and_every_kth(tmp_path):
    with RunDir(tmp_path, "first") as run:
        for step in range(1, 13):
            (run.rollouts / f"step-{step:06d}.parquet").write_text("x")
        run.thin(run.rollouts, last=2, every=5)
        assert [int(p.name[5:11]) for p in sorted(run.rollouts.iterdir())] == [5, 10, 11, 12]
        assert [p.name for p in run.thin(run.rollouts, last=1)] == [
            *("step-000005.parquet", "step-000010.parquet", "step-000011.parquet")
        ]
        for wrong in ({"last": 0}, {"last": 1, "every": -1}):
            with pytest.raises(ValueError, match="last must be at least 1 and every at least 0"):
                run.thin(run.rollouts, **wrong)


# Logs.


@pytest.mark.parametrize(
    "tail",
    [b'{"step": 3, "lo', b'{"step": 3}', b"\0" * 70_000, b"\0\n\0\n", b"3\n", b"\xff\xfe\n", b"{" + b"x" * 200_000],
)
def test_a_torn_end_is_cut_when_the_log_is_opened(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    log = JsonLines(path)
    log.append({"step": 4})
    log.close()
    log.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 4}\n'


@pytest.mark.parametrize("content", [b"", b'{"step"', b"\n\n"])
def test_a_log_without_a_whole_line_starts_again(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_numbers_that_json_lacks_are_strings(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "a": float("nan"), "b": float("-inf"), "c": 0.1, "d": None, "e": (1, 2), "text": "a\nb"})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "a": "nan", "b": "-inf", "c": 0.1, "d": None, "e": [1, 2], "text": "a\nb"}


# The lock.

HOLD = """
import os, sys, time
from pathlib import Path
from rolecall.train.lock import LockedError, RunLock
try:
    RunLock(Path(sys.argv[1]))
except LockedError as error:
    print(error, flush=True)
    sys.exit(9)
if sys.argv[2] == "fork" and (child := os.fork()) > 0:
    print("held", child, flush=True)
elif sys.argv[2] != "fork":
    print("held", flush=True)
time.sleep(60)
"""


def holder(directory: Path, mode: str = "") -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(directory), mode], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_with_the_first_ones_pid_and_a_dead_ones_lock_is_taken_over(tmp_path):
    with RunDir(tmp_path, "first") as run:
        pass
    process = holder(run.path)
    assert process.stdout.readline() == "held\n"
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(LockedError, match=f"first is in use by process {process.pid}; wait for it"):
            RunDir(tmp_path, "first", **options)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    with RunDir(tmp_path, "first", resume=True):
        end(process)


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    process = holder(tmp_path, "fork")
    _, child = process.stdout.readline().split()
    try:
        process.kill()
        process.wait()
        RunLock(tmp_path).release()
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.stdout.close()


def test_the_same_process_does_not_get_the_lock_twice(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    first.release()
    second = RunLock(tmp_path)
    first.release()
    with pytest.raises(LockedError):
        RunLock(tmp_path)
    second.release()
    assert list(tmp_path.iterdir()) == []


OWN = lock._holder(os.getpid())
OTHERS = {
    "a later process with the same number": ({"start": OWN.start - 1}, None),
    "before a restart of the machine": ({"boot": "another"}, None),
    "another machine": ({"boot": "another", "host": "far"}, "on far; if that is gone, delete .lock"),
    "another container": ({"pids": "pid:[1]", "host": "box"}, r"in another container \(box\)"),
    "no such process": ({"pid": 2**22 + 1}, None),
    "a number that no process has": ({"pid": 10**30, "start": None}, None),
    "no number of a process": ({"pid": 1e30, "start": None}, None),
    "a number that means all of a group": ({"pid": 0, "start": None}, None),
    "a number that means another group": ({"pid": -1, "start": None}, None),
}


@pytest.mark.parametrize(("change", "refusal"), OTHERS.values(), ids=OTHERS.keys())
def test_whose_lock_counts(tmp_path, change, refusal):
    fields = {name: getattr(OWN, name) for name in OWN.__slots__} | change
    (tmp_path / ".lock").write_text(json.dumps(fields))
    if refusal is None:
        RunLock(tmp_path).release()
    else:
        with pytest.raises(LockedError, match=refusal):
            RunLock(tmp_path)


def test_where_the_system_does_not_say_when_processes_began_a_living_one_holds_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_text_of", lambda path: "")
    ended = subprocess.Popen(["true"])
    ended.wait()
    alive = {"start": None, "boot": ""}
    for pid, free in ((os.getpid(), False), (ended.pid, True), (1, False)):  # 1 may be another user's
        fields = {name: getattr(OWN, name) for name in OWN.__slots__} | alive | {"pid": pid}
        (tmp_path / ".lock").write_text(json.dumps(fields))
        if free:
            RunLock(tmp_path).release()
        else:
            with pytest.raises(LockedError, match=f"in use by process {pid}; wait for it"):
                RunLock(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "12"])
def test_a_lock_that_says_nothing_is_taken_over(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    RunLock(tmp_path).release()


def test_of_many_that_come_at_once_one_gets_the_lock(tmp_path):
    fields = {name: getattr(OWN, name) for name in OWN.__slots__}
    (tmp_path / ".lock").write_text(json.dumps(fields | {"boot": "another"}))
    processes = [holder(tmp_path) for _ in range(8)]
    answers = [process.stdout.readline() for process in processes]
    for process in processes:
        end(process)
    assert answers.count("held\n") == 1
    winner = processes[answers.index("held\n")].pid
    assert sum(f"in use by process {winner};" in answer for answer in answers) == 7
