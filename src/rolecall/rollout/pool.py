"""A pool is an engine over engines: each worker process samples from a copy of the weights, whichever prompts it is given."""

import json
import pickle
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.files import write_atomically
from rolecall.policy.load import LoadedModel, save
from rolecall.rollout.published import Adapter, own_directory, write_held
from rolecall.rollout.units import CLOSING_S, Asked, Heard, UnitPool
from rolecall.rollout.worker import Setup
from rolecall.workers.pool import WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls


class EnginePool(WorkerPool, UnitPool):
    """Samples in worker processes. Weights travel as safetensors in shared memory, and every worker checks their hash."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        *,
        how: Mapping[str, Any],
        reads: Mapping[str, Any],
        add: Callable[[str, float], None] = lambda name, value: None,
        adapter: Adapter | None = None,
        module: str = "rolecall.rollout.worker",
    ) -> None:
        """`how` is for `open_engine` and `reads` for `load`; `add` takes what is measured of the workers, by name. With an
        `adapter`, workers merge it themselves."""
        UnitPool.__init__(self, loaded, options, dtype=how["dtype"] or loaded.model.dtype, add=add, adapter=adapter)
        self._holds: dict[int, int] = {}
        """The version that a worker, by its process, was given last."""
        self._directory = own_directory(sum(p.numel() * 4 for p in loaded.model.parameters()))
        self._newest = self._directory / "newest.json"
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        save(loaded, self._directory / "model")
        self.load(dict(loaded.model.named_parameters()), 0)
        setup = Setup(
            model=str(self._directory / "model"),
            how=reads,
            engine=how,
            merge=None if adapter is None else adapter.merge,
            threads=options.worker_threads,
            beat=options.worker_silence / 5,
        )
        WorkerPool.__init__(
            self,
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
        there = self._lock.acquire(timeout=CLOSING_S)
        super().close()
        if there:
            self._lock.release()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _publish(self, name: str, held: Mapping[str, Tensor]) -> str:
        path = self._directory / f"{name}.safetensors"
        write_held(path, held)
        return str(path)

    def _announce(self, weights: list[str], version: int, fingerprint: str) -> None:
        write_atomically(self._newest, json.dumps([weights, version, fingerprint]).encode())

    def _withdraw(self, weights: list[str]) -> None:
        Path(weights[-1]).unlink(missing_ok=True)

    def _hand_out(self, heard: Heard) -> None:
        for worker in list(self.workers):
            if self._queue and worker.ready and worker.job is None:
                chosen = deque([self._next(self._holds.get(worker.process.pid))])
                self._give(worker, chosen, self._pack, heard)
                self._queue.extendleft(chosen)  # it could not be given

    def _take_in(self, heard: Heard, patience: float) -> None:
        self._hear(heard, patience)
        for worker in self._busy:
            if late := self._late(worker.job):
                self._replace(worker)
                heard(worker.job, late)

    def _abandon(self, by: Any) -> None:
        for worker in self._busy:
            if worker.job.by is by:
                self._replace(worker)

    def _pack(self, asked: Asked, worker: Worker) -> bytes:
        asked.since = monotonic()
        if self.inflight:
            weights, version, fingerprint = json.loads(self._newest.read_text())
            newest = {"weights": weights, "version": version, "hash": fingerprint, "newest": str(self._newest)}
            asked.unit = replace(asked.unit, **newest)
        self._holds[worker.process.pid] = asked.unit.version
        return pickle.dumps(asked.unit)

    def _start(self, setup: bytes) -> Worker:
        self._pause()
        return super()._start(setup)

    def _start_failed(self, how: str) -> None:
        self._lose(how)

    def _not_loaded(self, worker: Worker, why: str) -> None:
        self._replace(worker)
        self._lose(why)
