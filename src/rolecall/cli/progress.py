"""Progress on a terminal: a bar for the run, the phase of the moment, the last step in words."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Bars:
    """A rich display on stderr, so that what a command prints can still be piped."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            console=self._console,
            transient=False,
        )
        self._task: int | None = None
        self._start, self._begun = 0, time.monotonic()

    def begin(self, title: str, *, start: int, steps: int) -> None:
        """Show the bar."""
        self._start, self._begun = start, time.monotonic()
        self._task = self._bars.add_task(title, total=steps, completed=start, phase="", rate="")
        self._bars.start()

    def phase(self, name: str) -> None:
        """Name the phase behind the bar."""
        if self._task is not None:
            self._bars.update(self._task, phase=name)  # type: ignore[arg-type]

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        """Move the bar; the sentence stands above it."""
        if self._task is not None:
            seconds = (time.monotonic() - self._begun) / max(1, step - self._start)
            self._bars.update(self._task, completed=step, rate=f"{seconds:.2f} s/step")  # type: ignore[arg-type]
        self._bars.console.print(Text(f"step {step}: {sentence}", style="dim"), soft_wrap=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bars.console.print(Text(text), soft_wrap=True)

    def end(self) -> None:
        """Leave the bar as it is."""
        self._bars.stop()
        self._task = None
