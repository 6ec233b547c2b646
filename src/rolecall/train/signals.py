"""SIGTERM and SIGINT become a flag that is looked at between steps; what takes longer than the grace time is dropped."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from rolecall.train.exit_codes import ExitCode

_log = logging.getLogger(__name__)
_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


_DROP_AFTER = 2 / 3
"""The share of the grace time after which what can be dropped is; the rest is for saving."""


class Dropped(BaseException):
    """Raised inside `StopSignals.droppable`. Not an `Exception`, so that nobody on the way takes it for a failure."""


class StopSignals:
    """A context in which the first signal asks to stop, the second is ignored, and the third ends the process at once.

    ```
    with StopSignals() as stop:
        for step in range(steps):
            ...
            if stop.stop_requested:
                with stop.saving():
                    save(...)
                sys.exit(stop.exit_code)
    ```

    Work inside `droppable()` is interrupted by `Dropped` when two thirds of `grace` seconds have passed since the signal, or
    when another thread calls `drop`.

    A forked child keeps the usual meaning of the signals. Outside the main thread, where Python allows no handlers,
    the context does nothing but say so.
    """

    def __init__(self, *, grace: float = 30.0) -> None:
        self.grace = grace
        self._over = self._droppable = False
        self._first: signal.Signals | None = None
        self._count = 0
        self._saves = 0
        self._owner = os.getpid()
        self._previous: dict[signal.Signals, object] = {}

    @property
    def stop_requested(self) -> bool:
        """True once a signal has come: finish the step, save, and leave with `exit_code`."""
        return self._first is not None

    @property
    def exit_code(self) -> ExitCode:
        """What to exit with once everything is saved: 130 or 143 by the first signal, 0 if none came."""
        return ExitCode.DONE if self._first is None else _EXIT_CODES[self._first]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Marks a save, so that a signal that comes meanwhile is answered by saying so."""
        self._saves += 1
        try:
            yield
        finally:
            self._saves -= 1

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Marks work that leaves no trace if it is interrupted: a rollout or an evaluation, which may wait for long."""
        self._droppable = True
        try:
            if self._over:
                raise Dropped
            yield
        finally:
            self._droppable = False

    def drop(self) -> None:
        """Called from another thread: interrupt what is droppable now, and let nothing droppable begin."""
        self._over = True
        if self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def __enter__(self) -> Self:
        self._owner = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            _log.warning("not in the main thread: SIGTERM and Ctrl-C will not save before they stop the run")
            return self
        for which in _EXIT_CODES:
            self._previous[which] = signal.signal(which, self._handle)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._count:
            signal.setitimer(signal.ITIMER_REAL, 0)
        previous, self._previous = self._previous, {}
        for which, handler in previous.items():
            # None: the handler before was not set from Python and cannot be put back.
            signal.signal(which, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if os.getpid() != self._owner:
            signal.signal(which, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._count += 1
        if self._first is None:
            self._first = which
            # Again every two seconds: an exception that is raised in a destructor is lost.
            signal.setitimer(signal.ITIMER_REAL, self.grace * _DROP_AFTER, 2.0)
        doing = "saving" if self._saves else "finishing the step, then saving"
        if self._count == 1:
            _say(f"{which.name}: {doing}")
        elif self._count == 2:
            _say(f"{which.name}: ignored, still {doing}; once more stops at once without saving")
        else:
            _say(f"{which.name}: stopped at once; the last complete checkpoint is kept")
            os._exit(ExitCode.ERROR)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._over = True
        if self._droppable and os.getpid() == self._owner:
            raise Dropped


def _say(text: str) -> None:
    """To stderr without Python's buffers: the signal may have interrupted a write to them."""
    with suppress(OSError):  # a closed terminal must not turn a request to stop into a crash
        os.write(2, f"rolecall: {text}\n".encode())
