"""Environments of many episodes: built-in ones in this process, anybody else's in workers that can be killed.

A worker holds many episodes. If one of them hangs or takes the process down, that episode has failed; the others are
played again from their seed up to where they were, in a new process.
"""

import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, Protocol, Self

from rolecall.rewards.processes import Gone, Worker
from rolecall.rollout.agents.worker import describe, digest
from rolecall.tasks.env import BadReply, EnvError, Message, Reply, first_reply, last_reply, next_reply

_LOAD_DEADLINE_S = 120.0
_STARTS_IN_VAIN = 5


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
    process: int = -1
    """Which process holds it."""
    said: list[Message] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


class _Place:
    """A worker process, or the one in its place."""

    def __init__(self, setup: bytes) -> None:
        self.setup, self.number, self.starts = setup, 0, 0
        self.queue: deque[tuple[int, str, Message | None]] = deque()
        self.worker = self._make()

    def _make(self) -> Worker:
        return Worker(self.setup, module="rolecall.rollout.agents.worker")

    def replace(self) -> str:
        """Kill and make anew; how it had ended."""
        how = self.worker.kill()
        self.worker, self.number = self._make(), self.number + 1
        return how


class EnvPool:
    """In worker processes with a deadline: for environments that may do anything."""

    def __init__(
        self,
        source: str | Callable[[], Any],
        *,
        workers: int = 2,
        deadline_s: float = 60.0,
        memory_mb: int | None = 2048,
    ) -> None:
        """`source` is a name, as `tasks.env_names` knows them, or a class or function that makes environments."""
        self.name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        setup = {"name": self.name, "source": source if isinstance(source, str) else _pickled(source, self.name)}
        self.deadline_s = deadline_s
        self._episodes: dict[int, _Played] = {}
        self._forget: list[list[int]] = [[] for _ in range(workers)]
        self._places = [_Place(pickle.dumps({**setup, "memory_mb": memory_mb})) for _ in range(workers)]
        self._end = weakref.finalize(self, _end, self._places)
        try:
            known = self._first_ready()
        except BaseException:
            self._end()
            raise
        self.players, self.tools = tuple(known["players"]), tuple(known["tools"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._end()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes of this moment."""
        return tuple(place.worker.process.pid for place in self._places)

    def start(self, starts: Mapping[int, Start]) -> dict[int, Reply | Failure]:
        for key in self._episodes:
            self._forget[key % len(self._places)].append(key)
        self._episodes = {key: _Played(row=s.row, seed=s.seed) for key, s in starts.items()}
        return self._round([(key, "start", None) for key in starts])

    def step(self, said: Mapping[int, Message]) -> dict[int, Reply | Failure]:
        return self._round([(key, "step", message) for key, message in said.items()])

    def end(self, episodes: Sequence[int]) -> dict[int, Reply | Failure]:
        return self._round([(key, "end", None) for key in episodes])

    def _round(self, jobs: Sequence[tuple[int, str, Message | None]]) -> dict[int, Reply | Failure]:
        for job in jobs:
            self._places[job[0] % len(self._places)].queue.append(job)
        found: dict[int, Reply | Failure] = {}
        try:
            while len(found) < len(jobs):
                for place in self._places:
                    self._hand_out(place)
                self._listen(found)
        finally:  # after an error or Ctrl-C, no worker goes on with what nobody waits for
            for place in self._places:
                place.queue.clear()
                if place.worker.job is not None:
                    place.replace()
        return {key: found[key] for key, _, _ in jobs}

    def _hand_out(self, place: _Place) -> None:
        worker = place.worker
        if not place.queue or not worker.ready or worker.job is not None:
            return
        key, what, message = place.queue[0]
        played, index = self._episodes[key], self._places.index(place)
        rebuild = None
        if what != "start" and played.process != place.number:
            rebuild = {name: getattr(played, name) for name in ("row", "seed", "said", "digests")}
        job = {"key": key, "what": what, "message": message, "rebuild": rebuild, "forget": self._forget[index]}
        if what == "start":
            job |= {"row": played.row, "seed": played.seed}
        try:
            worker.send(pickle.dumps(job), timeout=self.deadline_s)
        except Gone:  # it died while idle: nobody's fault
            self._in_vain(place)
            return
        self._forget[index] = []
        worker.job, worker.since = place.queue.popleft(), monotonic()

    def _listen(self, found: dict[int, Reply | Failure]) -> None:
        now = monotonic()
        due = [self.deadline_s - (now - p.worker.since) for p in self._places if p.worker.job is not None]
        talking = wait([place.worker.channel for place in self._places], max(0.0, min([1.0, *due])))
        for place in self._places:
            worker = place.worker
            if worker.channel in talking or worker.process.poll() is not None:
                self._hear(place, found)
            elif worker.job is not None and monotonic() - worker.since >= self.deadline_s:
                key = worker.job[0]
                place.replace()
                self._failed(found, key, f"no answer within {self.deadline_s:g} s; it was killed")
            elif not worker.ready and monotonic() - worker.since > _LOAD_DEADLINE_S:
                raise EnvError(f"environment {self.name} did not load within {_LOAD_DEADLINE_S:g} s")

    def _hear(self, place: _Place, found: dict[int, Reply | Failure]) -> None:
        worker = place.worker
        try:
            messages = worker.receive()
        except Gone:
            job = worker.job
            if job is None:
                self._in_vain(place)
            else:
                self._failed(found, job[0], place.replace())
            return
        for message in messages:
            if "fatal" in message:
                raise EnvError(str(message["fatal"]))
            if "ready" in message:
                worker.ready = True
            elif worker.job is not None:
                place.starts = 0
                (key, what, said), worker.job = worker.job, None
                self._answered(place, found, key, what, said, message)

    def _answered(
        self, place: _Place, found: dict[int, Reply | Failure], key: int, what: str, said: Message | None, message: Any
    ) -> None:
        played = self._episodes[key]
        if "error" in message:
            if message.get("memory"):
                place.replace()
            self._failed(found, key, str(message["error"]), wrong=bool(message.get("wrong")))
            return
        try:
            found[key] = Reply(**message["reply"])
        except (LookupError, TypeError):  # a worker that was taken over
            place.replace()
            self._failed(found, key, "its worker process sent something unreadable")
            return
        played.process = place.number
        if what != "end":
            played.said += [] if said is None else [said]
            played.digests.append(digest(asdict(found[key])))

    def _failed(self, found: dict[int, Reply | Failure], key: int, why: str, *, wrong: bool = False) -> None:
        found[key] = Failure(reason=why, wrong=wrong)

    def _in_vain(self, place: _Place) -> None:
        how = place.replace()
        place.starts += 1
        if place.starts >= _STARTS_IN_VAIN:
            raise EnvError(f"workers for environment {self.name} die before they are asked anything ({how})")

    def _first_ready(self) -> dict[str, Any]:
        while True:
            wait([place.worker.channel for place in self._places], 1.0)
            for place in self._places:
                try:
                    messages = place.worker.receive()
                except Gone:
                    self._in_vain(place)
                    continue
                for message in messages:
                    if "fatal" in message:
                        raise EnvError(str(message["fatal"]))
                    if "ready" in message:
                        place.worker.ready = True
                        return dict(message["ready"])
                if monotonic() - place.worker.since > _LOAD_DEADLINE_S:
                    raise EnvError(f"environment {self.name} did not load within {_LOAD_DEADLINE_S:g} s")


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


def _end(places: list[_Place]) -> None:
    for place in places:
        place.worker.hang_up()
        place.worker.kill()
