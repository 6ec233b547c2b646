"""Which curves a run has: the numbers of its logs, put together so that those that belong together share a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    label: str
    ys: Sequence[float | None]
    """A value per step; None where there is none."""
    low: Sequence[float | None] | None = None
    """The lower edge of a band around the line; None for no band."""
    high: Sequence[float | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over steps."""

    name: str
    """For file names and ids: letters, digits and dashes."""
    title: str
    about: str
    """What it shows, for people who see it for the first time."""
    xs: Sequence[int]
    """Steps."""
    series: Sequence[Series]
    stacked: bool = False
    """The lines are parts of a whole."""
    marks: Sequence[tuple[int, int, str]] = ()
    """Stretches to shade: first step, last step, and why."""
    sparse: bool = False
    """Lines go on over steps without a value, which belong to other lines."""


_KNOWN: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Return", "Mean return of a step's episodes.", {"return": "return"}),
    ("Episode length", "Steps per episode.", {"episode_length": "mean"}),
    ("Episodes cut off", "Share of episodes that a limit ended.", {"truncated_ratio": "cut off"}),
    ("Loss", "What the optimiser minimises; near 0 is normal where advantages are centred.", {"loss": "loss"}),
    ("Right pairs", "Share of training pairs whose better answer scores higher.", {"accuracy": "accuracy"}),
    ("Margin", "Score of the chosen answer minus that of the rejected one.", {"margin": "margin"}),
    ("KL to the reference", "How far the policy has moved from the frozen reference, per token.", {"kl": "KL"}),
    ("KL of an update", "How far one update moves the policy from the one it began with.", {"policy/approx_kl": "KL"}),
    ("Entropy", "How undecided the policy is per token; a fall to 0 ends exploration.", {"entropy": "entropy"}),
    (
        "Length",
        "Tokens per answer, the stop token included.",
        {"completions/mean_length": "mean", "completions/max_length": "longest", "completions/min_length": "shortest"},
    ),
    ("Truncation", "Share of answers cut off by a limit.", {"completions/clipped_ratio": "cut off"}),
    (
        "Clip fractions",
        "Share of trained tokens that the clipped loss no longer pushes.",
        {"clip_ratio/low_mean": "below", "clip_ratio/high_mean": "above"},
    ),
    (
        "Flat groups",
        "Share of answers whose group scored all the same: nothing to compare.",
        {"frac_reward_zero_std": "flat"},
    ),
    (
        "Explained variance",
        "Share of the returns that the critic foresees; below 0 it is worse than a constant.",
        {"critic/explained_variance": "explained"},
    ),
    ("Gradient norm", "Size of the gradient before clipping.", {"grad_norm": "norm"}),
    (
        "Sampler against trainer",
        "Mean difference of log-probs between the engine and the trainer.",
        {"sampling/sampling_logp_difference/mean": "difference"},
    ),
    ("Trained share", "Share of all positions that count in the loss.", {"trained_share": "trained"}),
    ("Learning rate", "As the schedule sets it.", {"learning_rate": "rate"}),
)
"""Charts by title: what each shows, and its lines as name in the log and label."""
_EVALUATED = ("eval_reward", "eval_accuracy", "eval_return")
ACCURACY = "the share of greedy answers that score 1 or more"
"""What `eval_accuracy` is, which a graded reward does not say by itself."""
PAIRS = ("rm", "dpo")
"""Commands whose accuracy is of pairs instead."""
_ALIASES = frozenset({"loss/total", "loss/grad_norm", "policy/entropy", "clip_ratio/region_mean", "lost_lines"})
_PHASES = ("generate", "reward", "score", "rest of collect", "update", "sync", "evaluate", "save")


def charts(
    steps: Sequence[Line], evaluations: Sequence[Line], timing: Sequence[Line], *, pairs: bool = False, least: int = 2
) -> tuple[list[Chart], list[Chart]]:
    """The curves that everybody wants, and one for each other number.

    `pairs`: the accuracy is of pairs, not of answers. Evaluations are shown from `least` of them on.
    """
    numbers = _Numbers(steps)
    main = _reward(numbers)
    used = {"reward", *numbers.parts, *_ALIASES}
    evaluated = _Numbers(evaluations)
    for name in _EVALUATED if len(evaluated.xs) >= least else ():
        word = name.removeprefix("eval_")
        about = "On what is not trained on" + (f": {ACCURACY}." if word == "accuracy" and not pairs else ".")
        main += evaluated.chart(f"Evaluated {word}", about, {name: word})
    for title, about, lines in _KNOWN:
        used |= lines.keys()
        main += numbers.chart(title, about, lines)
    terms = [name for name in numbers.names if name.startswith("loss/") and name not in used]
    used |= set(terms)
    if len(terms) > 1:
        labels = {name: name.removeprefix("loss/") for name in terms}
        main += numbers.chart("Loss terms", "Each term before its coefficient.", labels)
    main += _time(timing)
    rest = [chart for name in numbers.names if name not in used for chart in numbers.chart(name, "", {name: name})]
    for name in evaluated.names if len(evaluated.xs) >= least else ():
        rest += evaluated.chart(name, "", {name: name}) if name not in _EVALUATED else []
    return main, rest


class _Numbers:
    """Lines of a log as columns."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.xs = [int(line["step"]) for line in lines]
        self.names = [name for name in names_of(lines) if any(is_number(line.get(name)) for line in lines)]

    @property
    def parts(self) -> list[str]:
        """The parts of the reward."""
        return [name for name in self.names if name.startswith("rewards/") and name.endswith("/mean")]

    def chart(self, title: str, about: str, wanted: Mapping[str, str]) -> list[Chart]:
        """A chart of the wanted names by their labels; none if no line has any of them."""
        series = [Series(label=label, ys=self.column(name)) for name, label in wanted.items() if name in self.names]
        return [Chart(name=slug(title), title=title, about=about, xs=self.xs, series=series)] if series else []

    def column(self, name: str) -> list[float | None]:
        held: list[Any] = [line.get(name) for line in self.lines]
        if {*map(type, held)} == {float} and isfinite(sum(held)):  # most are; asking each takes five times as long
            return held
        return [float(value) if is_number(value) else None for value in held]


def _reward(numbers: "_Numbers") -> list[Chart]:
    """The reward, by part where it has several."""
    labels = {name: name.removeprefix("rewards/").removesuffix("/mean") for name in numbers.parts}
    if "reward" not in numbers.names:  # a reward model's two sides
        return numbers.chart("Scores", "Mean score of each side of the pairs.", labels)
    if len(labels) < 2:
        return numbers.chart("Reward", "Mean score of a step's answers.", {"reward": "total"})
    about = "Mean score of a step's answers, and its parts before their weights."
    return numbers.chart("Reward", about, {"reward": "total", **labels})


def _time(timing: Sequence[Line]) -> list[Chart]:
    """Seconds by phase, as parts that add up: a phase in the log also counts the phases within it."""
    rows = []
    for line in timing:
        held = {name: float(value) for name, value in line.items() if name != "step" and is_number(value)}
        inner = sum(held.get(name, 0.0) for name in ("generate", "reward", "score"))
        held["rest of collect"] = max(0.0, held.pop("collect", inner) - inner)
        held["update"] = max(0.0, held.get("update", 0.0) - held.get("sync", 0.0))
        rows.append(held)
    series = [
        Series(label=name, ys=[row.get(name, 0.0) for row in rows])
        for name in _PHASES
        if any(row.get(name, 0.0) > 0 for row in rows)
    ]
    if not series:
        return []
    xs = [int(line["step"]) for line in timing]
    about = "Seconds per step and where they go."
    return [Chart(name="time", title="Time by phase", about=about, xs=xs, series=series, stacked=True)]


def names_of(lines: Sequence[Line]) -> list[str]:
    """All names in lines of a log, in the order in which they first come."""
    names: dict[str, Any] = {}
    for line in lines:
        names.update(line)
    names.pop("step", None)
    return list(names)


def is_number(value: object) -> bool:
    """A number that is one: neither nan nor infinite nor a truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def four_digits(value: Any) -> str:
    """A number for a table, whole ones up to a million in full; a dash for what is none."""
    return "–" if not is_number(value) else f"{value:.0f}" if 9999.5 <= abs(value) < 1e6 else f"{value:.4g}"


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    """The mean of a number over lines of a log; None if none has it."""
    held = [float(line[name]) for line in lines if is_number(line.get(name))]
    return sum(held) / len(held) if held else None


def slug(title: str) -> str:
    """A name for files and ids."""
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in title.lower()).split()) or "curve"
