"""Progress on a terminal: a bar for the run, a bar for the phase of the moment, the last step in words."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Bars:
    """A rich display on stderr, so that what a command prints can still be piped."""

    def __init__(self, console: Console | None = None) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=False,
        )
        self._run: TaskID | None = None
        self._phase: TaskID | None = None
        self._start = 0
        self._begun = self._phase_begun = time.monotonic()

    def begin(self, title: str, *, start: int, steps: int) -> None:
        """Show the run's bar."""
        self._start, self._begun = start, time.monotonic()
        self._run = self._bars.add_task(title, total=steps, completed=start, rate="")
        self._bars.start()

    def phase(self, name: str) -> None:
        """A bar of its own under the run's; it swings until the phase says how much there is to do."""
        if self._run is None:
            return
        self._phase_begun = time.monotonic()
        if self._phase is not None:
            self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(f"  {name}", total=None, rate="")

    def advance(self, done: int, total: int, unit: str) -> None:
        """Move the phase's bar."""
        if self._phase is None:
            return
        rate = done / max(1e-9, time.monotonic() - self._phase_begun)
        self._bars.update(self._phase, completed=done, total=total, rate=f"{rate:.3g} {unit}/s")

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        """Move the run's bar; the sentence stands above it."""
        if self._run is not None:
            seconds = (time.monotonic() - self._begun) / max(1, step - self._start)
            self._bars.update(self._run, completed=step, rate=f"{seconds:.2f} s/step")
        self._bars.console.print(Text(f"step {step}: {sentence}", style="dim"), soft_wrap=True)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._bars.console.print(Text(text), soft_wrap=True)

    def end(self) -> None:
        """Leave the run's bar as it is."""
        if self._phase is not None:
            self._bars.remove_task(self._phase)
        self._bars.stop()
        self._run = self._phase = None
