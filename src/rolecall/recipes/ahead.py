"""Asynchronous training by a pinned schedule: step s is sampled and scored wholly by version max(0, s - k), beside training.

Which weights answer a step is a function of its number alone, so what is learned does not depend on how long anything takes. With
k = 2, and a row for each thread:

    sampling  step 0 1 2 by v0 | 3 by v1 | 4 by v2 | 5 by v3 …
    training           step 0 -> v1 | step 1 -> v2 | step 2 -> v3 …

What has been sampled for steps that are not trained yet is no part of a checkpoint: it is sampled again, from the k versions
that the checkpoint keeps.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rolecall.errors import UserError
from rolecall.recipes.collect import Collected, Collector
from rolecall.rewards.records import Reward
from rolecall.rollout.pinned import Pinned, Stopped
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
    seconds: Mapping[str, float]
    hash: str
    """Of the weights that sampled."""


class Ahead:
    """A `Collector` that lets another one, which samples with `engine`, work ahead in a thread."""

    def __init__(
        self,
        collector: Collector,
        engine: Pinned,
        *,
        reward: Reward,
        ahead: int,
        steps: int,
        timer: Timer,
        aside: Timer,
    ) -> None:
        """`reward` is what the collector scores with. `aside` is the collector's timer; what it measured of a step is added to `timer` when the step is trained on."""
        self.collector, self.engine, self.ahead, self.steps = collector, engine, ahead, steps
        self.reward, self.timer, self._aside = reward, timer, aside
        self.rows = getattr(collector, "rows", None)
        order = getattr(collector, "order", None)
        self.order = RowOrder(order.rows, seed=order.seed) if isinstance(order, RowOrder) else None
        """The rows that were trained on; the collector's own is ahead of it."""
        self._position = collector.state_dict()
        self._metrics: Mapping[str, float] = {}
        self._hash = engine.hash()
        self._thread: threading.Thread | None = None
        self._ready: SimpleQueue[_Step | BaseException] = SimpleQueue()
        self._next = -1

    def version(self, step: int) -> int:
        """The version that samples a step."""
        return max(0, step - self.ahead)

    def collect(self, step: int) -> Collected:
        """What was sampled for the step; waits until it is there."""
        if self._thread is None or self._next != step:
            self._begin(step)
        with self.timer.phase("wait"):
            made = self._ready.get()
        if isinstance(made, BaseException):
            self._thread = None
            raise made
        odd = {t.policy_version for t in made.found.trajectories} - {self.version(step)}
        if odd:
            raise RuntimeError(f"step {step + 1} was sampled by version {odd.pop()}, not by {self.version(step)}")
        for name, seconds in made.seconds.items():
            self.timer.add(name, seconds)
        self._stand_at(made.position)
        self._metrics, self._hash, self._next = made.metrics, made.hash, step + 1
        self.engine.published.forget(before=self.version(step + 1))
        return made.found

    def take_metrics(self) -> dict[str, float]:
        """What rewards and environments logged of the last step."""
        return dict(self._metrics)

    def hash(self) -> str:
        """The fingerprint of the weights that sampled the last step."""
        return self._hash

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was trained on, and the versions that the next ones are sampled by."""
        published = self.engine.published
        return {**self._position, "published": published.earlier(since=self.version(published.version))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what has been sampled since is forgotten."""
        self.close()
        self._stand_at({name: value for name, value in state.items() if name != "published"})
        self.collector.load_state_dict(self._position)
        self.engine.published.restore(state.get("published", {}))

    def close(self) -> None:
        """Break off what is being sampled."""
        if self._thread is not None:
            self.engine.stop()
            self._thread.join(_PATIENCE_S)
            if not self._thread.is_alive():
                self._thread = None
        self._next = -1

    def _stand_at(self, position: Mapping[str, Any]) -> None:
        self._position = dict(position)
        if self.order is not None:
            self.order.taken = int(position["order"]["taken"])

    def _begin(self, step: int) -> None:
        """Sample from this step on."""
        if self._thread is not None:
            self.engine.stop()
            self._thread.join()
            self.collector.load_state_dict(self._position)  # it may have taken rows since
        newest = self.engine.published.version
        if gone := self.engine.published.missing(range(self.version(step), newest)):
            raise UserError(
                f"step {step + 1} is sampled by version {gone[0]} of the weights with async.ahead {self.ahead}, which the "
                "checkpoint does not hold: resume with the async.ahead that it was saved with, or a smaller one"
            )
        self.engine.start()
        self._ready, self._next = SimpleQueue(), step
        self._thread = threading.Thread(target=self._run, args=(step, self._ready), name="rolecall-ahead", daemon=True)
        self._thread.start()

    def _run(self, first: int, ready: "SimpleQueue[_Step | BaseException]") -> None:
        published = self.engine.published
        try:
            for step in range(first, self.steps):
                version = self.version(step)
                published.wait_for(version, lambda: self.engine.stopped)
                with published.turn(version):
                    ready.put(self._collect(step, published.hash(version)))
        except Stopped:
            return
        except BaseException as error:
            ready.put(error)

    def _collect(self, step: int, fingerprint: str) -> _Step:
        found = self.collector.collect(step)
        return _Step(
            found=found,
            position=self.collector.state_dict(),
            metrics=getattr(self.reward, "take_metrics", dict)()
            | getattr(self.collector, "take_metrics", dict)()
            | getattr(self.engine.published.engine, "metrics", dict)(),
            seconds=self._aside.take(),
            hash=fingerprint,
        )
