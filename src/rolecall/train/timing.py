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
        self._in_parts = False

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

    def add(self, name: str, value: float) -> None:
        """A number that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + value

    def counted(self, units: Iterable[T], *, total: int, unit: str) -> Iterator[T]:
        """The same units; each is told to the watcher when it is done."""
        for done, one in enumerate(units, start=1):
            self.advance(done, total, unit)
            yield one

    def parts(self, parts: Sequence[T]) -> Iterator[T]:
        """The same optimiser steps of a phase. They are what is counted, unless there is but one: then what it counts."""
        self._in_parts = len(parts) > 1
        try:
            for done, one in enumerate(parts):
                if self._in_parts and self.watcher is not None:
                    self.watcher.advance(done, len(parts), "optimiser steps")
                yield one
        finally:
            self._in_parts = False

    def advance(self, done: int, total: int, unit: str) -> None:
        """Of the phase's `total` units, `done` are done."""
        if self.watcher is not None and not self._in_parts:
            self.watcher.advance(done, total, unit)

    def take(self) -> dict[str, float]:
        """What was measured; starts again from nothing."""
        taken, self._seconds = self._seconds, {}
        return taken
