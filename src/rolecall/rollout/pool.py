"""A pool is an engine over engines: each worker process samples from a copy of the weights, whichever prompts it is given.

A unit of work is `worker_prompts` prompts with all their samples. Its shapes are the same whichever worker does it and
however many there are, so with native engines its answers are the same, bit for bit, also when a worker that was lost,
hung or stale is replaced and the unit is given to another.
"""

import logging
import pickle
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel, save
from rolecall.rollout.engine import Engine, Flight, StreamFlight, check_requests, check_weights, in_units
from rolecall.rollout.published import own_directory, write_weights
from rolecall.rollout.worker import Setup, Unit, unpack
from rolecall.types import Completion, Request
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls

_log = logging.getLogger("rolecall.rollout")

_LOSSES = 3
"""Workers in a row, beyond two for each place, that may be lost before a unit is done; then the pool gives up."""
_LONGEST_PAUSE_S = 5.0
_CLOSING_S = 3.0
"""How long `close` waits for a thread that samples."""


@dataclass(slots=True)
class _Asked:
    """A unit on its way."""

    unit: Unit
    found: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """What has come back, by prompt and sample."""
    since: float = 0.0
    """When it was last given to a worker."""


class EnginePool(WorkerPool, Engine):
    """Samples in worker processes. Weights travel as safetensors in shared memory, and every worker checks their hash."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        *,
        how: Mapping[str, Any],
        reads: Mapping[str, Any],
        add: Callable[[str, float], None] = lambda name, value: None,
        module: str = "rolecall.rollout.worker",
    ) -> None:
        """`how` is for `open_engine` and `reads` for `load`; `add` takes what is measured of the workers, by name."""
        model = loaded.model
        self.dtype = how["dtype"] or model.dtype
        self.options, self.version, self._add = options, 0, add
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._vocabulary, self._context = model.get_input_embeddings().num_embeddings, loaded.context_length
        self._losses = 0
        self._closing = False
        self._lock = threading.RLock()
        self._directory = own_directory(sum(p.numel() * 4 for p in model.parameters()))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        save(loaded, self._directory / "model")
        self.load(dict(model.named_parameters()), 0)
        setup = Setup(
            model=str(self._directory / "model"),
            how=reads,
            engine=how,
            threads=options.worker_threads,
            beat=options.worker_silence / 5,
        )
        super().__init__(
            module,
            [setup] * options.workers,
            what="a worker's engine",
            error=partial(UserError, exit_code=1),
            deadline_s=options.worker_silence,
            walls=Walls(memory_mb=None, network=True, variables=("*",), processes=4096, frame_mb=512),
        )

    def close(self) -> None:
        """End the workers and remove what was published. A thread that still samples notices within a second."""
        self._closing = True
        there = self._lock.acquire(timeout=_CLOSING_S)
        super().close()
        if there:
            self._lock.release()
        shutil.rmtree(self._directory, ignore_errors=True)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish new weights; a worker takes them with the next unit it is given."""
        check_weights(weights, self._shapes)
        with self._lock:
            path = self._directory / f"v{version:06d}.safetensors"
            self._hash = write_weights(path, weights, self.dtype)
            for old in self._directory.glob("v*.safetensors"):
                if old != path:
                    old.unlink()
            self._weights, self.version = path, version

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
            yield from self._stream(deque(map(_Asked, self._units(requests))))

    def _units(self, requests: Sequence[Request]) -> list[Unit]:
        """Requests of the same prompts together, in order; no engine keeps a cache of what another may have to go on with."""
        plain = [replace(request, conversation=None) for request in requests]
        made = in_units(plain, prompts=self.options.worker_prompts)
        return [Unit(requests=u, weights=str(self._weights), version=self.version, hash=self._hash) for u in made]

    def _stream(self, queue: deque[_Asked]) -> Iterator[Completion]:
        out: deque[Completion] = deque()
        took: list[float] = []
        begun, lost = monotonic(), 0

        def heard(asked: _Asked, said: dict[str, Any] | Broken) -> None:
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
            while queue or self._busy:
                if self._closing:
                    raise RuntimeError("the pool of workers was closed while it sampled")
                for worker in list(self.workers):
                    self._give(worker, queue, _pack, heard)
                self._hear(heard, 1.0)
                for worker in self._busy:
                    if monotonic() - worker.job.since > self.options.worker_deadline:
                        self._replace(worker)
                        why = f"no end within {self.options.worker_deadline:g} s; it was killed"
                        heard(worker.job, Broken(how="deadline", why=why))
                while out:
                    yield out.popleft()
        finally:
            for worker in [] if self._closing else self._busy:  # after an error or Ctrl-C nobody waits for what they do
                self._replace(worker)
        self._measure(took, lost, monotonic() - begun)

    def _new(self, asked: _Asked, completion: Completion) -> list[Completion]:
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
        self._add("workers/idle", max(0.0, wall * len(self.workers) - busy))
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

    def _start(self, setup: bytes) -> Worker:
        """Each start after a loss waits twice as long as the one before."""
        if self._losses > 1:
            sleep(min(_LONGEST_PAUSE_S, 0.05 * 2**self._losses))
        return super()._start(setup)

    def _start_failed(self, how: str) -> None:
        self._lose(how)

    def _not_loaded(self, worker: Worker, why: str) -> None:
        self._replace(worker)
        self._lose(why)


def _pack(asked: _Asked, worker: Worker) -> bytes:
    asked.since = monotonic()
    return pickle.dumps(asked.unit)
