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
from rolecall.workers.load import pickle_callable
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an episode cannot go on."""

    reason: str
    """In a sentence."""
    wrong: bool = False
    """True if what the environment returned is not what it should; False if it raised, hung or died."""


class Envs(Protocol):
    """Environments by the number of their episode. Nothing that an environment does raises."""

    @property
    def players(self) -> tuple[str, ...]:
        """Who plays."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for the chat template."""
        ...

    def ask(self, call: Call, given: Mapping[int, Any]) -> dict[int, Reply | Failure]:
        """`start`: (row, seed) of episodes to begin; those of before are forgotten. `step`: the policy's messages.
        `end`: nothing, of episodes that were cut off, which may still say something."""
        ...


class LocalEnvs:
    """In this process: for environments that are known to return."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        known = describe(factory)
        self.players, self.tools = tuple(known["players"]), tuple(known["tools"])
        self._factory = factory
        self._envs: dict[int, Any] = {}

    def ask(self, call: Call, given: Mapping[int, Any]) -> dict[int, Reply | Failure]:
        if call == "start":
            self._envs = {}
        return {key: self._ask(key, call, one) for key, one in given.items()}

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


class EnvPool(WorkerPool):
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
        )
        self.players, self.tools = tuple(self.ready["players"]), tuple(self.ready["tools"])
        self._episodes: dict[int, _History] = {}
        self._batch = 0

    def ask(self, call: Call, given: Mapping[int, Any]) -> dict[int, Reply | Failure]:
        if call == "start":
            self._episodes = {key: _History() for key in given}
            self._batch += 1
        places = len(self.workers)
        found: dict[int, Reply | Failure] = {}
        held_by: dict[int, Worker] = {}

        def pack(key: int, worker: Worker) -> bytes:
            held_by[key], history = worker, self._episodes[key]
            rebuild = None if call == "start" or history.worker is worker else (history.calls, history.digests)
            job = {"key": key, "call": call, "given": given[key], "rebuild": rebuild, "batch": self._batch}
            return pickle.dumps(job)

        def heard(key: int, answer: dict[str, Any] | Broken) -> None:
            if isinstance(answer, Broken):
                found[key] = Failure(reason=answer.why)
            elif "error" in answer:
                found[key] = Failure(reason=str(answer["error"]), wrong=bool(answer.get("wrong")))
            else:
                found[key] = Reply(**answer["reply"])
                history = self._episodes[key]
                history.worker = held_by[key]
                history.calls.append((call, given[key]))
                history.digests.append(answer["digest"])

        queues = [deque(key for key in given if key % places == place) for place in range(places)]
        self.run(queues, pack=pack, heard=heard)
        return {key: found[key] for key in given}
