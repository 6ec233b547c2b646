"""A buffer of groups to train on again, with limits on age, uses and size that are never exceeded.

It holds what the behaviour left behind (tokens, roles, log-probs, version, rewards by part) and where that stands in the
rollouts files; advantages are computed again each time. Sampling never waits: what cannot be found is said, not sought.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, isfinite, nan
from typing import Any

import numpy as np
import torch

from rolecall.experience.batches import flat_supports, split_supports
from rolecall.maths.roles import Role
from rolecall.types import Finish, Trajectory


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """The answers to one prompt, as they were sampled and scored."""

    step: int
    """The step whose rollouts file holds them, from 1."""
    places: tuple[int, ...]
    """The row of each answer in that file."""
    row: int
    """The row of the data they answer."""
    trajectories: tuple[Trajectory, ...]
    totals: tuple[float | None, ...]
    """What the rewards gave each, before clipping and penalties; None if one failed."""
    uses: int = 0
    """Steps it was replayed in."""

    def __post_init__(self) -> None:
        if not len(self.trajectories) == len(self.totals) == len(self.places) > 0:
            raise ValueError(
                f"group {self.group}: {len(self.trajectories)} answers, {len(self.totals)} totals and "
                f"{len(self.places)} places do not fit together"
            )

    @property
    def group(self) -> int:
        """Its number in the run."""
        return self.trajectories[0].group if self.trajectories else -1

    @property
    def version(self) -> int:
        """The weights that sampled it; its oldest answer's."""
        return min(t.policy_version for t in self.trajectories)

    @property
    def scored(self) -> list[float]:
        """The totals that are there."""
        return [total for total in self.totals if total is not None]

    @property
    def flat(self) -> bool:
        """Nothing to compare: fewer than two different totals, though there is more than one answer."""
        return len(self.totals) > 1 and len(set(self.scored)) < 2

    def only(self, chosen: Sequence[int]) -> "StoredGroup":
        """Some of its answers."""
        return replace(
            self,
            places=tuple(self.places[i] for i in chosen),
            trajectories=tuple(self.trajectories[i] for i in chosen),
            totals=tuple(self.totals[i] for i in chosen),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What was taken from a buffer."""

    groups: tuple[StoredGroup, ...]
    wanted: int
    """How many were asked for."""
    why: str = ""
    """Why there are fewer, in words; empty if there are not."""

    @property
    def missing(self) -> int:
        """How many were asked for and not found."""
        return self.wanted - len(self.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a buffer never exceeds."""

    size: int
    """Groups held."""
    max_staleness: int
    """Versions between a group's weights and those it is replayed under."""
    max_uses: int
    """Times a group is drawn."""


class ReplayBuffer:
    """Groups in the order they came, the oldest first."""

    def __init__(
        self,
        limits: Limits,
        *,
        sampler: str,
        seed: int,
        answers: int | None = None,
        keep_flat: bool = False,
        solved_at: float = 1.0,
        version_decay: float = 2.0,
    ) -> None:
        self.limits, self.answers, self.keep_flat, self.solved_at = limits, answers, keep_flat, solved_at
        self._name, self._seed = sampler, seed
        self._order = by_version_and_uses(version_decay) if sampler == "version_decay" else SAMPLERS[sampler]
        self._groups: list[StoredGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> tuple[StoredGroup, ...]:
        """What is held, the oldest first."""
        return tuple(self._groups)

    def add(self, groups: Sequence[StoredGroup]) -> None:
        """Take in groups that have something to learn from; the oldest make room."""
        self._groups += [group for group in groups if self._worth_keeping(group)]
        del self._groups[: max(0, len(self._groups) - self.limits.size)]

    def draw(self, count: int, *, version: int, step: int) -> Drawn:
        """Up to `count` different groups for an update that starts from `version`; each is used once more by it.

        Chance depends on the buffer's seed and the step alone, so there is no state of it to keep.
        """
        held = len(self._groups)
        young = [g for g in self._groups if version - g.version <= self.limits.max_staleness]
        self._groups = [g for g in young if g.uses < self.limits.max_uses]  # a group never gets younger or less used
        rng = np.random.default_rng([self._seed, step, 0, len("replay")])
        order = self._order([self._known(group) for group in self._groups], rng)[:count]
        drawn = [self._groups[i] for i in order]
        for i in order:
            self._groups[i] = replace(self._groups[i], uses=self._groups[i].uses + 1)
        why = ""
        if len(drawn) < count:
            why = (
                f"{len(drawn)} of {count} groups found: {held} were held, of which {held - len(young)} were older than "
                f"{self.limits.max_staleness} versions and {len(young) - len(self._groups)} used {self.limits.max_uses} times"
            )
        return Drawn(groups=tuple(self._chosen(group, rng) for group in drawn), wanted=count, why=why)

    def mark(self) -> Callable[[], None]:
        """This moment, to come back to; groups never change, so the list of them is enough."""
        held = list(self._groups)

        def back() -> None:
            self._groups = held

        return back

    def state_dict(self) -> dict[str, Any]:
        """Everything that is held, as `train.state` saves it exactly."""
        return _packed(self._groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what was held then, within the limits of now."""
        self._groups = []
        self.add(_unpacked(state))

    def clear(self) -> None:
        """Hold nothing."""
        self._groups = []

    def _worth_keeping(self, group: StoredGroup) -> bool:
        return bool(group.scored) and (self.keep_flat or not group.flat)

    def _known(self, group: StoredGroup) -> Known:
        solved = sum(total >= self.solved_at for total in group.scored)
        return Known(version=group.version, uses=group.uses, scores=group.scored, solved=solved)

    def _chosen(self, group: StoredGroup, rng: np.random.Generator) -> StoredGroup:
        if self.answers is None:
            return group
        rows: dict[int, list[int]] = {}  # the trajectories of an episode stay together
        for i, t in enumerate(group.trajectories):
            rows.setdefault(t.episode, []).append(i)
        totals = [group.totals[first] for first, *_ in rows.values()]
        sure = [_sureness([group.trajectories[i] for i in own]) for own in rows.values()]
        chosen = answers_of(totals, sure, self.answers, sampler=self._name, rng=rng)
        return group.only([i for which in chosen for i in list(rows.values())[which]])


def _sureness(trajectories: Sequence[Trajectory]) -> float:
    """The mean log-prob that the policy gave what it chose."""
    chosen = [
        logprob
        for t in trajectories
        if t.behaviour_logprobs is not None
        for logprob, role in zip(t.behaviour_logprobs, t.roles, strict=True)
        if role in (Role.CONTENT, Role.STOP)
    ]
    return float(np.mean(chosen)) if chosen else -np.inf


_TOKENS = {"ids": torch.int64, "roles": torch.uint8, "behaviour_logprobs": torch.float32}
"""Per-token fields, as tensors; log-probs are float32 in batches and files too."""
_PLAIN = tuple(
    f.name for f in fields(Trajectory) if f.name not in (*_TOKENS, "finish", "scores", "supports", "versions")
)
_OF_GROUP = ("step", "places", "row", "totals", "uses")


def _packed(groups: Sequence[StoredGroup]) -> dict[str, Any]:
    """Groups as plain values, and all their tokens end to end in one tensor per field."""
    trajectories = [t for group in groups for t in group.trajectories]
    rows = [
        {name: getattr(t, name) for name in _PLAIN}
        | {
            "finish": str(t.finish),
            "scores": dict(t.scores),
            "length": len(t.ids),
            "sampled": t.behaviour_logprobs is not None,
        }
        | ({} if t.versions is None else {"versions": t.versions})
        for t in trajectories
    ]
    return {
        "groups": [{name: getattr(group, name) for name in _OF_GROUP} for group in groups],
        "trajectories": rows,
        **_packed_supports(trajectories),
        **{
            name: torch.tensor(
                [entry for t in trajectories for entry in getattr(t, name) or (nan,) * len(t.ids)], dtype=dtype
            )
            for name, dtype in _TOKENS.items()
        },
    }


def _packed_supports(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Nothing if no vocabulary was cut."""
    if all(t.supports is None for t in trajectories):
        return {}
    ids, counts = flat_supports([t.supports for t in trajectories], [len(t.ids) for t in trajectories])
    return {"supports": torch.from_numpy(ids.copy()), "support_counts": torch.from_numpy(counts)}


def _unpacked(state: Mapping[str, Any]) -> list[StoredGroup]:
    lengths = [row["length"] for row in state["trajectories"]]
    tokens = {name: [tuple(part.tolist()) for part in state[name].split(lengths)] for name in _TOKENS if lengths}
    supports: list[tuple[bytes, ...] | None] = [None] * len(lengths)
    if "supports" in state:
        supports = split_supports(state["supports"].numpy(), state["support_counts"].numpy(), lengths)
    trajectories = []
    for i, row in enumerate(state["trajectories"]):
        own: dict[str, Any] = {
            name: held[i] for name, held in tokens.items() if name != "behaviour_logprobs" or row["sampled"]
        }
        plain = {name: row[name] for name in _PLAIN} | {"supports": supports[i], "versions": row.get("versions")}
        trajectories.append(Trajectory(**plain, **own, scores=row["scores"], finish=Finish(row["finish"])))
    groups, start = [], 0
    for group in state["groups"]:
        end = start + len(group["totals"])
        groups.append(StoredGroup(trajectories=tuple(trajectories[start:end]), **group))
        start = end
    return groups
