"""Episodes that somebody's own program plays: it calls the gateway for every turn, and returns what the episode is worth.

Each program runs in a process of its own, in workers that can be killed. A program's clock is its own: its calls are answered
as they come.
"""

import pickle
import re
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from rolecall.agents.conversation import Dialect
from rolecall.agents.gateway import Gateway, Session
from rolecall.agents.play import Drawn, dialect_of, drawn_for
from rolecall.agents.played import Played, Wanted
from rolecall.agents.pool import Failure
from rolecall.agents.verifiers_env import PREFIX as VERIFIERS
from rolecall.agents.verifiers_env import check_verifiers
from rolecall.config.agents import AgentOptions
from rolecall.rollout.engine import Engine
from rolecall.rollout.pinned import Pinned, Stopped
from rolecall.rollout.service import Service
from rolecall.tasks.env import SOLO, EnvError
from rolecall.types import Finish, Request, Sampling
from rolecall.workers.load import pickle_callable, split_name
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Gone, Worker
from rolecall.workers.walls import Walls

PREFIX = "agent:"
"""How the name of an environment begins that is a program."""

_FUNCTION = re.compile(r"(\S+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
_SILENCE_S = 30.0
"""A worker gives a sign of life every two seconds; one that does not for so long is replaced."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function that plays episodes, given in Python."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What a program returned."""

    reward: float | None
    result: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised(Failure):
    """A program that ended by itself, with an error."""


@dataclass(slots=True, eq=False)
class _Job:
    """The episodes that a worker runs."""

    episodes: Sequence[Mapping[str, Any]]
    left: set[int]
    """Those that have not ended."""
    begun: set[int]
    told: set[int]
    """Those that were told to end."""


class Programs(WorkerPool):
    """Workers that run programs. `source` is file.py:function, a command line, or a function."""

    def __init__(self, source: str | Program, options: AgentOptions) -> None:
        name = source if isinstance(source, str) else source.name
        packed = _packed(source, name)
        self.options = options
        self._directory = Path(tempfile.mkdtemp(prefix="rolecall-gateway-"))
        self.socket = self._directory / "socket"
        self.gateway: Gateway | None = None
        super().__init__(
            "rolecall.agents.program_worker",
            [{"name": name, "source": packed, "socket": str(self.socket)}] * options.workers,
            what=f"agent {name}",
            error=EnvError,
            deadline_s=_SILENCE_S,
            walls=Walls(
                memory_mb=4096,
                network=options.network,
                variables=options.variables,
                options=("agent.network", "agent.variables"),
                processes=4096,
            ),
        )

    def close(self) -> None:
        """End the workers and the endpoint."""
        super().close()
        if self.gateway is not None:
            self.gateway.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def play(
        self,
        episodes: Sequence[Mapping[str, Any]],
        *,
        begun: Callable[[int], None],
        waited: Callable[[int], float],
        ended: Callable[[int, Returned | Failure], None],
        between: Callable[[], None],
        late: Callable[[], bool],
    ) -> None:
        """Run a program for each episode until all have ended. `waited` says how long one has let pass without a call; when
        it is `late`, all are ended."""
        places = len(self.workers)
        shares = [[e for e in episodes if e["at"] % places == place] for place in range(places)]
        queues = [deque([_Job(share, {e["at"] for e in share}, set(), set())] if share else []) for share in shares]
        at_once = max(1, self.options.programs // places)

        def pack(job: _Job, worker: Worker) -> bytes:
            return pickle.dumps({"episodes": job.episodes, "at_once": at_once})

        def heard(job: _Job, said: dict[str, Any] | Broken) -> None:
            if isinstance(said, Broken):
                for at in sorted(job.left):
                    ended(at, Failure(reason=f"the worker of its program was lost: {said.why}"))
                job.left.clear()
            elif "at" in said:
                _note(job, said, begun, ended)

        try:
            while any(queues) or self._busy:
                for place, queue in enumerate(queues):
                    self._give(self.workers[place], queue, pack, heard)
                self._hear(heard, 0.2)
                self._end_overdue(waited, ended, late=late())
                between()
        finally:
            for worker in self._busy:  # after an error or Ctrl-C, nobody waits for what they do
                self._replace(worker)

    @property
    def grouped(self) -> bool:
        """Whether what an episode is worth is known when all of its group have ended."""
        return bool(self.ready["grouped"])

    def score(self, groups: Mapping[int, Mapping[int, Returned]]) -> dict[int, Returned | Failure]:
        """What episodes are worth, each compared with the others of its group."""
        found: dict[int, Returned | Failure] = {}

        def pack(group: int, worker: Worker) -> bytes:
            return pickle.dumps({"states": [returned.result["state"] for returned in groups[group].values()]})

        def heard(group: int, said: dict[str, Any] | Broken) -> None:
            scores = None if isinstance(said, Broken) else said.get("scores")
            why = said.why if isinstance(said, Broken) else said.get("error")
            for number, at in enumerate(groups[group]):
                if scores is not None:
                    result = dict(scores[number])
                    found[at] = Returned(reward=result.pop("reward"), result=result)
                elif why is not None:
                    found[at] = Failure(reason=f"its group could not be scored: {why}")

        queue = deque(groups)
        silence, self.deadline_s = self.deadline_s, self.options.deadline
        try:
            self.run([queue] * len(self.workers), pack=pack, heard=heard)
        finally:
            self.deadline_s = silence
        return found

    def _end_overdue(
        self, waited: Callable[[int], float], ended: Callable[[int, Returned | Failure], None], *, late: bool
    ) -> None:
        limit = self.options.deadline
        for worker in self._busy:
            job: _Job = worker.job
            for at in sorted(job.left - job.told):
                if late or (at in job.begun and waited(at) >= limit):
                    job.told.add(at)
                    job.left.discard(at)
                    why = "" if late else f"no call of the policy and no end within {limit:g} s; it was killed"
                    ended(at, Failure(reason=why))
                    try:
                        worker.send(pickle.dumps({"end": at}), timeout=5.0)
                    except Gone:  # whoever listens to it next finds out
                        break


def _note(
    job: _Job,
    said: Mapping[str, Any],
    begun: Callable[[int], None],
    ended: Callable[[int, Returned | Failure], None],
) -> None:
    at = int(said["at"])
    if at not in job.left:  # it was ended before
        return
    if "begun" in said:
        job.begun.add(at)
        begun(at)
        return
    job.left.discard(at)
    if "error" in said:
        ended(at, (Raised if "raised" in said else Failure)(reason=str(said["error"])))
    else:
        ended(at, Returned(reward=said["reward"], result=said["result"]))


def _packed(source: str | Program, name: str) -> str | bytes | list[str]:
    """As it travels to a worker: a function by name or by value, a command as its words."""
    what = f"agent {name!r}"
    if not isinstance(source, str):
        return pickle_callable(source.function, what=what, advice="name it 'file.py:function'", error=EnvError)
    if source.startswith(VERIFIERS):
        check_verifiers(source)
        return source
    if _FUNCTION.fullmatch(source):
        return ":".join(split_name(source, what=what, error=EnvError))
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise EnvError(f"{what} is not a command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise EnvError(
            f"{what} is neither file.py:function nor a command: there is no program {words[0] if words else ''!r} to start"
        )
    return words


class ProgramPlayer:
    """Plays episodes with one kind of program and one engine."""

    players = (SOLO,)

    def __init__(
        self,
        *,
        engine: Engine,
        programs: Programs,
        dialect: Dialect,
        options: AgentOptions,
        context_length: int,
        model: str,
    ) -> None:
        self.engine, self.programs, self.dialect, self.options = engine, programs, dialect, options
        limit = min(context_length, options.context_tokens or context_length)
        # Players of the same programs share it: they take turns.
        shared = programs.gateway
        if shared is None or shared.closed:
            shared = Gateway(programs.socket, options, context_length=limit, model=model)
        self.gateway = programs.gateway = shared
        self.advance: Callable[[int, int, str], None] = lambda done, total, unit: None
        """Told how many episodes have ended."""
        self.ended: Callable[[Played], None] = lambda episode: None
        """Told of each episode as it ends."""
        self.between: Callable[[], None] = lambda: None
        """Called over and over while episodes are played."""

    def play(self, wanted: Sequence[Wanted], sampling: Sampling, *, seed: int, step: int) -> list[Played]:
        """All of them to their ends, in the order given."""
        drawn = drawn_for(wanted, sampling, seed=seed, step=step)
        until = inf if self.options.max_seconds is None else monotonic() + self.options.max_seconds
        sessions = [self._session(w, drawn) for w in wanted]
        found: dict[int, Returned | Failure] = {}
        played: dict[int, Played] = {}

        def over(at: int) -> None:
            played[at] = _played(wanted[at], sessions[at], found[at], self.engine.version)
            self.ended(played[at])

        def begun(at: int) -> None:
            sessions[at].since = monotonic()

        def ended(at: int, how: Returned | Failure) -> None:
            self.gateway.end(sessions[at], streams=isinstance(how, Failure))
            found[at] = how
            if not sessions[at].streams and not self.programs.grouped:
                over(at)
            self.advance(len(found), len(wanted), "episodes")

        service = Service(self.engine)
        try:
            self.gateway.open(sessions, service)
            self.programs.play(
                [
                    {"at": i, "path": f"/{i}/v1", "key": session.key, "row": dict(w.row)}
                    for i, (w, session) in enumerate(zip(wanted, sessions, strict=True))
                ],
                begun=begun,
                waited=lambda at: sessions[at].waited,
                ended=ended,
                between=self.between,
                late=lambda: monotonic() >= until or self._stopped,
            )
            if self.programs.grouped:
                groups: dict[int, dict[int, Returned]] = {}
                for at in sorted(found):
                    if isinstance(how := found[at], Returned):
                        groups.setdefault(wanted[at].prompt, {})[at] = how
                found |= self.programs.score(groups)
            for at in sorted(found.keys() - played.keys()):
                self.gateway.settle(sessions[at])
                over(at)
        finally:
            for session in sessions:
                self.gateway.end(session)
            service.close()
        if self._stopped:
            raise Stopped
        return [played[at] for at in range(len(wanted))]

    @property
    def _stopped(self) -> bool:
        """Whether nobody waits any more for what is sampled ahead."""
        return isinstance(self.engine, Pinned) and self.engine.published.stopped

    def _session(self, wanted: Wanted, drawn: Drawn) -> Session:
        return Session(
            dialect=dialect_of(wanted.row, self.dialect),
            sampling=drawn.sampling,
            request=partial(_request, wanted, drawn),
        )


def _request(wanted: Wanted, drawn: Drawn, number: int, ids: tuple[int, ...], sampling: Sampling) -> Request:
    """A call's request. The first sample of an episode is drawn and cached as an environment's would be."""
    line = number >> 16
    return drawn.request(wanted, number, ids, sampling, who=f"{SOLO}/{line}" if line else SOLO)


def _played(wanted: Wanted, session: Session, how: Returned | Failure, version: int) -> Played:
    transcript = session.transcript
    played = Played(wanted=wanted, sides={SOLO: transcript}, speaker=SOLO, counts=session.counts, version=version)
    played.began = transcript.whys
    if isinstance(how, Raised) and session.refused is not None and transcript.samples:
        played.finish = session.refused  # most programs end with the error of the call that a limit refused
        return played
    if isinstance(how, Failure):
        played.finish = Finish.ABORT if how.reason else Finish.TIMEOUT
        played.failure = how.reason or None
        return played
    played.finish = session.finish or Finish.ENVIRONMENT
    played.view = how.result
    if how.reward is not None:
        played.rewards[SOLO] = how.reward
    if not transcript.samples:
        why = f": the last call was refused, {session.refusal}" if session.refusal else ""
        played.finish, played.failure = Finish.ABORT, f"its program ended without an answer of the policy{why}"
    return played
