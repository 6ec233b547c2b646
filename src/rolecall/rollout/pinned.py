"""Versions of the weights that stay for sampling while the trainer goes on.

The trainer's engine is `Published`: `load` keeps a copy of the weights under their version. `Pinned` is the engine of whoever
samples ahead: it answers by the version whose turn it is, whatever has been published since. Both sample with one engine, one
at a time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.policy.sharded import whole
from rolecall.rollout.engine import Engine, Flight, weights_hash
from rolecall.rollout.stops import Ticket
from rolecall.types import Completion, Request


class Stopped(Exception):
    """Nobody waits for these answers any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    weights: dict[str, Tensor]
    """On the CPU, in the engine's dtype."""
    hash: str
    how: Mapping[str, Any]
    """What else the engine's `load` must be given: what the trainer said of the probe when the version was its own."""


class Published(Engine):
    """The engine as the trainer sees it: of the newest version. It holds every version until `forget`."""

    def __init__(self, engine: Engine, weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
        """`weights` are what `engine` begins with, and `dtype` is what it samples in."""
        self.engine, self.dtype = engine, dtype
        self._versions: dict[int, _Version] = {}
        self._changed = threading.Condition()
        self._turn, self._depth = threading.RLock(), 0
        self.load(weights, engine.version)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish a version: nothing that is sampled now is disturbed."""
        copy = {name: whole(w.detach()).to("cpu", self.dtype, copy=True) for name, w in weights.items()}
        how = {"scores": self.engine.expects()} if hasattr(self.engine, "expects") else {}
        made = _Version(weights=copy, hash=weights_hash(copy, self.dtype), how=how)
        with self._changed:
            self._versions[version], self.version = made, version
            self._changed.notify_all()

    def hash(self, version: int | None = None) -> str:
        """The fingerprint of a version, by default the newest."""
        return self._versions[self.version if version is None else version].hash

    def open(self) -> Flight:
        """A flight of the engine, inside a `turn`."""
        return self.engine.open()

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers of the newest version."""
        with self.turn():
            yield from self.engine.stream(requests)

    @contextmanager
    def turn(self, version: int | None = None) -> Iterator[None]:
        """Nobody else samples meanwhile, and answers are of this version, by default the newest. A turn within a turn is the
        same one."""
        with self._turn:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._take(self.version if version is None else version)
                yield
            finally:
                self._depth -= 1

    def _take(self, version: int) -> None:
        """Always anew: what an engine has cached of earlier turns depends on when they came."""
        held = self._versions[version]
        self.engine.load(held.weights, version, **held.how)
        if (found := self.engine.hash()) != held.hash:
            raise RuntimeError(f"the weights of version {version} reached the engine changed: {found} for {held.hash}")

    def alone(self, evaluate: Callable[[int], Any]) -> Callable[[int], Any]:
        """An evaluation that waits for its turn, and by which nothing else is sampled or scored."""

        def evaluate_alone(step: int) -> Any:
            with self.turn():
                return evaluate(step)

        return evaluate_alone

    def wait_for(self, version: int, stopped: Callable[[], bool]) -> None:
        """Return when the version is there."""
        with self._changed:
            self._changed.wait_for(lambda: version in self._versions or stopped())
        if stopped():
            raise Stopped

    def wake(self) -> None:
        """Let those who wait look whether they are stopped."""
        with self._changed:
            self._changed.notify_all()

    def missing(self, versions: Iterable[int]) -> list[int]:
        """Those of the versions that were published once, and are not there."""
        return [v for v in versions if v <= self.version and v not in self._versions]

    def forget(self, *, before: int) -> None:
        """Drop all versions before this one."""
        with self._changed:
            self._versions = {v: held for v, held in self._versions.items() if v >= before}

    def earlier(self, *, since: int) -> dict[int, dict[str, Any]]:
        """The versions from `since` on, but for the newest, which is the policy's own."""
        found = {v: held for v, held in self._versions.items() if since <= v < self.version}
        return {v: {"weights": held.weights, "how": dict(held.how)} for v, held in found.items()}

    def restore(self, versions: Mapping[int, Mapping[str, Any]]) -> None:
        """Put back what `earlier` gave; the newest must be loaded after it, if another is meant."""
        newest = self._versions[self.version]
        found = {
            v: _Version(weights=dict(one["weights"]), hash=weights_hash(one["weights"], self.dtype), how=one["how"])
            for v, one in versions.items()
        }
        with self._changed:
            self._versions = {**found, self.version: newest}


class Pinned(Engine):
    """The engine as whoever samples ahead sees it: of the version whose turn it is."""

    def __init__(self, published: Published) -> None:
        self.published, self._stop = published, threading.Event()

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version whose turn it is."""
        return self.published.engine.version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish a version; the one whose turn it is stays."""
        self.published.load(weights, version)

    def hash(self) -> str:
        """Its fingerprint."""
        return self.published.engine.hash()

    def open(self) -> Flight:
        """A flight that ends with `Stopped` once nobody waits."""
        return _Stoppable(self.published.engine.open(), self._stop)

    def stop(self) -> None:
        """Break off what is sampled."""
        self._stop.set()
        self.published.wake()

    @property
    def stopped(self) -> bool:
        """True after `stop`, until `start`."""
        return self._stop.is_set()

    def start(self) -> None:
        """Sample again."""
        self._stop.clear()


class _Stoppable(Flight):
    """A flight that looks before each step whether it is still wanted."""

    def __init__(self, flight: Flight, stop: threading.Event) -> None:
        self._flight, self._stop, self._tickets = flight, stop, list[Ticket]()

    def __len__(self) -> int:
        return len(self._flight)

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        self._tickets.append(ticket := self._flight.add(request, deadline=deadline))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self._flight.cancel(ticket)

    def step(self) -> list[tuple[Ticket, Completion]]:
        if self._stop.is_set():
            for ticket in self._tickets:
                self._flight.cancel(ticket)
            raise Stopped
        return self._flight.step()
