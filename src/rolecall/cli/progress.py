"""Progress on a terminal: a line per step, a bar for the run, a bar for the phase of the moment."""

import logging
import sys
import time
from collections.abc import Mapping

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from rolecall.train.progress import Lines, Progress, Quiet, Rate


def display(*, quiet: bool) -> Progress:
    """Bars on a terminal, plain lines elsewhere, nothing if quiet; warnings are shown either way."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rolecall").setLevel(logging.WARNING if quiet else logging.INFO)
    if quiet:
        return Quiet()
    return Bars() if sys.stderr.isatty() else Lines()


class Bars:
    """A rich display on stderr, so that what a command prints can still be piped. It fits 80 columns."""

    def __init__(self, console: Console | None = None, *, every_s: float = 1.0) -> None:
        """Steps that follow each other faster than `every_s` do not have a line each."""
        self._bars = rich_progress.Progress(
            SpinnerColumn(),
            TextColumn("{task.description:9}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            console=console or Console(stderr=True),
            transient=False,
        )
        self._run: TaskID | None = None
        self._phase: TaskID | None = None
        self._rate, self._every, self._last = Rate(), every_s, -float("inf")
        self._phase_begun = 0.0

    def begin(self, title: str, *, start: int, steps: int) -> None:
        self._rate.begin(start=start, steps=steps)
        self.say(f"{title}: steps {start + 1} to {steps}")
        self._run = self._bars.add_task("step", total=steps, completed=start, count=f"{start}/{steps}")
        self._bars.start()

    def phase(self, name: str) -> None:
        """A bar of its own under the run's; it swings until the phase says how much there is to do."""
        if self._run is None:
            return
        self._phase_begun = time.monotonic()
        if self._phase is not None:
            self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(name, total=None, count="")

    def advance(self, done: int, total: int, unit: str) -> None:
        if self._phase is None:
            return
        rate = done / max(1e-9, time.monotonic() - self._phase_begun)
        count = f"{done}/{total} {unit}" + (f", {rate:.3g}/s" if done else "")
        self._bars.update(self._phase, completed=done, total=total, count=count)

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        line, now = self._rate.line(step, sentence), time.monotonic()
        if self._run is not None:
            self._bars.update(self._run, completed=step, count=f"{step}/{self._rate.steps}")
        if now - self._last >= self._every or step == self._rate.steps:
            self._last = now
            self._bars.console.print(Text(line, style="dim"), no_wrap=True, overflow="ellipsis")

    def say(self, text: str) -> None:
        self._bars.console.print(Text(text))

    def end(self) -> None:
        if self._phase is not None:
            self._bars.remove_task(self._phase)
        self._bars.stop()
        self._run = self._phase = None
