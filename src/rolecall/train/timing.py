"""Where the time of a step goes, and how far its phases have come."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Watcher(Protocol):
    """Is told when a phase begins and how far it has come; progress displays are watchers."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        ...

    def advance(self, done: int, total: int, unit: str) -> None:
        """Of the phase's `total` units, `done` are done."""
        ...


class Timer:
    """Seconds per phase since they were last taken. Phases may lie inside one another; each counts all of its time."""

    def __init__(self, *, watcher: Watcher | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self.watcher = watcher
        self._part, self._parts = 0, 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        if self.watcher is not None:
            self.watcher.phase(name)
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def counted(self, units: Iterable[T], *, total: int, unit: str) -> Iterator[T]:
        """The same units; each is told to the watcher when it is done."""
        for done, one in enumerate(units, start=1):
            self.advance(done, total, unit)
            yield one

    def parts(self, parts: Sequence[T]) -> Iterator[T]:
        """The same parts of a phase, such as its optimiser steps; units counted within one are so many of all parts'."""
        try:
            for self._part, one in enumerate(parts):
                self._parts = len(parts)
                yield one
        finally:
            self._part, self._parts = 0, 1

    def advance(self, done: int, total: int, unit: str) -> None:
        """Of the phase's `total` units, `done` are done."""
        if self.watcher is not None:
            self.watcher.advance(self._part * total + done, self._parts * total, unit)

    def take(self) -> dict[str, float]:
        """What was measured; starts again from nothing."""
        taken, self._seconds = self._seconds, {}
        return taken
