"""What pools of engines share, wherever their workers are: units of requests, asked again under the same numbers when lost.

A unit of work is `worker_prompts` prompts with all their samples. Its shapes are the same whichever worker does it and
however many there are, so with native engines its answers are the same, bit for bit, also when a worker that was lost,
hung or stale is replaced and the unit is given to another.
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
from rolecall.rollout.engine import Engine, Flight, StreamFlight, check_requests, check_weights, in_units
from rolecall.rollout.worker import Unit, unpack
from rolecall.types import Completion, Request
from rolecall.workers.pool import Broken

_log = logging.getLogger("rolecall.rollout")

_LOSSES = 3
"""Workers in a row, beyond two for each place, that may be lost before a unit is done; then the pool gives up."""
_LONGEST_PAUSE_S = 5.0
CLOSING_S = 3.0
"""How long `close` waits for a thread that samples."""


@dataclass(slots=True)
class Asked:
    """A unit on its way."""

    unit: Unit
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
    ) -> None:
        """`add` takes what is measured of the workers, by name."""
        model = loaded.model
        self.dtype, self.options, self.version, self._add = dtype, options, 0, add
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._vocabulary, self._context = model.get_input_embeddings().num_embeddings, loaded.context_length
        self._losses = 0
        self._closing = False
        self._lock = threading.RLock()
        self._weights, self._hash = None, ""

    @abstractmethod
    def _publish(self, weights: Mapping[str, Tensor], version: int) -> tuple[Any, str]:
        """Put weights where workers find them: (`Unit.weights`, `Unit.hash`)."""

    @abstractmethod
    def _hand_out(self, queue: deque[Asked], heard: Heard) -> None:
        """Give units to idle workers."""

    @abstractmethod
    def _take_in(self, heard: Heard) -> None:
        """Pass on what workers say, and replace those that are late; for a second at most."""

    @abstractmethod
    def _units_given(self) -> int:
        """How many units are with a worker."""

    @abstractmethod
    def _abandon(self) -> None:
        """Replace the workers that have a unit: nobody waits for it."""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish new weights; a worker takes them with the next unit it is given."""
        check_weights(weights, self._shapes)
        with self._lock:
            self._weights, self._hash = self._publish(weights, version)
            self.version = version

    def hash(self) -> str:
        """The fingerprint of the published weights, which every worker compares with that of its engine."""
        return self._hash

    def open(self) -> Flight:
        """A flight that gives new requests to the workers when those before have ended."""
        return StreamFlight(self.stream)

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers as they end, from all workers."""
        check_requests(requests, context_length=self._context, vocabulary=self._vocabulary)
        with self._lock:
            yield from self._stream(deque(map(Asked, self._units(requests))))

    def _units(self, requests: Sequence[Request]) -> list[Unit]:
        """Requests of the same prompts together, in order; no engine keeps a cache of what another may have to go on with."""
        plain = [replace(request, conversation=None) for request in requests]
        made = in_units(plain, prompts=self.options.worker_prompts)
        return [Unit(requests=u, weights=self._weights, version=self.version, hash=self._hash) for u in made]

    def _stream(self, queue: deque[Asked]) -> Iterator[Completion]:
        out: deque[Completion] = deque()
        took: list[float] = []
        begun, lost = monotonic(), 0

        def heard(asked: Asked, said: dict[str, Any] | Broken) -> None:
            nonlocal lost
            if isinstance(said, Broken) or "error" in said:
                lost += 1
                queue.appendleft(asked)
                self._lose(said.why if isinstance(said, Broken) else said["error"])
            elif "answer" in said:
                out.extend(self._new(asked, unpack(said["answer"])))
            elif said.get("done"):
                if len(asked.found) < sum(r.n for r in asked.unit.requests):
                    raise ValueError("a worker ended its unit without all answers")
                took.append(monotonic() - asked.since)
                self._losses = 0

        try:
            while queue or self._units_given():
                if self._closing:
                    raise RuntimeError("the pool of workers was closed while it sampled")
                self._hand_out(queue, heard)
                self._take_in(heard)
                while out:
                    yield out.popleft()
        finally:
            if not self._closing:
                self._abandon()
        self._measure(took, lost, monotonic() - begun)

    def _new(self, asked: Asked, completion: Completion) -> list[Completion]:
        """The answer, unless it came before, from a worker that was lost then. Other weights are an error of the worker."""
        if completion.policy_version != asked.unit.version:
            self._add("workers/stale", 1.0)
            raise ValueError(f"an answer of version {completion.policy_version}, {asked.unit.version} was asked for")
        key = (completion.prompt, completion.sample)
        if not any(r.prompt == key[0] and 0 <= key[1] - r.first_sample < r.n for r in asked.unit.requests):
            raise ValueError(f"an answer that nobody asked for: {key}")
        before = asked.found.setdefault(key, completion)
        if before is completion:
            return [completion]
        if before != completion:
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
