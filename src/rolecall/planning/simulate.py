"""A simulation of steps: answers of very different lengths on many workers, some of which are slow and some fail.

Each worker grows `slots` answers at a time. A failed one is noticed after `silence` seconds; what it was asked is asked again
elsewhere from its beginning, and it is back after `restart` seconds. Workers, answers and training GPUs grow together, so without
tails, failures and stragglers a step takes the same time at every size.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import exp, log


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """What the workers are like."""

    slots: int
    token_seconds: float
    """For a token of every answer that grows."""
    mean: float
    """Tokens of an answer."""
    spread: float
    """Of the logarithm of its length; 0: all are alike."""
    longest: int
    """Where answers are cut off."""
    train_seconds: float
    """An update, and the weights on their way to the workers."""
    failures_per_day: float = 0.0
    """Of a worker."""
    silence: float = 20.0
    restart: float = 60.0
    slow_share: float = 0.0
    slow_factor: float = 1.5
    """How many times as long a slow worker takes."""

    @property
    def longest_seconds(self) -> float:
        """The longest answer on a slow worker."""
        return self.longest * self.token_seconds * self.slow_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The sampling of one step."""

    seconds: float
    useful: float
    """Seconds of slots in which answers grew that were kept."""
    lost: float
    """Seconds of slots in answers that had to be asked again, and in workers that were down."""


def generation(fleet: Fleet, workers: int, rng: random.Random) -> Generation:
    """As many answers as there are slots, each given to the slot that is free first."""
    slow = [rng.random() < fleet.slow_share for _ in range(workers)]
    rate, down = fleet.failures_per_day / 86400, fleet.silence + fleet.restart

    def next_failure() -> float:
        return rng.expovariate(rate) if rate else float("inf")

    fails = [next_failure() for _ in range(workers)]
    free = [(0.0, i % workers) for i in range(workers * fleet.slots)]
    heapify(free)
    waiting = [(0.0, _length(fleet, rng)) for _ in range(workers * fleet.slots)]
    heapify(waiting)
    end = useful = lost = 0.0
    while waiting:
        asked, length = heappop(waiting)
        ready, worker = heappop(free)
        begun = max(asked, ready)
        if begun >= fails[worker]:  # it failed while this slot was idle, or is back: when will it fail next?
            begun = max(begun, fails[worker] + down)
            fails[worker] = begun + next_failure()
        took = length * fleet.token_seconds * (fleet.slow_factor if slow[worker] else 1.0)
        failed = fails[worker]
        if begun + took <= failed:
            end, useful = max(end, begun + took), useful + took
            heappush(free, (begun + took, worker))
        else:
            lost += failed - begun + down
            heappush(waiting, (failed + fleet.silence, length))
            heappush(free, (failed + down, worker))
    return Generation(seconds=end, useful=useful, lost=lost)


def _length(fleet: Fleet, rng: random.Random) -> float:
    """Log-normal with the given mean before it is cut off."""
    if not fleet.spread:
        return fleet.mean
    drawn = exp(rng.gauss(log(fleet.mean) - fleet.spread**2 / 2, fleet.spread))
    return max(1.0, min(float(fleet.longest), drawn))


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Means over steps."""

    workers: int
    ahead: int | None
    """Steps that sampling is ahead; None: in flight."""
    seconds: float
    """Of a step."""
    sampling: float
    """The share of the slots' time in which kept answers grew."""
    lost: float
    """The share that failures took."""

    @property
    def mode(self) -> str:
        """In words."""
        return "in flight" if self.ahead is None else f"{self.ahead} ahead" if self.ahead else "in turn"

    @property
    def idle(self) -> float:
        """The share in which slots waited: for the longest answers, or for the trainer."""
        return max(0.0, 1.0 - self.sampling - self.lost)


def simulate(fleet: Fleet, workers: int, *, aheads: Sequence[int | None], steps: int, seed: int = 0) -> list[Simulated]:
    """The same steps in a row, so many ahead of training; None: in flight, where no answer is waited for."""
    rng = random.Random(f"{seed}/{workers}")
    sampled = [generation(fleet, workers, rng) for _ in range(steps)]
    return [_in_a_row(fleet, workers, sampled, ahead) for ahead in aheads]


def _in_a_row(fleet: Fleet, workers: int, sampled: Sequence[Generation], ahead: int | None) -> Simulated:
    """Step s is sampled when version s - ahead is there, beside at most ahead - 1 others; all slots together do no more than they
    can. In flight only that counts. The first few are left out."""
    steps, slots = len(sampled), workers * fleet.slots
    done, sampling_ends, training_ends = (
        0.0,
        [0.0] * max(1, ahead or 1),
        [0.0],
    )  # training_ends[v]: when version v is there
    for number, one in enumerate(sampled):
        begun = 0.0 if ahead is None else max(sampling_ends[-max(1, ahead)], training_ends[max(0, number - ahead)])
        done = max(done, begun) + (one.useful + one.lost) / slots
        sampling_ends.append(done if ahead is None else max(done, begun + one.seconds))
        training_ends.append(max(sampling_ends[-1], training_ends[-1]) + fleet.train_seconds)
    first = min((ahead or 0) + 1, steps - 1)
    seconds = (training_ends[-1] - training_ends[first]) / (steps - first)
    counted, there = sampled[first:], slots * seconds * (steps - first)
    return Simulated(
        workers=workers,
        ahead=ahead,
        seconds=seconds,
        sampling=sum(one.useful for one in counted) / there,
        lost=sum(one.lost for one in counted) / there,
    )
