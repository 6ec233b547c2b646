"""Scores of samples that come one after the other: at once where a reward can, when all are there where it cannot."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rolecall.rewards.records import Reward, Sample, Scored


class Scorer(Protocol):
    """Takes samples by their numbers. The scores are those of one call of `Reward.score`, in the order of the numbers."""

    def add(self, samples: Mapping[int, Sample]) -> None:
        """More samples. Does not wait for their scores."""
        ...

    def poll(self) -> None:
        """Go on with what was begun; returns at once."""
        ...

    def finish(self) -> list[Scored]:
        """There are no more samples: one result for each."""
        ...


def scorer(reward: Reward, state: Mapping[str, Any]) -> AbstractContextManager[Scorer]:
    """The reward's own, which begins at once, or one that scores all in the end. Until the end of the block nothing else is
    scored by it."""
    found: Any = getattr(reward, "scoring", None)
    made: AbstractContextManager[Scorer] = _in_the_end(reward, state) if found is None else found(state)
    return made


@contextmanager
def _in_the_end(reward: Reward, state: Mapping[str, Any]) -> Iterator[Scorer]:
    yield InTheEnd(reward, state)


class InTheEnd:
    """Of a reward that takes all samples together."""

    def __init__(self, reward: Reward, state: Mapping[str, Any]) -> None:
        self._reward, self._state = reward, state
        self._samples: dict[int, Sample] = {}

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Keep them."""
        self._samples |= samples

    def poll(self) -> None:
        """There is nothing to do yet."""

    def finish(self) -> list[Scored]:
        """Score them."""
        return self._reward.score([self._samples[i] for i in sorted(self._samples)], state=self._state)
