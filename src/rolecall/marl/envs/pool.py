"""Environments in processes of their own, behind the interface of those in this one; with a deadline for every step.

Each process holds some environments. One that does not answer in time is killed with all it started, its episodes break
off with the reason, and a new process takes its place at the next reset. Deadlines need processes: a call that hangs
inside this process cannot be ended.
"""

import pickle
from base64 import b64decode
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.marl.envs.base import EnvError, EnvSpec, Frame
from rolecall.marl.envs.worker import ARRAYS
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls


class PooledEnvs:
    """`count` environments of a name, spread evenly over `workers` processes."""

    def __init__(
        self,
        name: str,
        count: int,
        *,
        limit: int | None,
        workers: int,
        deadline: float = 60.0,
        network: bool = False,
        variables: Sequence[str] = (),
    ) -> None:
        workers = min(workers, count)
        self.count = count
        cuts = [round(i * count / workers) for i in range(workers + 1)]
        self._rows = [slice(start, end) for start, end in pairwise(cuts)]
        self._pool = WorkerPool(
            "rolecall.marl.envs.worker",
            [pickle.dumps((name, rows.stop - rows.start, limit)) for rows in self._rows],
            what=f"the environment {name!r}",
            error=EnvError,
            deadline_s=deadline,
            walls=Walls(memory_mb=None, network=network, variables=tuple(variables), frame_mb=64),
        )
        known = self._pool.ready or {}
        self.spec = EnvSpec(**known | {"agents": tuple(known["agents"])})
        self._frame = Frame.of(self.spec, count)
        self._begun: list[Worker | None] = [None] * workers
        """Which process the episodes of each place were begun in."""

    def reset(self, seeds: Sequence[int]) -> Frame:
        """Begin an episode in each."""
        self._begun = [None] * len(self._rows)
        return self._round({place: ("reset", list(seeds[rows])) for place, rows in enumerate(self._rows)})

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        """One step in those that are running."""
        asked = {place: rows for place, rows in enumerate(self._rows) if running[rows].any()}
        return self._round({place: ("step", actions[rows], running[rows]) for place, rows in asked.items()})

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _round(self, jobs: Mapping[int, tuple[Any, ...]]) -> Frame:
        self._frame.faults = {}
        left = dict(jobs)
        try:
            while left or any(worker.job is not None for worker in self._pool.workers):
                for place, job in list(left.items()):
                    worker = self._pool.workers[place]
                    if job[0] == "step" and worker is not self._begun[place]:
                        self._break(place, "its process is gone")
                        del left[place]
                    elif worker.ready and worker.job is None and self._pool.give(worker, place, pickle.dumps(job)):
                        self._begun[place] = worker
                        del left[place]
                for worker, place, answer in self._pool.hear():
                    self._heard(worker, place, answer)
        finally:
            self._pool.drop_jobs()
        return self._frame

    def _heard(self, worker: Worker, place: int, answer: dict[str, Any] | Broken) -> None:
        if isinstance(answer, Broken):
            late = f"it did not answer within {self._pool.deadline_s:g} s and was ended"
            self._break(place, late if answer.how == "deadline" else answer.why)
            return
        if "error" in answer:
            self._break(place, f"it raised {answer['error']}")
            return
        rows = self._rows[place]
        try:
            for name, packed in zip(ARRAYS, answer["arrays"], strict=True):
                if packed is not None:
                    here = getattr(self._frame, name)[rows]
                    here[:] = np.frombuffer(b64decode(packed), here.dtype).reshape(here.shape)
            self._frame.faults |= {rows.start + int(i): str(why) for i, why in answer["faults"]}
        except (LookupError, TypeError, ValueError):  # a worker that was taken over
            self._pool.replace(worker)
            self._break(place, "its worker process sent something unreadable")

    def _break(self, place: int, why: str) -> None:
        rows = self._rows[place]
        self._frame.faults |= dict.fromkeys(range(rows.start, rows.stop), why)
