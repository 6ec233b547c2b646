"""The directory of one run: its layout, its lock, its logs, and what a resume cuts away."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rolecall.errors import UserError
from rolecall.files import TMP_MARK, DiskError, disk_errno, disk_error, fsync_path, sweep_unfinished
from rolecall.train import checkpoint
from rolecall.train.jsonl import JsonLines
from rolecall.train.lock import LOCK, RunLock

_NAME = re.compile(r"\w[\w.=+@,-]*")
_STEP_FILE = re.compile(r"step-([0-9]{6,})(\.[\w-]+)*\.parquet")
_LAYOUT = (
    *("config.json", "run.json", "metrics.jsonl", "timing.jsonl", "report.html"),
    *("answers.jsonl", "best_of_n.json", "lessons.jsonl"),
    *("rollouts", "updates", "checkpoints", "model", "curves", "trackers"),
)
_log = logging.getLogger(__name__)


class RunDirError(Exception):
    """The run directory cannot be used as asked."""


def run_path(runs: Path, name: str) -> Path:
    """`runs/name`, refused with `RunDirError` unless it lies right inside `runs`."""
    if not _NAME.fullmatch(name) or len(name.encode()) > 128:
        raise RunDirError(
            f"{name[:140]!r} cannot be a run's name: use letters, digits and . _ - = + @ , without separators, "
            "beginning with a letter or digit, at most 128 bytes"
        )
    path = runs / name
    if path.is_symlink() and path.resolve().parent != runs.resolve():
        raise RunDirError(f"run {name!r} is a link to {path.resolve()}, outside {runs}; open it where it is")
    return path


def check_new(runs: Path, name: str, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse what `RunDir` would refuse for what lies there, without touching anything."""
    path = run_path(runs, name)
    if path.exists() and not path.is_dir():
        raise RunDirError(f"{path} is a file; choose another run name")
    if path.is_dir():
        _check_use(path, resume=resume, overwrite=overwrite)


class RunDir:
    """`runs/<name>`, held by this process until `close`.

    ```
    with RunDir(Path("runs"), "first") as run:
        write_atomically(run.config, ...)
        run.metrics.append({"step": 1, "loss": 0.5})
    ```

    Without `resume` or `overwrite` the directory must be new or empty. `resume` needs one that is there, if only just begun; `overwrite`
    removes an earlier run's files, and nothing else. Only one process of a job opens it (rank 0).
    """

    def __init__(self, runs: Path, name: str, *, resume: bool = False, overwrite: bool = False) -> None:
        if resume and overwrite:
            raise RunDirError("resume and overwrite contradict each other; give one of them")
        self.path = run_path(runs, name)
        self.config = self.path / "config.json"
        self.run = self.path / "run.json"
        self.rollouts = self.path / "rollouts"
        self.updates = self.path / "updates"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.report = self.path / "report.html"
        self.also_cut: list[Callable[[int], None]] = []
        """Cut what lies elsewhere too, after the same step."""
        self._lock = _locked(self.path, resume=resume)
        try:
            _check_use(self.path, resume=resume, overwrite=overwrite)
            if overwrite:
                _clear(self.path)
            for folder in (self.rollouts, self.updates, self.checkpoints):
                folder.mkdir(exist_ok=True)
            for folder in (self.path, self.rollouts, self.updates):
                sweep_unfinished(folder)
            checkpoint.sweep(self.checkpoints)
            fsync_path(self.path)
            self.metrics = JsonLines(self.path / "metrics.jsonl")
            self.timing = JsonLines(self.path / "timing.jsonl")
            self._lessons: JsonLines | None = None
        except BaseException as error:
            self._lock.release()
            code = disk_errno(error, place=self.path)
            if code is None:
                raise
            raise disk_error("a run", self.path, code) from error

    @property
    def lessons(self) -> JsonLines:
        """What happened to the pool of lessons. The file is made when it is first asked for."""
        self._lessons = self._lessons or JsonLines(self.path / "lessons.jsonl")
        return self._lessons

    def cut_after(self, step: int) -> None:
        """Bring the directory back to how it was after `step`: later lines, rollouts, updates and checkpoints go.

        Later checkpoints are kept under the name `step-N.cut`. Called on resume, before the first new step.
        """
        self.metrics.cut_after(step)
        self.timing.cut_after(step)
        if (self.path / "lessons.jsonl").is_file():
            self.lessons.cut_after(step)
        for folder in (self.rollouts, self.updates):
            for number, path in _step_files(folder):
                if number > step:
                    path.unlink()
            fsync_path(folder)
        checkpoint.cut_after(self.checkpoints, step)
        for cut in self.also_cut:
            cut(step)

    def thin(self, folder: Path, *, last: int, every: int = 0, spare: Container[str] = ()) -> list[Path]:
        """Keep the files of the `last` newest steps, and of each step that `every` divides; returns what was removed.

        `every` 0 keeps no others, but for names to `spare`. For `rollouts` and `updates`.
        """
        if last < 1 or every < 0:
            raise ValueError(f"last must be at least 1 and every at least 0, got {last} and {every}")
        files = _step_files(folder)
        newest = sorted({step for step, _ in files})[-last:]
        removed = []
        for step, path in files:
            if step not in newest and not (every and step % every == 0) and path.name not in spare:
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed

    def sync(self) -> None:
        """Put everything logged so far on the disk; called before a checkpoint is saved."""
        try:
            self.metrics.sync()
            self.timing.sync()
            if self._lessons is not None:
                self._lessons.sync()
            for folder in (self.rollouts, self.updates):
                fsync_path(folder)
        except OSError as error:
            raise disk_error("the logs", self.path, error.errno or errno.EIO) from error

    def close(self) -> None:
        """Close the logs and give the directory back."""
        self.metrics.close()
        self.timing.close()
        if self._lessons is not None:
            self._lessons.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """While a run is open: whatever fails because its directory is full, read-only or gone is a `DiskError`."""
    try:
        yield
    except Exception as error:
        code = disk_errno(error, place=path)
        missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        if missing and not (path / "metrics.jsonl").is_file():
            code = errno.ENOENT
        if code is None or isinstance(error, DiskError | UserError):
            raise
        raise disk_error("the run", path, code) from error


def _locked(path: Path, *, resume: bool) -> RunLock:
    """Make the directory if it is a new run's, and lock it, which also shows that it can be written."""
    if path.exists() and not path.is_dir():
        raise RunDirError(f"{path} is a file; choose another run name")
    if resume and not path.is_dir():
        raise RunDirError(f"there is no run to resume in {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        fsync_path(path.parent)
        return RunLock(path)
    except OSError as error:
        raise disk_error("a run", path, error.errno or errno.EIO) from error


def _check_use(path: Path, *, resume: bool, overwrite: bool) -> None:
    entries = sorted(child.name for child in path.iterdir() if child.name != LOCK and TMP_MARK not in child.name)
    if overwrite and entries and not set(entries) & set(_LAYOUT):
        raise RunDirError(f"{path} holds {entries[0]!r} but no run, so it is not overwritten; choose another run name")
    if not all(_is_void(path / name) for name in entries) and not (resume or overwrite):
        raise RunDirError(
            f"{path} is not empty; give --resume to continue it, --overwrite to remove it, or another --out"
        )


def _is_void(child: Path) -> bool:
    """An empty part of a run: what a start that failed before its first step leaves."""
    if child.name not in _LAYOUT or child.is_symlink():
        return False
    return not any(child.iterdir()) if child.is_dir() else child.stat().st_size == 0


def _clear(path: Path) -> None:
    held = [path / name for name in _LAYOUT if os.path.lexists(path / name)]
    if held:
        _log.warning("overwriting the run in %s", path)
    for entry in held:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _step_files(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.iterdir():
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            found.append((int(match.group(1)), path))
    return sorted(found)
