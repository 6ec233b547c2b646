"""Asynchronous training by a pinned schedule: step s is sampled and scored wholly by version max(0, s - k), beside training.

Which weights answer a step is a function of its number alone, so what is learned does not depend on how long anything takes. With
k = 2, and a row for each thread:

    sampling  step 0 1 2 by v0 | 3 by v1 | 4 by v2 | 5 by v3 …
    training           step 0 -> v1 | step 1 -> v2 | step 2 -> v3 …

With several engines as many steps are sampled at once, each by its own version, in turns:

    engine 0  step 0 by v0 | 2 by v0 | 4 by v2 …
    engine 1  step 1 by v0 | 3 by v1 | 5 by v3 …

What has been sampled for steps that are not trained yet is no part of a checkpoint: it is sampled again, from the k versions
that the checkpoint keeps.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

from rolecall.errors import UserError
from rolecall.recipes.collect import Collected, RowsCollector
from rolecall.rewards.records import Reward, Sample, Scored
from rolecall.rewards.scoring import Scorer, scorer
from rolecall.rollout.pinned import Pinned, Published, Stopped
from rolecall.train.data import RowOrder
from rolecall.train.timing import Timer

_PATIENCE_S = 3.0
"""How long a run that ends waits for what is being sampled or scored to notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What was made for a step."""

    found: Collected
    position: Mapping[str, Any]
    """The collector's state after it."""
    metrics: Mapping[str, float]
    later: Callable[[], Mapping[str, float]]
    """More of them, for which the ranks of a job must meet."""
    seconds: Mapping[str, float]
    hash: str
    """Of the weights that sampled."""


class InOrder(Reward):
    """A reward that steps which are sampled at once share: each scores when those before it have."""

    def __init__(self, reward: Reward, published: Published) -> None:
        self.reward, self.published = reward, published
        self.next = 0
        """The step that scores next."""
        self._own = threading.local()

    @property
    def names(self) -> tuple[str, ...]:
        return self.reward.names

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """What this thread scores inside is of this step."""
        self._own.step, self._own.scores = step, False
        try:
            yield
            self.enter()
            self.next = step + 1
        finally:
            if self._own.scores:
                self.published.scoring.release()
            self.published.wake()

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """As the reward's, after those of the steps before."""
        self.enter()
        return self.reward.score(samples, state=state)

    @contextmanager
    def scoring(self, state: Mapping[str, Any]) -> Iterator[Scorer]:
        """Score samples as they come, from when those of the steps before have their scores."""
        with ExitStack() as stack:
            yield _InTurn(self, lambda: stack.enter_context(scorer(self.reward, state)))

    def take_metrics(self) -> dict[str, float]:
        self.enter()
        found: dict[str, float] = getattr(self.reward, "take_metrics", dict)()
        return found

    def enter(self, *, wait: bool = True) -> bool:
        """Whether this thread's step is the one that scores; with `wait`, when it is."""
        if not self._own.scores and (wait or self.next == self._own.step):
            self.published.wait_until(lambda: self.next == self._own.step)
            self._own.scores = self.published.scoring.acquire(blocking=wait)
        return bool(self._own.scores)


class _InTurn:
    """Keeps samples until their step may be scored."""

    def __init__(self, reward: InOrder, begin: Callable[[], Scorer]) -> None:
        self._reward, self._begin = reward, begin
        self._kept: dict[int, Sample] = {}
        self._scorer: Scorer | None = None

    def add(self, samples: Mapping[int, Sample]) -> None:
        self._kept |= samples

    def poll(self) -> None:
        if self._reward.enter(wait=False):
            self._given().poll()

    def finish(self) -> list[Scored]:
        self._reward.enter()
        return self._given().finish()

    def _given(self) -> Scorer:
        if self._scorer is None:
            self._scorer = self._begin()
        kept, self._kept = self._kept, {}
        self._scorer.add(kept)
        return self._scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What samples every n-th step, if there are n lanes."""

    collector: RowsCollector
    engine: Pinned
    """What the collector samples with."""
    timer: Timer
    """The collector's."""


class Ahead:
    """A `Collector` that lets others work ahead, each in a thread. Steps go to them in turn."""

    def __init__(
        self, lanes: Sequence[Lane], *, reward: InOrder, ahead: int, steps: int, timer: Timer, aside: Timer
    ) -> None:
        """`reward` is what the collectors score with, or around what a single one does. `aside` is the engines' timer; what was measured of a step is added to
        `timer` when the step is trained on."""
        self.lanes, self.published, self.ahead, self.steps = lanes, lanes[0].engine.published, ahead, steps
        self.reward, self.timer, self._aside = reward, timer, aside
        self.rows, order = lanes[0].collector.rows, lanes[0].collector.order
        self.order = RowOrder(order.rows, seed=order.seed) if isinstance(order, RowOrder) else None
        """The rows that were trained on; the collectors' own are ahead of it."""
        self._position = lanes[0].collector.state_dict()
        self._metrics: Mapping[str, float] = {}
        self._hash = self.published.hash()
        self._threads: list[threading.Thread] = []
        self._ready: list[SimpleQueue[_Step | BaseException]] = []
        self._next = -1

    def version(self, step: int) -> int:
        """The version that samples a step."""
        return max(0, step - self.ahead)

    def _oldest(self, step: int) -> int:
        """The oldest version that a step and those after it are sampled by."""
        return self.published.version if self.published.inflight else self.version(step)

    def collect(self, step: int) -> Collected:
        """What was sampled for the step; waits until it is there."""
        if not self._threads or self._next != step:
            self._begin(step)
        with self.timer.phase("wait"):
            made = self._ready[step % len(self.lanes)].get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        last = step if self.published.inflight else self.version(step)
        odd = {t.policy_version for t in made.found.trajectories} - {*range(self.version(step), last + 1)}
        if odd:
            raise RuntimeError(f"step {step + 1} was sampled by version {odd.pop()}, not by {self.version(step)}")
        for name, seconds in made.seconds.items():
            self.timer.add(name, seconds)
        self._stand_at(made.position)
        self._metrics, self._hash, self._next = {**made.metrics, **made.later()}, made.hash, step + 1
        self.published.forget(before=self._oldest(step + 1))
        return made.found

    def take_metrics(self) -> dict[str, float]:
        """What rewards and environments logged of the last step."""
        return dict(self._metrics)

    def hash(self) -> str:
        """The fingerprint of the weights that sampled the last step."""
        return self._hash

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was trained on, and the versions that the next ones are sampled by."""
        published = self.published
        return {**self._position, "published": published.earlier(since=self._oldest(published.version))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what has been sampled since is forgotten."""
        self.close()
        self._stand_at({name: value for name, value in state.items() if name != "published"})
        self.published.restore(state.get("published", {}))

    def close(self) -> None:
        """Break off what is being sampled."""
        self.published.stop()
        until = monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._next = -1

    def _stand_at(self, position: Mapping[str, Any]) -> None:
        self._position = dict(position)
        if self.order is not None:
            self.order.taken = int(position["order"]["taken"])

    def _begin(self, first: int) -> None:
        """Sample from this step on."""
        self.published.stop()
        for thread in self._threads:
            thread.join()
        if gone := self.published.missing(range(self._oldest(first), self.published.version)):
            raise UserError(
                f"step {first + 1} is sampled by version {gone[0]} of the weights with async.ahead {self.ahead}, which the "
                "checkpoint does not hold: resume with the async.ahead that it was saved with, or a smaller one"
            )
        self.published.start()
        self._next = self.reward.next = first
        self._threads, self._ready = [], [SimpleQueue() for _ in self.lanes]
        for step in range(first, first + len(self.lanes)):
            number = step % len(self.lanes)
            collector = self.lanes[number].collector
            collector.load_state_dict(self._position)  # it may have taken rows since
            collector.skip(step - first)
            work = (self.lanes[number], step, self._ready[number])
            self._threads.append(threading.Thread(target=self._run, args=work, name="rolecall-ahead", daemon=True))
        for thread in self._threads:
            thread.start()

    def _run(self, lane: Lane, first: int, ready: "SimpleQueue[_Step | BaseException]") -> None:
        try:
            for step in range(first, self.steps, len(self.lanes)):
                version = self.version(step)
                self.published.wait_for(version)
                with lane.engine.turn(version), self.reward.step(step):
                    ready.put(self._collect(lane, step, lane.engine.hash()))
                lane.collector.skip(len(self.lanes) - 1)
        except Stopped:
            return
        except BaseException as error:
            ready.put(error)

    def _collect(self, lane: Lane, step: int, fingerprint: str) -> _Step:
        found = lane.collector.collect(step)
        metrics = self.reward.take_metrics()
        metrics |= getattr(lane.engine.engine, "metrics", dict)()
        return _Step(
            found=found,
            position=lane.collector.state_dict(),
            metrics=metrics,
            later=getattr(lane.collector, "metrics_later", lambda: dict)(),
            seconds=lane.timer.take() | self._aside.take(),
            hash=fingerprint,
        )
