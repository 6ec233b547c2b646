"""Logs of runs that may still grow. What was read once is not read again."""

import json
import os
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path
from sys import intern
from threading import Lock
from typing import Any

from rolecall.look.run import is_evaluation, number_of

_PRINT = 64
"""Bytes before the end of what was read; if they differ, the file was cut and written on since."""

Line = dict[str, Any]


class Tail:
    """The lines of a JSON lines file, brought up to date by `refresh`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self.evaluations: list[bool] = []
        """Whether each of them is about an evaluation."""
        self.generation = 0
        """Grows when what was read before is no longer what the file holds."""
        self.damaged = 0
        """Lines that are no JSON or have no step; they are left out."""
        self._inode, self._end, self._print = 0, 0, b""

    def refresh(self) -> None:
        """Read what was appended; all again if the file is another, or was cut. A missing file has no lines."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if not self._goes_on(file, found):
                    self._forget(found.st_ino)
                if found.st_size > self._end:
                    file.seek(self._end)
                    self._take(file.read(found.st_size - self._end))
        except FileNotFoundError:
            if self._inode:
                self._forget(0)

    def _goes_on(self, file: Any, found: os.stat_result) -> bool:
        if found.st_ino != self._inode or found.st_size < self._end:
            return False
        file.seek(self._end - len(self._print))
        return bool(file.read(len(self._print)) == self._print)

    def _forget(self, inode: int) -> None:
        self.generation += bool(self._inode)
        self.lines, self.evaluations, self.damaged = [], [], 0
        self._inode, self._end, self._print = inode, 0, b""

    def _take(self, appended: bytes) -> None:
        whole = appended[: appended.rfind(b"\n") + 1]  # the rest is being written
        for line in whole.splitlines():
            read = read_line(line)
            if read is None:
                self.damaged += 1
            else:
                self.lines.append(read)
                self.evaluations.append(is_evaluation(read))
        self._end += len(whole)
        self._print = (self._print + whole)[-_PRINT:]


def read_line(line: bytes) -> Line | None:
    """A line of a log, numbers as numbers; None if it is none."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(held, dict) or not isinstance(held.get("step"), int):
        return None
    return {intern(name): number_of(value) for name, value in held.items()}


class RunLog:
    """The metrics and timings of a run, shared by all who look at it."""

    def __init__(self, path: Path) -> None:
        self._metrics, self._timing = Tail(path / "metrics.jsonl"), Tail(path / "timing.jsonl")
        self._lock = Lock()

    def read(self, *, seen: tuple[int, int, int] = (0, 0, 0)) -> "Lines":
        """The lines after those that were `seen`, as an earlier `Lines.seen` counts them; all if the logs began again."""
        with self._lock:
            self._metrics.refresh()
            self._timing.refresh()
            generation = self._metrics.generation + self._timing.generation
            fresh = seen[0] == generation
            first, second = seen[1:] if fresh else (0, 0)
            metrics, judged, timing = self._metrics.lines, self._metrics.evaluations, self._timing.lines
            return Lines(
                steps=list(compress(metrics[first:], map(not_, judged[first:]))),
                evaluations=list(compress(metrics, judged)),
                timing=timing[second:],
                seen=(generation, len(metrics), len(timing)),
                restarted=not fresh and seen != (0, 0, 0),
                damaged=self._metrics.damaged,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """What `RunLog.read` found. Evaluations are few, and always all of them."""

    steps: list[Line]
    evaluations: list[Line]
    timing: list[Line]
    seen: tuple[int, int, int]
    restarted: bool
    damaged: int
