"""Several seeds on each side: how far apart two sides are, and whether that is more than noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolecall.look.compare import ends_of
from rolecall.look.run import RunFiles

LEVEL = 0.95
"""Of the confidence intervals."""
_MAIN = (
    "reward",
    "return",
    "loss",
    "accuracy",
    "entropy",
    "kl",
    "completions/mean_length",
    "completions/clipped_ratio",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDifference:
    """A number at the end of the runs of two sides: the mean of its last tenth, or the last evaluation."""

    name: str
    means: tuple[float, float]
    difference: float
    """The second side less the first."""
    interval: tuple[float, float]
    """Where the difference lies with 95 % confidence (Welch's t)."""
    more_than_noise: bool
    """Zero lies outside the interval."""
    main: bool
    """One of the numbers that are printed; the others are in the JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SidesDifference:
    """Two sides of several runs each."""

    runs: tuple[tuple[str, ...], tuple[str, ...]]
    seeds: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    metrics: tuple[MetricDifference, ...]
    sentence: str
    """Whether the sides differ by more than noise."""


def sides_differ(one: Sequence[RunFiles], two: Sequence[RunFiles]) -> SidesDifference:
    """Compare the ends of the runs of two sides, at least two each."""
    ends = [[ends_of(run) for run in side] for side in (one, two)]
    names = [name for name in ends[0][0] if all(name in held for side in ends for held in side)]
    if {"reward", "return"} & set(names):  # then the loss says nothing of how good a policy is
        names = [name for name in names if name != "loss"]
    metrics = tuple(_compare(name, *([held[name] for held in side] for side in ends)) for name in names)
    return SidesDifference(
        runs=(tuple(str(run.path) for run in one), tuple(str(run.path) for run in two)),
        seeds=(tuple(map(_seed, one)), tuple(map(_seed, two))),
        metrics=metrics,
        sentence=_sentence(metrics, len(one), len(two)),
    )


def _seed(run: RunFiles) -> int | None:
    held = run.about.get("seed")
    return held if isinstance(held, int) else None


def _compare(name: str, one: Sequence[float], two: Sequence[float]) -> MetricDifference:
    a, b = np.clip(one, -1e100, 1e100), np.clip(two, -1e100, 1e100)  # so that squares are numbers
    difference = float(b.mean() - a.mean())
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    error = float(np.sqrt(sum(parts)))
    wide = 0.0
    if error > 0:
        freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
        wide = error * t_quantile((1 + LEVEL) / 2, float(freedom))
    return MetricDifference(
        name=name,
        means=(float(a.mean()), float(b.mean())),
        difference=difference,
        interval=(difference - wide, difference + wide),
        more_than_noise=abs(difference) > wide,
        main=name in _MAIN or name.startswith("eval_"),
    )


def t_quantile(share: float, freedom: float) -> float:
    """The value that Student's t with so many degrees of freedom stays below with this probability.

    With t = sqrt(n) tan(x) the density is proportional to cos(x)^(n - 1); n is at least 1, a normal one in the limit.
    """
    x = np.linspace(-np.pi / 2, np.pi / 2, 200_001)[1:-1]
    density = np.cos(x) ** (freedom - 1)
    below = np.cumsum(density)
    return float(np.sqrt(freedom) * np.tan(np.interp(share, (below - density / 2) / below[-1], x)))


def _sentence(metrics: Sequence[MetricDifference], one: int, two: int) -> str:
    shown = [metric for metric in metrics if metric.main]
    apart = [metric.name for metric in shown if metric.more_than_noise]
    runs = f"{one} against {two} runs"
    if not shown:
        return f"{runs}: no number that both sides have says how good they are"
    by_chance = f"of {len(shown)} numbers about {len(shown) * (1 - LEVEL):.1f} would be by chance"
    if not apart:
        return f"{runs}: no difference is more than noise"
    return f"{runs}: {', '.join(apart)} {'differs' if len(apart) == 1 else 'differ'} by more than noise ({by_chance})"
