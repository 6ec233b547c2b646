"""Worker processes that are given jobs, heard, and replaced when they hang or die."""

import logging
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import Any, Literal

from rolecall.visible import visible_text
from rolecall.workers.load import MakeError
from rolecall.workers.process import Gone, Nonsense, Worker
from rolecall.workers.walls import Walls

logger = logging.getLogger("rolecall.workers")

_LOAD_DEADLINE_S = 120.0
_FAILED_STARTS = 3
"""Workers in a row, beyond one for each place, that may die before they have done anything; then the pool gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A job came to nothing, and its worker is replaced."""

    how: Literal["crash", "deadline"]
    why: str
    """In words."""


class _Namespaces:
    """Whether the kernel allows workers namespaces of their own: tried with the first, said once."""

    allowed = sys.platform == "linux"

    def refuse(self, why: str) -> None:
        if self.allowed:
            logger.warning(
                "reward and environment processes are less isolated here, as the kernel refuses namespaces (%s): see "
                "docs/rewards.md",
                why,
            )
        self.allowed = False


_namespaces = _Namespaces()


class WorkerPool:
    """One worker for each of `setups`. Only what nobody can work with raises, as `error`; `what` begins its sentence."""

    def __init__(
        self,
        module: str,
        setups: Sequence[bytes],
        *,
        what: str,
        error: MakeError,
        deadline_s: float,
        walls: Walls,
    ) -> None:
        """Returns when the first worker is ready: code that cannot be loaded is an error now."""
        self.deadline_s, self.walls = deadline_s, walls
        self._module, self._setups, self._what, self._error = module, setups, what, error
        self._failed_starts = 0
        self._told = False
        self.ready: dict[str, Any] | None = None
        """What the first worker that was ready says of itself."""
        self.workers: list[Worker] = []
        self._end = weakref.finalize(self, _end, self.workers)
        try:
            for setup in setups:
                self.workers.append(self._start(setup))
            while self.ready is None:
                self.hear()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of this moment."""
        return tuple(worker.process.pid for worker in self.workers)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._end.alive

    def close(self) -> None:
        """End the workers."""
        self._end()

    def give(self, worker: Worker, job: Any, payload: bytes) -> bool:
        """Let a worker that is ready and idle do a job; False if it had died."""
        try:
            if worker.process.poll() is not None:
                raise Gone("the process has ended")
            worker.send(payload, timeout=self.deadline_s)
        except Gone:
            self._start_failed(self.replace(worker))
            return False
        worker.job, worker.since, worker.shown = job, monotonic(), 0
        return True

    def hear(self, *, patience: float = 1.0) -> list[tuple[Worker, Any, dict[str, Any] | Broken]]:
        """What was said or went wrong, with whose job; waits until there is something, at most `patience` seconds."""
        now = monotonic()
        due = [self.deadline_s - (now - w.since) for w in self.workers if w.job is not None]
        listened_to = [end for worker in self.workers for end in (worker.channel, worker.output)]
        talking = wait(listened_to, max(0.0, min([patience, *due])))
        heard: list[tuple[Worker, Any, dict[str, Any] | Broken]] = []
        for worker in list(self.workers):
            if worker.output in talking:
                worker.show_output()
            if worker.channel in talking or worker.process.poll() is not None:
                heard += self._listen(worker)
            if worker not in self.workers:
                continue
            waited = monotonic() - worker.since
            if worker.job is not None and waited >= self.deadline_s:
                job = worker.job
                self.replace(worker)
                why = f"no answer within {self.deadline_s:g} s; it was killed"
                heard.append((worker, job, Broken(how="deadline", why=why)))
            elif not worker.ready and waited > _LOAD_DEADLINE_S:
                raise self._retryable(f"{self._what} did not load within {_LOAD_DEADLINE_S:g} s")
        return heard

    def replace(self, worker: Worker) -> str:
        """Kill a worker and start another in its place; how it had ended."""
        how, place = worker.kill(), self.workers.index(worker)
        self.workers[place] = self._start(self._setups[place])
        return how

    def drop_jobs(self) -> None:
        """After an error or Ctrl-C, no worker goes on with what nobody waits for."""
        for worker in [w for w in self.workers if w.job is not None]:
            self.replace(worker)

    def _start(self, setup: bytes) -> Worker:
        return Worker(self._module, setup, what=self._what, walls=self.walls, namespaces=_namespaces.allowed)

    def _listen(self, worker: Worker) -> list[tuple[Worker, Any, dict[str, Any] | Broken]]:
        ended = worker.process.poll() is not None
        try:
            messages = worker.receive()
            if ended and not messages:  # its children may hold the channel open
                raise Gone("the process has ended")
        except Gone as gone:
            job, how = worker.job, self.replace(worker)
            if job is not None:
                return [(worker, job, Broken(how="crash", why=str(gone) if isinstance(gone, Nonsense) else how))]
            self._start_failed(how)
            return []
        heard: list[tuple[Worker, Any, dict[str, Any] | Broken]] = []
        for message in messages:
            if worker.enclosed is None:
                worker.enclosed = _namespaces.allowed
                if message.get("refused"):
                    _namespaces.refuse(str(message["refused"]))
                    self.replace(worker)
                    return []
            elif "fatal" in message:
                raised = f"{self._what} cannot be made: " if message.get("raised") else ""
                raise self._error(f"{raised}{message['fatal']}")
            elif "ready" in message:
                worker.ready = True
                self.ready = self.ready or dict(message["ready"])
            elif worker.job is not None:
                heard.append((worker, worker.job, self._answer(worker, message)))
        return heard

    def _answer(self, worker: Worker, message: dict[str, Any]) -> dict[str, Any] | Broken:
        self._failed_starts = 0
        worker.since = monotonic()
        if "sought" in message and not self._told:
            self._told = True
            sought, option = visible_text(str(message["sought"])[:100]), self.walls.options[0]
            logger.warning(
                "%s tried to reach %s, but has no network: set %s to give it one", self._what, sought, option
            )
        if message.get("memory"):
            self.replace(worker)
            most = self.walls.memory_mb
            limit = f"more than memory_mb={most}" if most else "more memory than there is"
            return Broken(how="crash", why=f"it asked for {limit}: {message.get('error')}")
        if message.get("done"):
            worker.job = None
        return message

    def _start_failed(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS + len(self.workers):
            raise self._retryable(
                f"workers for {self._what} die before they are called ({how}); import the code in a Python shell to see "
                f"why"
            )

    def _retryable(self, sentence: str) -> Exception:
        error = self._error(sentence)
        error.exit_code = 75
        return error


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    patience = monotonic() + 0.5
    while monotonic() < patience and any(w.process.poll() is None and w.ready and w.job is None for w in workers):
        sleep(0.005)
    for worker in workers:
        worker.kill()
