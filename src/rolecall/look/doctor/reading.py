"""What checks read of a run: numbers over steps, and the answers of recorded steps."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.experience.parquet import Ragged, StoreError, read_table
from rolecall.experience.rollout_schema import COMPUTED, ROLLOUTS
from rolecall.look.charts import is_number
from rolecall.look.doctor.finding import Evidence
from rolecall.look.records import cut_off
from rolecall.look.run import RunFiles
from rolecall.maths.codes import Role, Verdict

_log = logging.getLogger("rolecall")

SHOWN = 3
"""Answers that a finding points to."""
_LARGEST = 1e100
"""Numbers beyond are read as this, so that their squares and sums are numbers too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A number over the steps that have it."""

    steps: Sequence[int]
    values: NDArray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def window(self) -> int:
        """Steps that are averaged: a tenth of all, at least three."""
        return max(3, len(self) // 10)

    @property
    def first(self) -> float:
        """The mean over the first window."""
        return float(self.values[: self.window].mean())

    @property
    def last(self) -> float:
        """The mean over the last window."""
        return float(self.values[-self.window :].mean())

    def smooth(self) -> NDArray:
        """The mean of each step and those before it, as many as a window has."""
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        ends = np.arange(1, len(self) + 1)
        begins = np.maximum(ends - self.window, 0)
        return (sums[ends] - sums[begins]) / (ends - begins)

    def lasting(self, holds: Callable[[NDArray], NDArray], *, least: int = 5) -> tuple[int, int] | None:
        """The longest stretch of steps whose smoothed number is so; None below `least` steps or a tenth of the run."""
        best, begun = (0, 0), None
        for i, here in enumerate([*holds(self.smooth()).tolist(), False]):
            if here and begun is None:
                begun = i
            if not here and begun is not None:
                best = max(best, (begun, i), key=lambda run: run[1] - run[0])
                begun = None
        if best[1] - best[0] < max(least, len(self) // 10):
            return None
        return self.steps[best[0]], self.steps[best[1] - 1]

    def mean(self, steps: tuple[int, int]) -> float:
        """The mean over a stretch of steps."""
        return float(np.mean([v for s, v in zip(self.steps, self.values, strict=True) if steps[0] <= s <= steps[1]]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The rollouts file of one step."""

    step: int
    table: pa.Table

    def column(self, name: str) -> NDArray:
        """Numbers, NaN where there is none."""
        return np.array([np.nan if v is None else v for v in self.table[name].to_pylist()], np.float64)

    def lists(self, name: str) -> list[NDArray | None]:
        """A list per answer; None where there is none."""
        return Ragged.read(self.table[name]).arrays()

    def own(self) -> list[NDArray]:
        """The ids that the policy chose, of each answer."""
        ids, roles = Ragged.read(self.table["ids"]), Ragged.read(self.table["roles"]).values
        chosen = (roles == Role.CONTENT) | (roles == Role.STOP)
        return np.split(ids.values[chosen], np.cumsum(ids.sums(chosen)).astype(int)[:-1])

    def cut_off(self) -> NDArray:
        """Whether a limit ended the answer."""
        return np.array(list(map(cut_off, self.table["finish"].to_pylist())))

    def trained(self) -> NDArray:
        """Whether anything of the answer trains."""
        return np.array([v is None or bool((v == Verdict.TRAINED).any()) for v in self.lists("verdicts")])

    def most(self, key: NDArray, tokens: Sequence[int | None] | None = None) -> Evidence:
        """The answers for which `key` is largest, NaN left out; `tokens` names one of each."""
        order = [int(i) for i in np.argsort(-np.nan_to_num(key, nan=-np.inf), kind="stable") if np.isfinite(key[i])]
        return tuple((self.step, i, None if tokens is None else tokens[i]) for i in order[:SHOWN])

    def best(self) -> Evidence:
        """The answers with the highest scores."""
        return self.most(self.column("score"))


@dataclass(kw_only=True)
class RunRecord:
    """A run as checks see it."""

    files: RunFiles
    _read: dict[int, Answers | None] = field(default_factory=dict)

    def curve(self, name: str, *, evaluated: bool = False) -> Curve:
        """A number of metrics.jsonl; empty if the run has none."""
        lines = self.files.evaluations if evaluated else self.files.steps
        whole = (line for line in lines if is_number(line["step"]) and is_number(line.get(name)))
        there = [(int(line["step"]), _within(line[name])) for line in whole]
        return Curve(steps=[s for s, _ in there], values=np.array([v for _, v in there], np.float64))

    def counted(self, name: str) -> Curve:
        """What environments count, which is left out of the steps in which none counted any; empty if none ever did."""
        held = self.curve(name)
        there = dict(zip(held.steps, held.values.tolist(), strict=True))
        steps = self.curve("agents/turns").steps if there else []
        return Curve(steps=steps, values=np.array([there.get(step, 0.0) for step in steps], np.float64))

    def names(self, begin: str, end: str) -> list[str]:
        """The numbers of training whose names begin and end so, without both."""
        found = dict.fromkeys(name for line in self.files.steps for name in line)
        return [n[len(begin) : len(n) - len(end)] for n in found if n.startswith(begin) and n.endswith(end)]

    def option(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name."""
        held: Any = self.files.config
        for part in name.split("."):
            held = held.get(part) if isinstance(held, dict) else None
        return default if held is None else held

    def number(self, name: str, default: float) -> float:
        """A setting that is a number."""
        held = self.option(name)
        return _within(held) if is_number(held) else default

    def more_kl(self) -> str:
        """The setting that holds the policy nearer to its reference."""
        return f"--algorithm.kl_coef {max(1.0, 10 * self.number('algorithm.kl_coef', 0.0)):g}"

    def answers(self, steps: tuple[int, int] | None = None, *, first: bool = False) -> Answers | None:
        """The last recorded step (or the first) within these steps; None if there is none that can be read."""
        low, high = steps or (0, 10**12)
        for step in sorted((s for s in self.files.rollouts if low <= s <= high), reverse=not first):
            if (found := self._answers(step, self.files.rollouts[step])) is not None:
                return found
        return None

    def evidence(self, steps: tuple[int, int] | None, of: Callable[[Answers], Evidence]) -> Evidence:
        """What answers of these steps show, if any are recorded."""
        answers = self.answers(steps)
        return () if answers is None else of(answers)

    def _answers(self, step: int, path: Path) -> Answers | None:
        if step not in self._read:
            self._read[step] = None
            try:
                table = read_table(path, ROLLOUTS)[0]
                _check_lengths(path, table)
                self._read[step] = Answers(step=step, table=table) if len(table) else None
            except FileNotFoundError:  # older steps make room while a run goes on
                pass
            except (StoreError, OSError) as error:
                _log.warning("%s; the doctor continues without it", error)
        return self._read[step]


def _check_lengths(path: Path, table: pa.Table) -> None:
    """Refuse lists that are not about the tokens of their row."""
    wanted = Ragged.read(table["ids"]).lengths
    for name in ("roles", "verdicts", "behaviour_logprobs", *COMPUTED):
        held = Ragged.read(table[name])
        if (held.present & (held.lengths != wanted)).any():
            raise StoreError(f"{path} is damaged: {name} of a row has another length than its ids")


def _within(value: float) -> float:
    return min(max(float(value), -_LARGEST), _LARGEST)
