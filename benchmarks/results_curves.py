"""Finished runs as curves, and the pieces that the pages of results are made of."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_draw import Line
from results_runs import Place, is_done

SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A run's held-out accuracy over its steps."""

    path: Path
    evaluations: Sequence[dict[str, Any]]
    metrics: Sequence[dict[str, Any]]
    seconds: Sequence[float]
    """RL seconds spent after each step: sampling, scoring and updating, without evaluations and saving."""

    @property
    def start(self) -> float:
        """Before the first step."""
        return self.evaluations[0]["eval_accuracy"]

    @property
    def end(self) -> float:
        """After the last step."""
        return self.evaluations[-1]["eval_accuracy"]

    def time_to(self, goal: float) -> float | None:
        """RL seconds until an evaluation first reached it."""
        for e in self.evaluations:
            if e["eval_accuracy"] >= goal and e["step"]:
                return self.seconds[e["step"] - 1]
        return None

    def within(self, limit: float) -> float:
        """The last accuracy that was measured within so many seconds of RL."""
        done = [e for e in self.evaluations if not e["step"] or self.seconds[e["step"] - 1] <= limit]
        return done[-1]["eval_accuracy"]


def read(path: Path) -> Curve:
    """A finished run."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    total, seconds = 0.0, []
    for line in (path / "timing.jsonl").read_text().splitlines():
        total += json.loads(line)["step_time"]
        seconds.append(total)
    return Curve(
        path=path,
        evaluations=[line for line in lines if "eval_accuracy" in line],
        metrics=[line for line in lines if "loss" in line],
        seconds=seconds,
    )


def curves(place: Place, folder: str, name: str) -> list[Curve]:
    """The finished runs of a name, a seed each."""
    paths = [place.root / folder / f"{name}-seed-{seed}" for seed in SEEDS]
    return [read(path) for path in paths if is_done(path)]


def band(runs: Sequence[Curve], key: str = "eval_accuracy") -> Line:
    """Mean, lowest and highest by step."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for e in run.evaluations:
            by_step.setdefault(e["step"], []).append(e[key])
    return [(float(step), statistics.mean(v), min(v), max(v)) for step, v in sorted(by_step.items())]


def spread(values: Sequence[float], form: str = ".1%") -> str:
    """Mean [lowest, highest]; of one value, that one."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} [{min(values):{form}}, {max(values):{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """As Markdown."""
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def seeds(runs: Sequence[Any]) -> str:
    """How many, in words."""
    return "one seed" if len(runs) == 1 else f"{len(runs)} seeds"


def save(path: Path, text: str) -> None:
    """Write a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
