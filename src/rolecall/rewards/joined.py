"""Several rewards as one: functions in workers, reward models, judges."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rolecall.rewards.records import Reward, RewardError, Sample, Scored
from rolecall.rewards.scoring import Scorer, scorer


def joined(rewards: Sequence[Reward], *, rows: Iterable[str] | None = None) -> Reward:
    """One reward of all of them, whose prompts and functions find their columns among those of the `rows`."""
    names = [name for reward in rewards for name in reward.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RewardError(f"two rewards are called `{twice[0]}`: give them names of your own, {{name: reward}}")
    made = rewards[0] if len(rewards) == 1 else JoinedReward(rewards)
    if rows is not None:
        getattr(made, "check_columns", lambda columns: None)(rows)
    return made


class JoinedReward:
    """The parts of all rewards; the total is the sum of those that are there, and there is none if one failed."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for reward in self.rewards for name in reward.names)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuse rows without a column that one of them needs."""
        there = tuple(columns)
        for reward in self.rewards:
            getattr(reward, "check_columns", lambda columns: None)(there)

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        each = [reward.score(samples, state=state) for reward in self.rewards]
        return [_together(parts) for parts in zip(*each, strict=True)]

    @contextmanager
    def scoring(self, state: Mapping[str, Any]) -> Iterator[Scorer]:
        """Score samples as they come, each reward as it can."""
        with ExitStack() as stack:
            yield _Joined([stack.enter_context(scorer(reward, state)) for reward in self.rewards])

    def take_metrics(self) -> dict[str, float]:
        return {name: value for reward in self.rewards for name, value in reward.take_metrics().items()}


class _Joined:
    """The scorers of all rewards as one."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = scorers

    def add(self, samples: Mapping[int, Sample]) -> None:
        for each in self._scorers:
            each.add(samples)

    def poll(self) -> None:
        for each in self._scorers:
            each.poll()

    def finish(self) -> list[Scored]:
        return [_together(parts) for parts in zip(*(each.finish() for each in self._scorers), strict=True)]


def _together(parts: Sequence[Scored]) -> Scored:
    failures = [part.failure for part in parts if part.failure is not None]
    totals = [part.total for part in parts if part.total is not None]
    return Scored(
        scores={name: score for part in parts for name, score in part.scores.items()},
        total=sum(totals) if totals and not failures else None,
        failure="; ".join(failures) or None,
        extras={name: value for part in parts for name, value in part.extras.items()},
    )
