"""Environments in processes of their own, behind the interface of those in this one; with a deadline for every step.

Each process holds some environments. One that does not answer in time is killed with all it started, its episodes break
off with the reason, and a new process takes its place at the next reset. Deadlines need processes: a call that hangs
inside this process cannot be ended.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.marl.envs.base import EnvError, EnvSpec, Frame

_ARRAYS = ("obs", "avail", "present", "reward", "terminated", "truncated", "state")


class PooledEnvs:
    """`count` environments of a name, spread evenly over `workers` processes."""

    def __init__(self, name: str, count: int, *, limit: int | None, workers: int, deadline: float) -> None:
        workers = min(workers, count)
        self.count, self._deadline = count, deadline
        cuts = [round(i * count / workers) for i in range(workers + 1)]
        self._workers = [_Worker(name, end - start, limit, start) for start, end in pairwise(cuts)]
        try:
            answers = [worker.first(deadline=max(deadline, 60.0)) for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.spec: EnvSpec = answers[0]
        self._frame = Frame.of(self.spec, count)

    def reset(self, seeds: Sequence[int]) -> Frame:
        """Begin an episode in each."""
        for worker in self._workers:
            if worker.process is None:
                worker.start()
                worker.first(deadline=max(self._deadline, 60.0))
            worker.send(("reset", list(seeds[worker.rows])))
        return self._gather(self._workers)

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        """One step in those that are running."""
        asked = [worker for worker in self._workers if running[worker.rows].any()]
        for worker in asked:
            worker.send(("step", actions[worker.rows], running[worker.rows]))
        return self._gather(asked)

    def _gather(self, asked: Sequence["_Worker"]) -> Frame:
        frame, self._frame.faults = self._frame, {}
        end = monotonic() + self._deadline
        waiting = {worker.channel: worker for worker in asked if worker.process is not None}
        for worker in asked:
            if worker.process is None:
                self._broke(worker, "its process is gone")
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - monotonic()))
            if not ready:
                for worker in waiting.values():
                    worker.kill()
                    self._broke(worker, f"it did not answer within {self._deadline:g} s and was ended")
                break
            for channel in ready:
                assert isinstance(channel, Connection)
                worker = waiting.pop(channel)
                try:
                    answer = channel.recv()
                except (EOFError, OSError):
                    self._broke(worker, worker.kill())
                    continue
                if isinstance(answer, Exception):
                    raise answer
                for name, array in zip(_ARRAYS, answer[0], strict=True):
                    if array is not None:
                        getattr(frame, name)[worker.rows] = array
                for i, why in answer[1].items():
                    frame.faults[worker.rows.start + i] = why
        return frame

    def _broke(self, worker: "_Worker", why: str) -> None:
        for i in range(worker.rows.start, worker.rows.stop):
            self._frame.faults[i] = why

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()


class _Worker:
    """A process with some environments: a fresh interpreter in a session of its own."""

    def __init__(self, name: str, count: int, limit: int | None, start: int) -> None:
        self.rows = slice(start, start + count)
        self._setup = (name, count, limit)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.channel, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from rolecall.marl.envs.pool import serve; serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        theirs.close()
        self.send(self._setup)

    def first(self, *, deadline: float) -> EnvSpec:
        """What the environments say of themselves."""
        name = self._setup[0]
        try:
            if not self.channel.poll(deadline):
                self.kill()
                raise EnvError(f"the environment {name!r} was not made within {deadline:g} s", exit_code=75)
            found = self.channel.recv()
        except (EOFError, OSError):
            raise EnvError(f"the environment {name!r} could not be made: {self.kill()}", exit_code=75) from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, EnvSpec)
        return found

    def send(self, what: Any) -> None:
        with suppress(OSError):  # whoever listens to it next finds out
            self.channel.send(what)

    def kill(self) -> str:
        """End the process and all it started; say how it had ended, if it had."""
        if self.process is None:
            return "its process is gone"
        self.channel.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process = None
        return f"its process ended with exit code {code}" if code >= 0 else f"its process was ended by signal {-code}"


def serve(descriptor: int) -> None:
    """The worker's side: make the environments, then answer until the other end closes."""
    from rolecall.marl.envs.names import open_local

    # The trainer holds the other end of stdin: when it is gone, however it went, this process goes too.
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    channel = Connection(descriptor)
    try:
        name, count, limit = channel.recv()
        try:
            envs = open_local(name, count, limit=limit)
        except EnvError as error:
            channel.send(EnvError(str(error)))
            return
        channel.send(envs.spec)
        while True:
            what, *arguments = channel.recv()
            try:
                frame = envs.reset(*arguments) if what == "reset" else envs.step(*arguments)
            except EnvError as error:
                channel.send(EnvError(str(error)))
                return
            channel.send(([getattr(frame, name) for name in _ARRAYS], frame.faults))
    except (EOFError, OSError):
        return


def _outlive_nobody() -> None:
    sys.stdin.read()
    os._exit(0)
