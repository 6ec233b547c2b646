"""Where the time of a step goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Seconds per phase since they were last taken. Phases may lie inside one another; each counts all of its time."""

    def __init__(self, *, on_phase: Callable[[str], None] = lambda name: None) -> None:
        """`on_phase` is told when a phase begins, for progress displays."""
        self._seconds: dict[str, float] = {}
        self.on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        self.on_phase(name)
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """What was measured; starts again from nothing."""
        taken, self._seconds = self._seconds, {}
        return taken
