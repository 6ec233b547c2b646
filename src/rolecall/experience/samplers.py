"""Which groups, and which of their answers, are replayed: functions of what is known of them.

A sampler takes the groups that may be used and says in which order they are; as many as are wanted are taken from the front. `rng` is the
only source of chance, and ties go to the group that was added last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, isfinite

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a sampler knows of a group."""

    version: int
    """The weights that sampled it; its oldest answer's."""
    uses: int
    """Steps it was replayed in."""
    scores: Sequence[float]
    """Of the answers whose reward did not fail."""
    solved: int
    """How many of them are solved."""


Sampler = Callable[[Sequence[Known], np.random.Generator], list[int]]
"""(groups, oldest first; chance) -> all their indices, the one to take first at the front."""


def recent(groups: Sequence[Known], rng: np.random.Generator) -> list[int]:
    """The newest first."""
    return _by(groups, lambda group: group.version)


def highest(groups: Sequence[Known], rng: np.random.Generator) -> list[int]:
    """The highest mean score first. RePO's highest-k, on groups."""
    return _by(groups, lambda group: float(np.mean(group.scores)) if group.scores else -np.inf)


def max_variance(groups: Sequence[Known], rng: np.random.Generator) -> list[int]:
    """Those whose scores differ most first. RePO's max-variance, on groups."""
    return _by(groups, lambda group: float(np.var(group.scores)) if group.scores else -np.inf)


def random(groups: Sequence[Known], rng: np.random.Generator) -> list[int]:
    """In any order."""
    return [int(i) for i in rng.permutation(len(groups))]


def difficulty(groups: Sequence[Known], rng: np.random.Generator) -> list[int]:
    """ExGRPO, arXiv 2510.02245: buckets by the number of solved answers k of n, drawn with probability proportional to
    exp(-(k - n/2)^2 / 2); within a bucket, any. Prompts that are half solved come most often."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for i in rng.permutation(len(groups)):
        group = groups[int(i)]
        buckets.setdefault((group.solved, len(group.scores)), []).append(int(i))
    order: list[int] = []
    while buckets:
        places = sorted(buckets)
        chances = np.array([exp(-((k - n / 2) ** 2) / 2) for k, n in places])
        # Very uneven buckets underflow to 0 together: then each is as good as the other.
        chances = chances / chances.sum() if chances.sum() > 0 else np.full(len(places), 1 / len(places))
        place = places[int(rng.choice(len(places), p=chances))]
        order.append(buckets[place].pop())
        if not buckets[place]:
            del buckets[place]
    return order


def by_version_and_uses(decay: float) -> Sampler:
    """Trinity-RFT's priority: version - decay x uses, the highest first."""
    return lambda groups, rng: _by(groups, lambda group: group.version - decay * group.uses)


SAMPLERS: dict[str, Sampler] = {
    "recent": recent,
    "highest": highest,
    "max_variance": max_variance,
    "difficulty": difficulty,
    "random": random,
}


def answers_of(
    scores: Sequence[float | None], sureness: Sequence[float], k: int, *, sampler: str, rng: np.random.Generator
) -> list[int]:
    """k answers of a group, in their order: the highest scores, the subset of largest variance, the surest (for
    `difficulty`: ExGRPO takes those of lowest entropy), or any. `sureness` is a mean log-prob; failed ones come last."""
    if k >= len(scores):
        return list(range(len(scores)))
    held = [i for i, score in enumerate(scores) if score is not None]
    failed = [i for i, score in enumerate(scores) if score is None]
    if sampler == "highest":
        held.sort(key=lambda i: -_number(scores[i]))
    elif sampler == "max_variance":
        held = widest(scores, held, k)
    elif sampler == "difficulty":
        held.sort(key=lambda i: -sureness[i] if isfinite(sureness[i]) else np.inf)
    else:
        held = [held[int(i)] for i in rng.permutation(len(held))]
    return sorted((held + failed)[:k])


def widest(scores: Sequence[float | None], held: Sequence[int], k: int) -> list[int]:
    """The k of `held` whose scores have the largest variance: some of the lowest with the rest of the highest.

    Sorted, a subset of largest variance is a prefix and a suffix, so that k + 1 candidates replace all combinations.
    """
    order = sorted(held, key=lambda i: _number(scores[i]))
    if k >= len(order):
        return order
    candidates = [order[:low] + order[len(order) - (k - low) :] for low in range(k + 1)]
    return max(candidates, key=lambda chosen: float(np.var([_number(scores[i]) for i in chosen])))


def _by(groups: Sequence[Known], worth: Callable[[Known], float]) -> list[int]:
    return sorted(range(len(groups)), key=lambda i: (worth(groups[i]), i), reverse=True)


def _number(score: float | None) -> float:
    return -np.inf if score is None else score
