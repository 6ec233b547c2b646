"""Worker processes that are given jobs, heard, and replaced when they hang or die."""

import logging
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import Any, Literal, Self

from rolecall.errors import UserError
from rolecall.visible import visible_text
from rolecall.workers.hosts import Host
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


Pack = Callable[[Any, Worker], bytes | None]
Heard = Callable[[Any, dict[str, Any] | Broken], None]


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
        setups: Sequence[Any],
        *,
        what: str,
        error: MakeError,
        deadline_s: float,
        walls: Walls,
        hosts: Sequence[Host] = (),
    ) -> None:
        """Returns when the first worker is ready: code that cannot be loaded is an error now. With `hosts` workers run there, in turn."""
        self._hosts = deque(hosts)
        self.deadline_s, self.walls = deadline_s, walls
        self._module, self._setups, self._what, self._error = module, list(map(pickle.dumps, setups)), what, error
        self._failed_starts = 0
        self._network_said = False
        self.ready: dict[str, Any] = {}
        """What the first worker that was ready says of itself."""
        self.workers: list[Worker] = []
        self._end = weakref.finalize(self, _end, self.workers)
        try:
            for setup in self._setups:
                self.workers.append(self._start(setup))
            while not self.ready:
                self._hear(_ignore, 1.0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of this moment."""
        return tuple(worker.process.pid for worker in self.workers)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._end.alive

    def close(self) -> None:
        self._end()

    def run(
        self,
        queues: Sequence[deque[Any]],
        *,
        pack: Pack,
        heard: Heard,
        waiting: Callable[[Any, float], None] = lambda job, seconds: None,
        say_after_s: float = inf,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Do all jobs: each worker takes those of its queue, which several workers may share and `heard` may extend.

        `pack(job, worker)` is what the worker is sent, or None if only a worker that is gone could do it. `heard(job,
        said)` gets what comes of it, message by message. What it cannot make sense of is a worker that was taken over.
        `waiting(job, seconds)` is called when a job has said nothing for `say_after_s`, for twice as long, and so on;
        `progress` after whatever was heard.
        """
        try:
            while any(queues) or any(worker.job is not None for worker in self.workers):
                for place, queue in enumerate(queues):
                    self._give(self.workers[place], queue, pack, heard)
                self._hear(heard, min([1.0, *(say_after_s * w.patience - w.waited for w in self._busy)]))
                progress()
                for worker in self._busy:
                    if worker.waited >= say_after_s * worker.patience:
                        worker.patience *= 2
                        waiting(worker.job, worker.waited)
        finally:
            for worker in self._busy:  # after an error or Ctrl-C, nobody waits for what they do
                self._replace(worker)

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.job is not None]

    def _give(self, worker: Worker, queue: deque[Any], pack: Pack, heard: Heard) -> None:
        """Let a worker do the queue's next job, if it is ready and idle."""
        if not queue or not worker.ready or worker.job is not None:
            return
        payload = pack(queue[0], worker)
        if payload is None:
            heard(queue.popleft(), Broken(how="crash", why="its process is gone"))
            return
        try:
            if worker.process.poll() is not None:
                raise Gone("the process has ended")
            worker.send(payload, timeout=self.deadline_s)
        except Gone:  # it died while idle, which is not the job's fault
            self._start_failed(self._replace(worker))
            return
        worker.begin(queue.popleft())

    def _hear(self, heard: Heard, patience: float) -> None:
        """Pass on what was said or went wrong; waits until there is something, at most `patience` seconds."""
        due = [self.deadline_s - worker.waited for worker in self._busy]
        listened_to = [end for worker in self.workers for end in (worker.channel, worker.output)]
        talking = wait(listened_to, max(0.0, min([patience, *due])))
        for worker in list(self.workers):
            if worker.output in talking:
                worker.show_output()
            if worker.channel in talking or worker.process.poll() is not None:
                self._listen(worker, heard)
            if worker not in self.workers:
                continue
            if worker.job is not None and worker.waited >= self.deadline_s:
                self._replace(worker)
                why = f"no answer within {self.deadline_s:g} s; it was killed"
                heard(worker.job, Broken(how="deadline", why=why))
            elif not worker.ready and worker.waited > _LOAD_DEADLINE_S:
                self._not_loaded(worker, f"{self._what} did not load within {_LOAD_DEADLINE_S:g} s")

    def _listen(self, worker: Worker, heard: Heard) -> None:
        ended = worker.process.poll() is not None
        try:
            messages = worker.receive()
            if ended and not messages:  # its children may hold the channel open
                raise Gone("the process has ended")
        except Gone as gone:
            how = self._replace(worker)
            if worker.job is None:
                self._start_failed(how)
            else:
                heard(worker.job, Broken(how="crash", why=str(gone) if isinstance(gone, Nonsense) else how))
            return
        for message in messages:
            if worker not in self.workers:  # replaced because of what it said before
                return
            if worker.enclosed is None:
                worker.enclosed = _namespaces.allowed
                if message.get("refused"):
                    _namespaces.refuse(str(message["refused"]))
                    self._replace(worker)
            elif "fatal" in message:
                raised = f"{self._what} cannot be made: " if message.get("raised") else ""
                raise self._error(f"{raised}{message['fatal']}")
            elif "ready" in message:
                worker.ready = True
                self.ready = self.ready or dict(message["ready"])
            elif worker.job is not None:
                self._pass_on(worker, message, heard)

    def _pass_on(self, worker: Worker, message: dict[str, Any], heard: Heard) -> None:
        """A message about a worker's job."""
        self._failed_starts = 0
        job = worker.job
        worker.begin(None if message.get("done") else job, shown=worker.shown)
        if "sought" in message and not self._network_said:
            self._network_said = True
            sought, option = visible_text(str(message["sought"])[:100]), self.walls.options[0]
            logger.warning(
                "%s tried to reach %s, but has no network: set %s to give it one", self._what, sought, option
            )
        if message.get("memory"):
            self._replace(worker)
            most = self.walls.memory_mb
            limit = f"more than memory_mb={most}" if most else "more memory than there is"
            heard(job, Broken(how="crash", why=f"it asked for {limit}: {message.get('error')}"))
            return
        try:
            heard(job, message)
        except UserError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):  # a worker that was taken over
            self._replace(worker)
            heard(job, Broken(how="crash", why="its worker process sent something unreadable"))

    def _replace(self, worker: Worker) -> str:
        """Kill a worker and start another in its place; how it had ended."""
        how, place = worker.kill(), self.workers.index(worker)
        self.workers[place] = self._start(self._setups[place])
        return how

    def _start(self, setup: bytes) -> Worker:
        self._hosts.rotate(-1)  # one that is lost is passed over
        host = self._hosts[0] if self._hosts else None
        return Worker(self._module, setup, what=self._what, walls=self.walls, namespaces=_namespaces.allowed, host=host)

    def _not_loaded(self, worker: Worker, why: str) -> None:
        raise self._retryable(why)

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


def _ignore(job: Any, said: Any) -> None:
    """Before there are jobs, there is nothing to hear of one."""


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    patience = monotonic() + 0.5
    while monotonic() < patience and any(w.process.poll() is None and w.ready and w.job is None for w in workers):
        sleep(0.005)
    for worker in workers:
        worker.kill()
