"""Objects of the user's that a run calls at its moments, on the first process alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolecall.errors import UserError

if TYPE_CHECKING:
    from rolecall.train.loop import Outcome

PREFIX = "callback/"
"""What the names of numbers that callbacks log begin with."""
MOMENTS = ("on_begin", "on_step", "on_evaluate", "on_save", "on_end")


@dataclass(kw_only=True, slots=True)
class Control:
    """What a callback is given: where the run stands, and the two things it may do."""

    path: Path
    """The run's directory."""
    steps: int
    """The last step."""
    step: int = 0
    """Steps done."""
    _why: str | None = None
    _logged: dict[str, float] | None = None

    def stop(self, why: str = "") -> None:
        """End the run after this step, saved like any other end."""
        self._why = why

    def log(self, numbers: Mapping[str, float]) -> None:
        """Write numbers to metrics.jsonl and the trackers, as `callback/<name>`."""
        for name, value in numbers.items():
            number = float(value)
            if not isfinite(number):
                raise ValueError(f"{name} is {number}, and only finite numbers can be logged")
            self._logged = (self._logged or {}) | {f"{PREFIX}{name}": number}


class Callback:
    """Override the moments you need. Any method may return "stop" in place of calling `control.stop`."""

    def on_begin(self, control: Control) -> str | None:
        """Before the first step and the evaluation before it."""

    def on_step(self, control: Control, metrics: dict[str, float]) -> str | None:
        """After each step, with its numbers."""

    def on_evaluate(self, control: Control, metrics: dict[str, float]) -> str | None:
        """After each evaluation, with its numbers (`eval_…`)."""

    def on_save(self, control: Control, path: Path) -> str | None:
        """After a checkpoint was written to `path`."""

    def on_end(self, control: Control, outcome: "Outcome") -> str | None:
        """When the run has ended and its model is written; not after an error that stops it at once."""


Given = Any
"""A `Callback`, any object with some of its methods, or a function that is called at each step."""


class Callbacks:
    """Calls each callback in order. The first that stops the run or fails is remembered; after a failure none is called."""

    def __init__(self, given: Sequence[Given], *, path: Path, steps: int) -> None:
        self._given, self.control = list(given), Control(path=path, steps=steps)
        self.stopped: str | None = None
        """Which callback stopped the run, and why."""
        self.failed: str | None = None
        """Which callback failed, when, and how."""

    def listen(self, moment: str) -> bool:
        """Whether any of them is called at this moment."""
        return any(getattr(one, moment, None) is not None for one in self._given)

    def call(self, moment: str, step: int, *told: Any) -> dict[str, float]:
        """Tell all; returns what they logged."""
        logged: dict[str, float] = {}
        self.control.step = step
        for one in self._given:
            function = one if moment == "on_step" and not _methods(one) else getattr(one, moment, None)
            if function is None or self.failed is not None:
                continue
            copies = [dict(x) if isinstance(x, dict) else x for x in told]
            self.control._why = self.control._logged = None
            try:
                answer = function(self.control, *copies)
                if answer not in (None, "stop"):
                    raise ValueError(f'it returned {answer!r}; return "stop" to end the run, or nothing')
            except Exception as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                self.failed = f"the callback {_name(one)} failed in {moment} at step {step}: {what}"
                continue
            why = "" if answer == "stop" and self.control._why is None else self.control._why
            if why is not None and self.stopped is None:
                self.stopped = f"the callback {_name(one)}" + (f": {why}" if why else "")
            logged |= self.control._logged or {}
        return logged


def check_callbacks(given: Any) -> None:
    """Refuse what would never be called."""
    if not isinstance(given, list | tuple):
        raise UserError(f"callbacks must be a list, such as callbacks=[my_callback]; this is a {type(given).__name__}")
    for one in given:
        if isinstance(one, type):
            raise UserError(
                f"callbacks takes objects and functions, and {one.__name__} is a class: give {one.__name__}()"
            )
        odd = [name for name in dir(one) if name.startswith("on_") and name not in MOMENTS]
        if odd:
            raise UserError(
                f"the callback {_name(one)} has {odd[0]}, which is not a moment of a run; they are {', '.join(MOMENTS)}"
            )
        if not _methods(one) and not callable(one):
            raise UserError(
                f"{one!r} cannot be a callback: give a function, or an object with one of {', '.join(MOMENTS)}"
            )


def _methods(one: Any) -> bool:
    return any(hasattr(one, moment) for moment in MOMENTS)


def _name(one: Any) -> str:
    return f"`{getattr(one, '__name__', type(one).__name__)}`"
