"""Environments of many episodes: built-in ones in this process, anybody else's in workers that can be killed.

A worker holds many episodes. If one of them hangs or takes the process down, that episode has failed; the others are
played again from their seed up to where they were, in a new process.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

from rolecall.rollout.agents.worker import describe, digest
from rolecall.tasks.env import BadReply, EnvError, Message, Reply, first_reply, last_reply, next_reply
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """An episode to begin."""

    row: Mapping[str, Any]
    seed: int


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

    def start(self, starts: Mapping[int, Start]) -> dict[int, Reply | Failure]:
        """Begin episodes; those of before are forgotten."""
        ...

    def step(self, said: Mapping[int, Message]) -> dict[int, Reply | Failure]:
        """What comes of the policy's messages."""
        ...

    def end(self, episodes: Sequence[int]) -> dict[int, Reply | Failure]:
        """What there is to say of episodes that were cut off."""
        ...


class LocalEnvs:
    """In this process: for environments that are known to return."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        known = describe(factory)
        self.players, self.tools = tuple(known["players"]), tuple(known["tools"])
        self._factory = factory
        self._envs: dict[int, Any] = {}

    def start(self, starts: Mapping[int, Start]) -> dict[int, Reply | Failure]:
        self._envs = {key: self._factory() for key in starts}
        return {key: _tried(first_reply, self._envs[key], s.row, s.seed) for key, s in starts.items()}

    def step(self, said: Mapping[int, Message]) -> dict[int, Reply | Failure]:
        return {key: _tried(next_reply, self._envs[key], message) for key, message in said.items()}

    def end(self, episodes: Sequence[int]) -> dict[int, Reply | Failure]:
        return {key: _tried(last_reply, self._envs[key]) for key in episodes}


def _tried(what: Callable[..., Reply], *given: Any) -> Reply | Failure:
    try:
        return what(*given)
    except BadReply as error:
        return Failure(reason=str(error), wrong=True)
    except Exception as error:  # the episode's failure, not the run's
        return Failure(reason=f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _Played:
    """What an episode's environment has been through, to bring another to the same place."""

    row: Mapping[str, Any]
    seed: int
    worker: Worker | None = None
    """Which process holds it."""
    said: list[Message] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


_Job = tuple[int, str, Message | None]
"""Episode, what to do (start, step or end), and what was said."""


class EnvPool:
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
        """`source` is a name, as `tasks.env_names` knows them, or a class or function that makes environments."""
        self.name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        setup = {"name": self.name, "source": source if isinstance(source, str) else _pickled(source, self.name)}
        self._episodes: dict[int, _Played] = {}
        self._forget: list[list[int]] = [[] for _ in range(workers)]
        self._pool = WorkerPool(
            "rolecall.rollout.agents.worker",
            [pickle.dumps(setup)] * workers,
            what=f"environment {self.name}",
            error=EnvError,
            deadline_s=deadline_s,
            walls=Walls(
                memory_mb=memory_mb,
                network=network,
                variables=tuple(variables),
                options=("agent.network", "agent.variables"),
            ),
        )
        known = self._pool.ready or {}
        self.players, self.tools = tuple(known["players"]), tuple(known["tools"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes of this moment."""
        return self._pool.pids

    def start(self, starts: Mapping[int, Start]) -> dict[int, Reply | Failure]:
        for key in self._episodes:
            self._forget[key % len(self._forget)].append(key)
        self._episodes = {key: _Played(row=s.row, seed=s.seed) for key, s in starts.items()}
        return self._round([(key, "start", None) for key in starts])

    def step(self, said: Mapping[int, Message]) -> dict[int, Reply | Failure]:
        return self._round([(key, "step", message) for key, message in said.items()])

    def end(self, episodes: Sequence[int]) -> dict[int, Reply | Failure]:
        return self._round([(key, "end", None) for key in episodes])

    def _round(self, jobs: Sequence[_Job]) -> dict[int, Reply | Failure]:
        queues: list[deque[_Job]] = [deque() for _ in self._forget]
        for job in jobs:
            queues[job[0] % len(queues)].append(job)
        found: dict[int, Reply | Failure] = {}
        try:
            while len(found) < len(jobs):
                for place, queue in enumerate(queues):
                    worker = self._pool.workers[place]
                    if queue and worker.ready and worker.job is None and self._give(worker, place, queue[0]):
                        queue.popleft()
                for worker, job, said in self._pool.hear():
                    found[job[0]] = self._heard(worker, job, said)
        finally:
            self._pool.drop_jobs()
        return {key: found[key] for key, _, _ in jobs}

    def _give(self, worker: Worker, place: int, job: _Job) -> bool:
        key, what, message = job
        played = self._episodes[key]
        rebuild = None
        if what != "start" and played.worker is not worker:
            rebuild = {name: getattr(played, name) for name in ("row", "seed", "said", "digests")}
        asked = {"key": key, "what": what, "message": message, "rebuild": rebuild, "forget": self._forget[place]}
        if what == "start":
            asked |= {"row": played.row, "seed": played.seed}
        given = self._pool.give(worker, job, pickle.dumps(asked))
        if given:
            self._forget[place] = []
        return given

    def _heard(self, worker: Worker, job: _Job, answer: dict[str, Any] | Broken) -> Reply | Failure:
        key, what, said = job
        if isinstance(answer, Broken):
            return Failure(reason=answer.why)
        if "error" in answer:
            return Failure(reason=str(answer["error"]), wrong=bool(answer.get("wrong")))
        try:
            reply = Reply(**answer["reply"])
        except (LookupError, TypeError):  # a worker that was taken over
            self._pool.replace(worker)
            return Failure(reason="its worker process sent something unreadable")
        played = self._episodes[key]
        played.worker = worker
        if what != "end":
            played.said += [] if said is None else [said]
            played.digests.append(digest(asdict(reply)))
        return reply


def _pickled(source: Callable[[], Any], name: str) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(source)
    except Exception as error:
        raise EnvError(
            f"environment {name} cannot be sent to a worker process ({type(error).__name__}: {error}); move it into a "
            "file and name it 'file.py:Class'"
        ) from error
    return packed
