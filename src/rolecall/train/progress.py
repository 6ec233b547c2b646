"""What a run tells while it goes on. Displays implement `Progress`; this module has the ones that need no terminal."""

import logging
import time
from collections.abc import Mapping
from typing import Protocol

_log = logging.getLogger("rolecall")


class Progress(Protocol):
    """Is told what happens, in order."""

    def begin(self, title: str, *, start: int, steps: int) -> None:
        """A run of `steps` steps begins, or goes on at `start`."""
        ...

    def phase(self, name: str) -> None:
        """A phase of the step begins."""
        ...

    def advance(self, done: int, total: int, unit: str) -> None:
        """Of the phase's `total` units, such as answers, `done` are done."""
        ...

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        """A step is done; the sentence says in about 40 columns what it did."""
        ...

    def say(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def end(self) -> None:
        """The run is over."""
        ...


class Quiet:
    """Tells nothing."""

    def begin(self, title: str, *, start: int, steps: int) -> None: ...
    def phase(self, name: str) -> None: ...
    def advance(self, done: int, total: int, unit: str) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self) -> None: ...


class Rate:
    """How far a run is, how long a step takes and how long it will go on."""

    def __init__(self) -> None:
        self.step = self.steps = self._start = 0
        self._begun = time.monotonic()

    def begin(self, *, start: int, steps: int) -> None:
        """The clock starts."""
        self.step, self.steps, self._start, self._begun = start, steps, start, time.monotonic()

    def line(self, step: int, sentence: str, *, of: str = "") -> str:
        """A step's line. `of` stands after its number, such as "/60"."""
        self.step = step
        seconds = (time.monotonic() - self._begun) / max(1, step - self._start)
        left = f", {duration(seconds * (self.steps - step))} left" if step < self.steps else ""
        return f"step {step}{of}: {sentence}, {seconds:.3g} s/step{left}"


class Lines:
    """Plain log lines: one for the first step, then at most one every few seconds, and one for everything said.

    A phase that takes long says from time to time how far it has come.
    """

    def __init__(self, *, every_s: float = 5.0, phase_every_s: float = 20.0) -> None:
        self._every, self._last, self._rate = every_s, -float("inf"), Rate()
        self._phase_every, self._phase, self._phase_begun, self._phase_last = phase_every_s, "", 0.0, 0.0

    def begin(self, title: str, *, start: int, steps: int) -> None:
        self._rate.begin(start=start, steps=steps)
        _log.info("%s: steps %d to %d", title, start + 1, steps)

    def phase(self, name: str) -> None:
        self._phase, self._phase_begun = name, time.monotonic()
        self._phase_last = self._phase_begun

    def advance(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - max(self._phase_last, self._last) < self._phase_every:
            return
        self._phase_last = now
        if not done:
            waited = duration(now - self._phase_begun)
            _log.info("%s: %d of %d %s after %s", self._phase, done, total, unit, waited)
            return
        rate = done / (now - self._phase_begun)
        left = duration((total - done) / rate)
        _log.info("%s: %d of %d %s, %.3g a second, %s left", self._phase, done, total, unit, rate, left)

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        now = time.monotonic()
        if now - self._last < self._every and step != self._rate.steps:
            return
        self._last = now
        _log.info("%s", self._rate.line(step, sentence, of=f"/{self._rate.steps}"))

    def say(self, text: str) -> None:
        _log.info("%s", text)

    def end(self) -> None:
        """Nothing to close."""


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
