"""Environments in processes of their own, behind the interface of those in this one; with a deadline for every step.

Each process holds some environments. One that does not answer in time is killed with all it started, its episodes break
off with the reason, and a new process takes its place at the next reset. Deadlines need processes: a call that hangs
inside this process cannot be ended.
"""

import pickle
from base64 import b64decode
from collections import deque
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


class PooledEnvs(WorkerPool):
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
        super().__init__(
            "rolecall.marl.envs.worker",
            [(name, rows.stop - rows.start, limit) for rows in self._rows],
            what=f"the environment {name!r}",
            error=EnvError,
            deadline_s=deadline,
            walls=Walls(memory_mb=None, network=network, variables=tuple(variables), frame_mb=64),
        )
        self.spec = EnvSpec(**self.ready | {"agents": tuple(self.ready["agents"])})
        self._frame = Frame.of(self.spec, count)
        self._begun: dict[int, Worker] = {}
        """Which process the episodes of each place were begun in."""

    def reset(self, seeds: Sequence[int]) -> Frame:
        return self._round({place: ("reset", list(seeds[rows])) for place, rows in enumerate(self._rows)})

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        live = {place: rows for place, rows in enumerate(self._rows) if running[rows].any()}
        return self._round({place: ("step", actions[rows], running[rows]) for place, rows in live.items()})

    def _round(self, jobs: Mapping[int, tuple[Any, ...]]) -> Frame:
        self._frame.faults = {}
        queues = [deque([place] if place in jobs else []) for place in range(len(self._rows))]

        def pack(place: int, worker: Worker) -> bytes | None:
            if jobs[place][0] == "reset":
                self._begun[place] = worker
            return pickle.dumps(jobs[place]) if self._begun[place] is worker else None

        self.run(queues, pack=pack, heard=self._heard)
        return self._frame

    def _heard(self, place: int, answer: dict[str, Any] | Broken) -> None:
        rows = self._rows[place]
        if isinstance(answer, Broken) or "error" in answer:
            why = answer.why if isinstance(answer, Broken) else f"it raised {answer['error']}"
            self._frame.faults |= dict.fromkeys(range(rows.start, rows.stop), why)
            return
        for name, packed in zip(ARRAYS, answer["arrays"], strict=True):
            if packed is not None:
                here = getattr(self._frame, name)[rows]
                here[:] = np.frombuffer(b64decode(packed), here.dtype).reshape(here.shape)
        self._frame.faults |= {rows.start + int(i): str(why) for i, why in answer["faults"]}
