"""What differs first between the numbers of the same step of two runs, where no record of the step says more."""

from typing import Any

_ORDER = (
    ("eval_", "evaluation"),
    ("learning_rate", "setting"),
    ("kl_coef", "setting"),
    ("entropy_coef", "setting"),
    ("epsilon", "setting"),
    ("completions/", "sampled token"),
    ("num_tokens", "sampled token"),
    ("agents/", "observation"),
    ("env_steps", "observation"),
    ("episode_length", "observation"),
    ("reward", "reward"),
    ("return", "reward"),
    ("sampling/", "log-prob"),
    ("entropy", "log-prob"),
    ("kl", "log-prob"),
    ("policy/value", "value"),
    ("policy/advantage", "advantage"),
    ("loss/grad_norm", "gradient"),
    ("loss", "loss"),
    ("grad_norm", "gradient"),
)
"""Beginnings of names in the order in which a step computes them, and what they tell."""

_GIVEN = {"sampled token": "data", "log-prob": "loss", "reward": "loss"}
"""What they tell where answers are given, not sampled."""


def metrics_part(a: dict[str, Any], b: dict[str, Any], *, given: bool = False) -> dict[str, Any] | None:
    """The number that is computed first among those that differ; None if all are the same. `given`: no answer is sampled."""
    differ = [name for name in dict.fromkeys([*a, *b]) if not _same(a.get(name), b.get(name))]
    if not differ:
        return None
    name = min(differ, key=_place)
    place = _place(name)
    kind = _ORDER[place][1] if place < len(_ORDER) else "number"
    kind = _GIVEN.get(kind, kind) if given else kind
    more = f", and {len(differ) - 1} more numbers differ" if len(differ) > 1 else ""
    return {"kind": kind, "sentence": f"{name} is {_shown(a.get(name))} and {_shown(b.get(name))}{more}"}


def _place(name: str) -> int:
    return next((i for i, (begin, _) in enumerate(_ORDER) if name.startswith(begin)), len(_ORDER))


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def _shown(value: Any) -> str:
    return "not there" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)
