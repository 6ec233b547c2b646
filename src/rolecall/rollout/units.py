"""What pools of engines share, wherever their workers are: units of requests, asked again under the same numbers when lost.

A unit of work is `worker_prompts` prompts with all their samples. Its shapes are the same whichever worker does it and
however many there are, so with native engines its answers are the same, bit for bit, also when a worker that was lost,
hung or stale is replaced and the unit is given to another.

A unit names the weights that answer it, so units of several versions may be with workers at once: see `UnitPool.side`.
"""

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.rollout.engine import (
    Engine,
    Flight,
    StreamFlight,
    check_requests,
    check_weights,
    in_units,
    weights_hash,
)
from rolecall.rollout.published import Adapter, Weights, hold_weights
from rolecall.rollout.worker import Unit, unpack
from rolecall.types import Completion, Request
from rolecall.workers.pool import Broken

_log = logging.getLogger("rolecall.rollout")

_LOSSES = 3
"""Workers in a row, beyond two for each place, that may be lost before a unit is done; then the pool gives up."""
_LONGEST_PAUSE_S = 5.0
_LOOK_S = 0.05
"""How often those who ask a pool at the same time look whether there is something for them."""
CLOSING_S = 3.0
"""How long `close` waits for a thread that samples."""


@dataclass(slots=True, eq=False)
class _Asking:
    """Units that were asked for together."""

    left: int
    """Units that have not ended."""
    out: deque[Completion] = field(default_factory=deque)
    """Answers that nobody has taken."""
    took: list[float] = field(default_factory=list)
    """Seconds of each unit that has ended."""
    lost: int = 0


@dataclass(slots=True, eq=False)
class Asked:
    """A unit on its way."""

    unit: Unit
    by: _Asking
    found: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """What has come back, by prompt and sample."""
    since: float = 0.0
    """When it was last given to a worker."""


Heard = Callable[[Asked, dict[str, Any] | Broken], None]
"""Takes what is said of a unit: an `answer`, that it is `done`, an `error`, or that its worker is broken. Raises a `ValueError`
if no worker of ours could have said it."""


class UnitPool(Engine):
    """Shares units out over workers, which a subclass starts, gives units, listens to and replaces."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        *,
        dtype: torch.dtype,
        add: Callable[[str, float], None],
        adapter: Adapter | None = None,
    ) -> None:
        """`add` takes what is measured of the workers, by name. With an `adapter`, workers merge it themselves."""
        model = loaded.model
        self.dtype, self.options, self.version, self._add = dtype, options, 0, add
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._vocabulary, self._context = model.get_input_embeddings().num_embeddings, loaded.context_length
        self._losses = 0
        self._closing = False
        self._lock = threading.Lock()
        """Whoever has it gives units to workers and listens to them, for all who ask."""
        self._loading = threading.Lock()
        self._queue: deque[Asked] = deque()
        self._published: dict[int, tuple[list[Any], str]] = {}
        self._adapter, self._base = adapter, list[Any]()
        self._expected: dict[int, Weights | None] = {}
        """Adapters of versions that are loaded later; None where only the whole is known."""
        self._adapters: dict[int, Weights] = {}
        """Those that were published."""
        self._sides: list[Side] = []
        self.inflight = False
        """Whether answers that grow go on with the weights of the next `load`."""

    @abstractmethod
    def _publish(self, name: str, held: Weights) -> Any:
        """Put weights where workers find them: a part of `Unit.weights`."""

    def _announce(self, weights: list[Any], version: int, fingerprint: str) -> None:
        """Tell workers that answer with the newest weights which these are."""

    @abstractmethod
    def _withdraw(self, weights: list[Any]) -> None:
        """Remove weights that were published, but for the base of an adapter."""

    @abstractmethod
    def _hand_out(self, heard: Heard) -> None:
        """Give units to idle workers."""

    @abstractmethod
    def _take_in(self, heard: Heard, patience: float) -> None:
        """Pass on what workers say, and replace those that are late; for so many seconds at most."""

    @abstractmethod
    def _abandon(self, by: _Asking) -> None:
        """Replace the workers that have a unit which nobody waits for."""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish new weights; a worker takes them with the next unit it is given that names them."""
        check_weights(weights, self._shapes)
        with self._loading:
            made = self._put_out(weights, version)
            self._announce(made[0], version, made[1])
            kept = {self.version} if self.inflight else {side.version for side in self._sides}
            for old in [v for v in self._published if v not in kept and v != version]:
                self._withdraw(self._published.pop(old)[0])
                for noted in (self._expected, self._adapters):
                    noted.pop(old, None)
            self._published[version] = made
            self.version = version

    def expect(self, version: int, weights: Weights | None, adapter: Weights | None = None) -> None:
        """Keep the adapter of a version that is loaded later; without `weights` it is the one of this moment."""
        if self._adapter is not None:
            self._expected[version] = self._adapter.now() if weights is None else adapter or None

    def _put_out(self, weights: Weights, version: int) -> tuple[list[Any], str]:
        """(`Unit.weights`, `Unit.hash`): the adapter alone if there is one, else the whole."""
        if self._adapter is not None:
            own = self._expected[version] if version in self._expected else self._adapter.now()
            if own is not None:
                self._adapters[version] = own
                self._base = self._base or [self._publish("base", hold_weights(self._adapter.base, None))]
                return [*self._base, self._publish(f"a{version:06d}", own)], weights_hash(weights, self.dtype)
        held = hold_weights(weights, self.dtype)
        return [self._publish(f"v{version:06d}", held)], weights_hash(held, self.dtype)

    def _put_out_whole(self, version: int) -> None:
        """Merge an adapter here from now on, which a worker merged to other bits."""
        with self._loading:
            weights, expected = self._published[version]
            if self._adapter is None or len(weights) == 1:  # another worker has said so before
                return
            _log.warning("a worker merges the adapter to other bits than the trainer: workers get whole weights")
            merged = self._adapter.merge(self._adapter.base, self._adapters[version])
            self._adapter = None
            whole, found = self._put_out(merged, version)
            if found != expected:
                raise RuntimeError(f"the adapter of version {version} does not give the weights that were loaded")
            weights[:] = whole  # also in the units that name them
            if self.version == version:
                self._announce(weights, version, expected)

    def side(self) -> "Side":
        """The pool as an engine with a version of its own. Sides are asked at the same time, and every worker answers all."""
        self._sides.append(Side(self))
        return self._sides[-1]

    def hash(self, version: int | None = None) -> str:
        """The fingerprint of published weights, which every worker compares with that of its engine."""
        return self._published[self.version if version is None else version][1]

    def has(self, version: int) -> bool:
        """Whether a version is published."""
        return version in self._published

    def open(self) -> Flight:
        """A flight that gives new requests to the workers when those before have ended."""
        return StreamFlight(self.stream)

    def stream(self, requests: Sequence[Request], version: int | None = None) -> Iterator[Completion]:
        """Answers of a version, by default the newest, as they end, from all workers."""
        check_requests(requests, context_length=self._context, vocabulary=self._vocabulary)
        yield from self._stream(self._units(requests, self.version if version is None else version))

    def _units(self, requests: Sequence[Request], version: int) -> list[Unit]:
        """Requests of the same prompts together, in order; no engine keeps a cache of what another may have to go on with."""
        plain = [replace(request, conversation=None) for request in requests]
        made = in_units(plain, prompts=self.options.worker_prompts)
        weights, fingerprint = self._published[version]
        return [Unit(requests=u, weights=weights, version=version, hash=fingerprint) for u in made]

    def _stream(self, units: Sequence[Unit]) -> Iterator[Completion]:
        by, begun = _Asking(left=len(units)), monotonic()
        self._queue.extend([Asked(unit, by) for unit in units])
        try:
            while by.left or by.out:
                if self._closing:
                    raise RuntimeError("the pool of workers was closed while it sampled")
                if not by.out and self._lock.acquire(timeout=_LOOK_S):
                    try:
                        self._hand_out(self._heard)
                        if by.left and not by.out:
                            self._take_in(self._heard, _LOOK_S if len(self._sides) > 1 else 1.0)
                    finally:
                        self._lock.release()
                while by.out:
                    yield by.out.popleft()
        finally:
            if by.left and not self._closing:
                with self._lock:
                    for asked in [asked for asked in list(self._queue) if asked.by is by]:
                        self._queue.remove(asked)
                    self._abandon(by)
        self._measure(by.took, by.lost, monotonic() - begun)

    def _next(self, holds: int | None) -> Asked:
        """Take a unit out of the queue for a worker that holds a version: of that version if there is one, else the oldest."""
        chosen = next((asked for asked in list(self._queue) if asked.unit.version == holds), self._queue[0])
        self._queue.remove(chosen)
        return chosen

    def _heard(self, asked: Asked, said: dict[str, Any] | Broken) -> None:
        by = asked.by
        if isinstance(said, Broken) or "error" in said:
            by.lost += 1
            if not isinstance(said, Broken) and said.get("whole"):
                self._put_out_whole(self.version if self.inflight else asked.unit.version)
            self._queue.appendleft(asked)
            self._lose(said.why if isinstance(said, Broken) else said["error"])
        elif "answer" in said:
            by.out.extend(self._new(asked, unpack(said["answer"])))
        elif said.get("done"):
            if len(asked.found) < sum(r.n for r in asked.unit.requests):
                raise ValueError("a worker ended its unit without all answers")
            by.took.append(monotonic() - asked.since)
            by.left -= 1
            self._losses = 0

    def _new(self, asked: Asked, completion: Completion) -> list[Completion]:
        """The answer, unless it came before, from a worker that was lost then. Other weights are an error of the worker."""
        version = completion.policy_version
        if version != asked.unit.version and not (self.inflight and version > asked.unit.version):
            self._add("workers/stale", 1.0)
            raise ValueError(f"an answer of version {version}, {asked.unit.version} was asked for")
        key = (completion.prompt, completion.sample)
        if not any(r.prompt == key[0] and 0 <= key[1] - r.first_sample < r.n for r in asked.unit.requests):
            raise ValueError(f"an answer that nobody asked for: {key}")
        before = asked.found.setdefault(key, completion)
        if before is completion:
            return [completion]
        if before != completion and not self.inflight:
            self._add("workers/differing", 1.0)
            _log.warning("prompt %d sample %d was answered differently by another worker", *key)
        return []

    def _measure(self, took: Sequence[float], lost: int, wall: float) -> None:
        """Seconds that workers sampled, seconds that they waited for the last one, and what was lost."""
        busy = sum(took)
        self._add("workers/busy", busy)
        self._add("workers/idle", max(0.0, wall * self.options.workers - busy))
        self._add("workers/slowest", max(took, default=0.0))
        if lost:
            self._add("workers/lost", float(lost))

    def _lose(self, why: str) -> None:
        """Count what was lost; too much in a row ends the run, and the same command may succeed later."""
        self._losses += 1
        _log.warning("a rollout worker was lost, its prompts go to another: %s", why)
        if self._losses >= _LOSSES + 2 * self.options.workers:
            raise UserError(
                f"rollout workers were lost {self._losses} times in a row, the last one because {why}; free memory or use "
                "fewer engine.workers, then resume",
                exit_code=75,
            )

    def _late(self, asked: Asked) -> Broken | None:
        """Why a unit's worker is replaced; None if it has time."""
        if monotonic() - asked.since <= self.options.worker_deadline:
            return None
        return Broken(how="deadline", why=f"no end within {self.options.worker_deadline:g} s; it was killed")

    def _pause(self) -> None:
        """Each start after a loss waits twice as long as the one before."""
        if self._losses > 1:
            sleep(min(_LONGEST_PAUSE_S, 0.05 * 2**self._losses))


class Side(Engine):
    """A pool as an engine with a version of its own."""

    def __init__(self, pool: UnitPool) -> None:
        self.pool, self.version = pool, pool.version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        if not self.pool.has(version):
            self.pool.load(weights, version)
        self.version = version

    def expect(self, version: int, weights: Weights | None, adapter: Weights | None = None) -> None:
        self.pool.expect(version, weights, adapter)

    def hash(self) -> str:
        return self.pool.hash(self.version)

    def open(self) -> Flight:
        return StreamFlight(self.stream)

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        return self.pool.stream(requests, self.version)
