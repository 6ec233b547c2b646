"""Progress of jobs that are called from Python: a bar in a notebook, lines elsewhere."""

import logging
import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from rolecall.train.progress import Lines, Progress, Rate

_log = logging.getLogger("rolecall")
_EVERY_S = 0.2
"""Between two pictures of the bar."""
_KEPT = 12
"""So many of the things said stay below the bar."""


def spoken() -> Progress:
    """Progress that is seen; where nobody has set up logging, lines and warnings go to stderr."""
    notebook = in_notebook()
    if not _log.hasHandlers():
        handler = logging.StreamHandler(sys.stdout if notebook else None)  # a notebook shows stderr in red
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    return Cell() if notebook else Lines()


def in_notebook() -> bool:
    """True in a kernel of Jupyter, VS Code or Colab; a terminal's IPython has none."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


class Cell:
    """A bar below the notebook's cell that changes in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._rate = Rate()
        self._phase, self._line, self._said = "", "", list[str]()
        self._drawn = 0.0

    def begin(self, title: str, *, start: int, steps: int) -> None:
        self._rate.begin(start=start, steps=steps)
        self._said.append(f"{title}: steps {start + 1} to {steps}")
        self._draw()

    def phase(self, name: str) -> None:
        self._phase = name
        self._draw_at_times()

    def advance(self, done: int, total: int, unit: str) -> None:
        self._phase = f"{self._phase.partition(':')[0]}: {done} of {total} {unit}"
        self._draw_at_times()

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        self._line = self._rate.line(step, sentence)
        self._draw_at_times()

    def say(self, text: str) -> None:
        self._said.append(text)
        self._draw()

    def end(self) -> None:
        self._phase = ""
        self._draw()
        self._handle = None

    def _draw_at_times(self) -> None:
        if time.monotonic() - self._drawn >= _EVERY_S:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        bar = f'<progress style="width: 20em" max="{self._rate.steps}" value="{self._rate.step}"></progress>'
        lines = [self._line, *self._said[-_KEPT:]]
        below = "".join(f"<div>{escape(line)}</div>" for line in lines if line)
        page = HTML(f"{bar} {self._rate.step}/{self._rate.steps} {escape(self._phase)}{below}")
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
