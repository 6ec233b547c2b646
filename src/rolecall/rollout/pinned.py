"""Versions of the weights that stay for sampling while the trainer goes on.

The trainer's engine is `Published`: `load` keeps a copy of the weights under their version. A `Pinned` is the engine of whoever
samples a step ahead: it answers by the version whose turn it is, whatever has been published since. There may be several, each
with an engine of its own, so that several steps are sampled at once, each by its own version.

In flight, answers that grow go on with every version that is published: what they are depends on when.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.policy.sharded import whole
from rolecall.rollout.engine import Engine, Flight, LocalEngine, weights_hash
from rolecall.rollout.stops import Ticket
from rolecall.types import Completion, Request


class Stopped(Exception):
    """Nobody waits for these answers any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    weights: dict[str, Tensor]
    """On the CPU, in the engine's dtype."""
    hash: str


class Published(Engine):
    """The engines as the trainer sees them: one, of the newest version. It holds every version until `forget`."""

    def __init__(
        self, engines: Sequence[Engine], weights: Mapping[str, Tensor], *, dtype: torch.dtype, inflight: bool = False
    ) -> None:
        """`weights` are what `engines` begin with, and `dtype` is what they sample in."""
        self.dtype, self._versions, self._changed = dtype, dict[int, _Version](), threading.Condition()
        self.inflight = inflight
        self.pinned = [Pinned(self, engine) for engine in engines]
        self.scoring = threading.Lock()
        """Held by whoever scores: rewards are shared."""
        self._stop = threading.Event()
        self.load(weights, engines[0].version)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish a version: nothing that is sampled now is disturbed, unless in flight."""
        copy = {name: whole(w.detach()).to("cpu", self.dtype, copy=True) for name, w in weights.items()}
        made = _Version(weights=copy, hash=weights_hash(copy, self.dtype))
        self._expect(version)  # now, while the trainer has these weights
        with self._changed:
            self._versions[version], self.version = made, version
            self._changed.notify_all()
        if self.inflight:
            for pinned in self.pinned:
                pinned.pass_on()

    def _expect(self, version: int, *given: Mapping[str, Tensor] | None) -> None:
        """Tell engines that are compared with the trainer what they will be compared with when this version's turn comes: the
        trainer as it is, or `given` weights and what was `carried` with them."""
        for pinned in self.pinned:
            getattr(pinned.engine, "expect", lambda *told: None)(version, *(given or (None,)))

    def _carried(self, version: int) -> Mapping[str, Tensor]:
        """What an engine needs of a version beside its weights, under names of its own."""
        found: Mapping[str, Tensor] = getattr(self.pinned[0].engine, "carried", lambda version: {})(version)
        return found

    def held(self, version: int) -> _Version:
        """A version that was published and is not forgotten."""
        return self._versions[version]

    def hash(self, version: int | None = None) -> str:
        """The fingerprint of a version, by default the newest."""
        return self._versions[self.version if version is None else version].hash

    def open(self) -> Flight:
        """A flight of the first engine, inside its turn."""
        return self.pinned[0].engine.open()

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers of the newest version, by the first engine."""
        with self.pinned[0].turn():
            yield from self.pinned[0].engine.stream(requests)

    def alone(self, evaluate: Callable[[int], Any]) -> Callable[[int], Any]:
        """An evaluation that waits for the first engine's turn, and beside which nothing is scored."""

        def evaluate_alone(step: int) -> Any:
            with self.pinned[0].turn(), self.scoring:
                return evaluate(step)

        return evaluate_alone

    def wait_for(self, version: int) -> None:
        """Return when the version was published; raise `Stopped` if nobody waits any more."""
        self.wait_until(lambda: self.version >= version)

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Return when something is there, for which whoever brings it calls `wake`; or `Stopped`."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self.stopped)
        self.check_wanted()

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def check_wanted(self) -> None:
        """Raise `Stopped` if nobody waits any more."""
        if self.stopped:
            raise Stopped

    def stop(self) -> None:
        """Break off what is sampled ahead."""
        self._stop.set()
        self.wake()

    @property
    def stopped(self) -> bool:
        """True after `stop`, until `start`."""
        return self._stop.is_set()

    def start(self) -> None:
        """Sample ahead again."""
        self._stop.clear()

    def missing(self, versions: Iterable[int]) -> list[int]:
        """Those of the versions that were published once, and are not there."""
        return [v for v in versions if v <= self.version and v not in self._versions]

    def forget(self, *, before: int) -> None:
        """Drop all versions before this one."""
        with self._changed:
            self._versions = {v: held for v, held in self._versions.items() if v >= before}

    def earlier(self, *, since: int) -> dict[int, dict[str, Tensor]]:
        """The weights of the versions from `since` on, but for the newest, which is the policy's own."""
        kept = {v: held.weights for v, held in self._versions.items() if since <= v < self.version}
        return {v: {**weights, **self._carried(v)} for v, weights in kept.items()}

    def restore(self, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Put back what `earlier` gave; the newest must be loaded after it, if another is meant."""
        newest = self._versions[self.version]
        found = dict[int, _Version]()
        for version, given in versions.items():
            weights = {name: tensor for name, tensor in given.items() if name in newest.weights}
            found[version] = _Version(weights=weights, hash=weights_hash(weights, self.dtype))
            self._expect(version, weights, {name: given[name] for name in given.keys() - weights.keys()})
        with self._changed:
            self._versions = {**found, self.version: newest}


class Pinned(Engine):
    """One of the engines as whoever samples ahead sees it: of the version whose turn it is."""

    def __init__(self, published: Published, engine: Engine) -> None:
        self.published, self.engine = published, engine
        self._turn, self._depth = threading.RLock(), 0

    @contextmanager
    def turn(self, version: int | None = None) -> Iterator[None]:
        """Nobody else samples with this engine meanwhile, and answers are of this version, by default or in flight the
        newest. A turn within a turn is the same one."""
        with self._turn:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._take(self.published.version if version is None or self.published.inflight else version)
                yield
            finally:
                self._depth -= 1

    def _take(self, version: int) -> None:
        """Always anew: what an engine has cached of earlier turns depends on when they came."""
        held = self.published.held(version)
        self.engine.load(held.weights, version)
        if (found := self.engine.hash()) != held.hash:
            raise RuntimeError(f"the weights of version {version} reached the engine changed: {found} for {held.hash}")

    def pass_on(self) -> None:
        """Give a new version to an engine in other processes; one in this process takes it between two of its steps."""
        if not isinstance(self.engine, LocalEngine):
            self._take(self.published.version)

    def follow(self) -> None:
        """In flight: take the newest version, unless the engine has it."""
        if self.published.inflight and self.engine.version != self.published.version:
            self._take(self.published.version)

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version whose turn it is."""
        return self.engine.version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish a version; the one whose turn it is stays."""
        self.published.load(weights, version)

    def hash(self) -> str:
        return self.engine.hash()

    def open(self) -> Flight:
        """A flight that ends with `Stopped` once nobody waits."""
        return _Watching(self.engine.open(), self)


class _Watching(Flight):
    """A flight that looks before each step whether it is still wanted, and in flight by which weights."""

    def __init__(self, flight: Flight, pinned: Pinned) -> None:
        self._flight, self._pinned = flight, pinned

    def __len__(self) -> int:
        return len(self._flight)

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        return self._flight.add(request, deadline=deadline)

    def cancel(self, ticket: Ticket) -> None:
        self._flight.cancel(ticket)

    def step(self) -> list[tuple[Ticket, Completion]]:
        self._pinned.published.check_wanted()
        self._pinned.follow()
        return self._flight.step()
