"""Environments of many episodes: built-in ones in this process, anybody else's in workers that can be killed.

A worker holds many episodes. If one of them hangs or takes the process down, that episode has failed; the others are
played again from their seed up to where they were, in a new process.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.agents.replies import BadReply, Reply
from rolecall.agents.worker import Call, call_env, describe
from rolecall.tasks.env import EnvError
from rolecall.workers.hosts import Host
from rolecall.workers.load import pickle_callable
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls

_WAIT_S = 0.2
"""How long to wait for answers before whoever asks has a look at other things."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an episode cannot go on."""

    reason: str
    """In a sentence."""
    wrong: bool = False
    """True if what the environment returned is not what it should; False if it raised, hung or died."""


Tools = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]]
"""JSON schemas; where there are several environments, those of each by its name."""


class Envs(Protocol):
    """Environments by the number of their episode. Nothing that an environment does raises."""

    @property
    def players(self) -> tuple[str, ...]:
        """Who plays."""
        ...

    @property
    def tools(self) -> Tools:
        """JSON schemas for the chat template."""
        ...

    def begin(self) -> None:
        """Forget all episodes: others begin."""
        ...

    def send(self, key: int, call: Call, given: Any) -> None:
        """`start`: (row, seed) of an episode. `step`: the policy's message. `end`: nothing, of an episode that was cut off,
        which may still say something. Does not wait for the answer."""
        ...

    def receive(self, *, wait: bool) -> list[tuple[int, Reply | Failure]]:
        """The answers that have come since the last time, and whose they are. With `wait`, after waiting a moment for one."""
        ...

    def ask(self, call: Call, given: Mapping[int, Any]) -> dict[int, Reply | Failure]:
        """Send the same call to several episodes and wait for all answers; `start` begins anew."""
        if call == "start":
            self.begin()
        for key, one in given.items():
            self.send(key, call, one)
        found: dict[int, Reply | Failure] = {}
        while len(found) < len(given):
            found |= dict(self.receive(wait=True))
        return {key: found[key] for key in given}


class LocalEnvs(Envs):
    """In this process: for environments that are known to return."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        known = describe(factory)
        self._players, self._tools = tuple(known["players"]), known["tools"]
        self._factory = factory
        self._envs: dict[int, Any] = {}
        self._answers: list[tuple[int, Reply | Failure]] = []

    @property
    def players(self) -> tuple[str, ...]:
        return self._players

    @property
    def tools(self) -> Tools:
        return self._tools

    def begin(self) -> None:
        self._envs, self._answers = {}, []

    def send(self, key: int, call: Call, given: Any) -> None:
        self._answers.append((key, self._ask(key, call, given)))

    def receive(self, *, wait: bool) -> list[tuple[int, Reply | Failure]]:
        answers, self._answers = self._answers, []
        return answers

    def _ask(self, key: int, call: Call, given: Any) -> Reply | Failure:
        try:
            return call_env(self._envs, self._factory, key, call, given)
        except BadReply as error:
            return Failure(reason=str(error), wrong=True)
        except Exception as error:  # the episode's failure, not the run's
            return Failure(reason=f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _History:
    """What an episode's environment has been through, to bring another to the same place."""

    worker: Worker | None = None
    """Which process holds it."""
    calls: list[tuple[Call, Any]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Asked:
    """A call to an episode's environment, while it waits or is answered."""

    key: int
    call: Call
    given: Any
    worker: Worker | None = None
    """Which process it was sent to."""


class EnvPool(WorkerPool, Envs):
    """In worker processes with a deadline: for environments that may do anything."""

    def __init__(
        self,
        source: str | Callable[[], Any],
        *,
        workers: int = 2,
        deadline_s: float = 60.0,
        memory_mb: int | None = 2048,
        network: bool = False,
        variables: Sequence[str] = (),
        hosts: Sequence[Host] = (),
    ) -> None:
        """`source` is a name, as `environments` knows them, or a class or function that makes environments."""
        name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        what = f"environment {name}"
        packed: str | bytes = (
            source
            if isinstance(source, str)
            else pickle_callable(source, what=what, advice="name it 'file.py:Class'", error=EnvError)
        )
        super().__init__(
            "rolecall.agents.worker",
            [{"name": name, "source": packed}] * workers,
            what=what,
            error=EnvError,
            deadline_s=deadline_s,
            walls=Walls(
                memory_mb=memory_mb,
                network=network,
                variables=tuple(variables),
                options=("agent.network", "agent.variables"),
            ),
            hosts=hosts,
        )
        self._players, self._tools = tuple(self.ready["players"]), self.ready["tools"]
        self._episodes: dict[int, _History] = {}
        self._batch = 0
        self.begin()

    @property
    def players(self) -> tuple[str, ...]:
        return self._players

    @property
    def tools(self) -> Tools:
        return self._tools

    def begin(self) -> None:
        for worker in self._busy:  # nobody waits for what they do
            self._replace(worker)
        self._episodes = {}
        self._queues: list[deque[_Asked]] = [deque() for _ in self.workers]
        self._answers: list[tuple[int, Reply | Failure]] = []
        self._batch += 1

    def send(self, key: int, call: Call, given: Any) -> None:
        if call == "start":
            self._episodes[key] = _History()
        self._queues[key % len(self.workers)].append(_Asked(key, call, given))

    def receive(self, *, wait: bool) -> list[tuple[int, Reply | Failure]]:
        try:
            for place, queue in enumerate(self._queues):
                self._give(self.workers[place], queue, self._pack, self._heard)
            self._hear(self._heard, _WAIT_S if wait and not self._answers else 0.0)
        except BaseException:  # after an error or Ctrl-C, nobody waits for what they do
            self.begin()
            raise
        answers, self._answers = self._answers, []
        return answers

    def _pack(self, asked: _Asked, worker: Worker) -> bytes:
        history = self._episodes[asked.key]
        asked.worker = worker
        anew = asked.call == "start" or history.worker is worker
        rebuild = None if anew else (history.calls, history.digests)
        job = {"key": asked.key, "call": asked.call, "given": asked.given, "rebuild": rebuild, "batch": self._batch}
        return pickle.dumps(job)

    def _heard(self, asked: _Asked, answer: dict[str, Any] | Broken) -> None:
        found: Reply | Failure
        if isinstance(answer, Broken):
            found = Failure(reason=answer.why)
        elif "error" in answer:
            found = Failure(reason=str(answer["error"]), wrong=bool(answer.get("wrong")))
        else:
            found, digest = Reply(**answer["reply"]), answer["digest"]
            history = self._episodes[asked.key]
            history.worker = asked.worker
            history.calls.append((asked.call, asked.given))
            history.digests.append(digest)
        self._answers.append((asked.key, found))
