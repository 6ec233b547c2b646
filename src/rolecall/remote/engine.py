"""An engine over servers: it shares prompts out, gives servers the weights, and asks again what a lost one was asked.

A unit of work is a number of prompts with all their samples. It is sent to one server and counted once, whole; if that server is
killed, stopped, restarted or slow, it is sent again, there or elsewhere, under the same random numbers. Only a server that
has the weights of the moment, and scores as the trainer does, is asked anything.
"""

import asyncio
import logging
import queue
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.remote.connection import Background, Connection
from rolecall.remote.dialect import About, Dialect, Published, ServerLostError, ServerRefusedError
from rolecall.remote.ours import RolecallDialect
from rolecall.remote.probe import Expected, Scorer, trainer_scores
from rolecall.remote.server import Server, StaleServerError, Wanted, refusal
from rolecall.remote.vllm import VllmDialect
from rolecall.rollout.engine import (
    Engine,
    Flight,
    check_numbers,
    check_request,
    check_weights,
    in_units,
    unanswered,
)
from rolecall.rollout.published import own_directory, write_weights
from rolecall.rollout.stops import Ticket
from rolecall.train.manifest import seal_model
from rolecall.types import Completion, Finish, Request, Sampling

_log = logging.getLogger("rolecall.rollout")

DIALECTS: tuple[Dialect, ...] = (RolecallDialect(), VllmDialect())
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TRIES = 3
"""How often a unit is tried, beyond twice for each server, before its failures end the run."""
_LONGEST_PAUSE_S = 5.0
_FILE = "model.safetensors"

Ended = tuple[Ticket, Completion] | Exception


@dataclass(eq=False, slots=True)
class _Unit:
    """Requests that are answered together."""

    tickets: Sequence[Ticket]
    out: "queue.SimpleQueue[Ended]"
    tries: int = 0
    task: "asyncio.Task[None] | None" = None
    answered: bool = False

    def settle(self, completions: Sequence[Completion]) -> None:
        """Hand the answers over, once. Those of requests that were cancelled in the meantime end as aborted."""
        if self.answered:
            return
        self.answered, found = True, iter(completions)
        for ticket in self.tickets:
            for completion in (next(found) for _ in range(ticket.request.n)):
                ended = replace(completion, finish=Finish.ABORT) if ticket.cancelled else completion
                self.out.put((ticket, ended))

    def cut(self) -> bool:
        """True if none of its requests is waited for any more; then they have ended, as they were."""
        cuts = [ticket.cut() for ticket in self.tickets]
        if not all(cuts):
            return False
        self.settle(
            [
                unanswered(t.request, i, c)
                for t, c in zip(self.tickets, cuts, strict=True)
                for i in range(t.request.n)
                if c
            ]
        )
        return True


@dataclass(slots=True)
class _State:
    """What the event loop's thread knows."""

    servers: list[Server]
    units: deque[_Unit] = field(default_factory=deque)
    """Those that wait."""
    running: set[_Unit] = field(default_factory=set)
    published: Published | None = None
    dark: float | None = None
    """Since when no server can be asked."""
    recoveries: "dict[Server, asyncio.Task[None]]" = field(default_factory=dict)
    dead: Exception | None = None
    """Why nothing is answered any more."""


class ServerEngine(Engine):
    """Samples on servers."""

    def __init__(
        self,
        policy: LoadedModel,
        options: EngineOptions,
        *,
        tokenizer: str,
        scorer: Scorer,
        sampling: Sampling,
        trainer: torch.dtype,
        urls: Sequence[str],
        key: str | None,
        add: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        """`policy` is the model that trains, an adapter merged; `tokenizer` its fingerprint; `scorer` as in `probe`, which
        computes in the dtype `trainer`; `add` takes what is measured, by name."""
        self.options, self.version, self._tell = options, -1, add
        self._measured: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._shapes = {name: p.shape for name, p in policy.model.named_parameters()}
        vocabulary = int(policy.model.get_input_embeddings().num_embeddings)
        self._wanted = Wanted(vocabulary=vocabulary, tokenizer=tokenizer, max_new_tokens=sampling.max_new_tokens)
        inside = None if options.weights_directory is None else Path(options.weights_directory).expanduser()
        self._shared = inside is not None or all(urlsplit(url).hostname in LOOPBACK for url in urls)
        self._directory = own_directory(sum(p.numel() * 4 for p in policy.model.parameters()), inside=inside)
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._background, self._scorer = Background(), scorer
        try:
            self._state = _State(self._background.run(self._open(urls, key)))
            self._check(options, sampling)
            self._expected = Expected.of(policy, trainer=trainer, servers=self.dtype)
            servers = self._state.servers
            self.context_length = min(policy.context_length, *(server.about.context_length for server in servers))
            self.load(dict(policy.model.named_parameters()), 0)
        except BaseException:
            self.close()
            raise

    async def _open(self, urls: Sequence[str], key: str | None) -> list[Server]:
        o = self.options
        connections = [Connection(url, key=key, silence=o.worker_silence, deadline=o.worker_deadline) for url in urls]
        self._background.connections.extend(connections)
        opened = (Server.open(connection, DIALECTS, silence=o.worker_silence) for connection in connections)
        return list(await asyncio.gather(*opened))

    def _check(self, options: EngineOptions, sampling: Sampling) -> None:
        """What servers are must fit the model, each other, and what was said of them."""
        for server in self._state.servers:
            server.check(self._wanted)
        self.about = _alike(self._state.servers)
        for what, told, found in (
            ("name", options.name, self.about.engine),
            ("dtype", options.dtype, self.about.dtype),
        ):
            if told not in (None, "auto", found):
                raise UserError(
                    f"engine.{what} is {told}, but the servers have {found}: leave it out, or start them so"
                )
        self.dialect, self.dtype = self._state.servers[0].dialect, getattr(torch, self.about.dtype)
        self._check_sampling(sampling)

    # -- weights -------------------------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish weights and wait until every server that can be reached has them and scores as the trainer does."""
        check_weights(weights, self._shapes)
        published = self._publish(weights, version)
        self._expected.publish(trainer_scores(self._scorer, self._expected.sequences))
        begun = monotonic()
        self._background.run(self._sync_all(published))
        self.version = version
        self._add("servers/sync", monotonic() - begun)
        self.flush()

    def metrics(self) -> dict[str, float]:
        """How far the servers' log-probs of the probe are from the trainer's, for the server that is furthest."""
        return {"sampling/probe_difference": max((s.last_gap for s in self._state.servers if s.ready), default=0.0)}

    def _add(self, name: str, value: float) -> None:
        self._measured.put((name, value))

    def flush(self) -> None:
        """Hand on what was measured, in the thread that asks for answers."""
        while not self._measured.empty():
            self._tell(*self._measured.get())

    def _publish(self, weights: Mapping[str, Tensor], version: int) -> Published:
        place = self._directory / f"v{version:06d}"
        for old in self._directory.iterdir():
            shutil.rmtree(old)
        place.mkdir()
        hashed = write_weights(place / _FILE, weights, self.dtype)
        seal_model(place, version)
        return Published(directory=place, file=place / _FILE, version=version, hash=hashed, shared=self._shared)

    def hash(self) -> str:
        """The fingerprint of the published weights. Servers that give theirs have been compared with it, and all by the probe."""
        assert self._state.published is not None
        return self._state.published.hash

    async def _sync_all(self, published: Published) -> None:
        """Until one server at least has the weights; those that are out of reach go on being tried."""
        state = self._state
        state.published, state.dark = published, monotonic()
        old = list(state.recoveries.values())
        for task in old:
            task.cancel()
        await asyncio.gather(*old, return_exceptions=True)
        for server in state.servers:
            server.ready = False
        await asyncio.gather(*(self._bring_up(server) for server in self._usable()))
        while not any(server.ready for server in state.servers):
            self._check_patience()
            await asyncio.sleep(0.05)
        state.dark = None

    def _usable(self) -> list[Server]:
        found = [server for server in self._state.servers if server.out is None]
        if not found:
            why = "; ".join(f"{server.url}: {server.out}" for server in self._state.servers)
            raise UserError(f"no server is left that samples from the weights that are trained: {why}", exit_code=1)
        return found

    async def _bring_up(self, server: Server) -> None:
        """Give a server the weights. One that does not take them is left out, one that is out of reach tried again later."""
        published = self._state.published
        assert published is not None
        try:
            await server.sync(published, self._expected)
        except ServerLostError as error:
            self._lose(server, str(error))
        except (StaleServerError, ServerRefusedError) as error:
            what = refusal(error) if isinstance(error, ServerRefusedError) else str(error)
            server.out = f"version {published.version} did not arrive, though it was loaded twice: {what}"
            _log.warning("%s takes no further part: %s", server.url, server.out)
            self._add("servers/out", 1.0)
            self._usable()
        self._dispatch()

    def _lose(self, server: Server, why: str) -> None:
        """A server that cannot be asked now; it is looked for until it is back, and given the weights again."""
        _log.warning("%s is lost, what it was asked is asked again: %s", server.url, why)
        self._add("servers/lost", 1.0)
        state = self._state
        server.ready = False
        if not any(other.ready for other in state.servers) and state.dark is None:
            state.dark = monotonic()
        if server not in state.recoveries and server.out is None:
            state.recoveries[server] = asyncio.ensure_future(self._recover(server))

    async def _recover(self, server: Server) -> None:
        pause, state = 0.1, self._state
        try:
            while not server.ready and server.out is None:
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                try:
                    await server.reconnect(self._wanted)
                    assert state.published is not None
                    await server.sync(state.published, self._expected)
                except (ServerLostError, ServerRefusedError, TimeoutError):
                    self._check_patience()
                except (StaleServerError, UserError) as error:
                    server.out = str(error)
                    _log.warning("%s takes no further part: %s", server.url, error)
                    self._usable()
            state.dark = None if server.ready else state.dark
        except Exception as error:
            self._fail_all(error)
        finally:
            state.recoveries.pop(server, None)
        self._dispatch()

    def _check_patience(self) -> None:
        dark, patience = self._state.dark, self.options.server_patience
        if dark is not None and monotonic() - dark > patience:
            raise UserError(
                f"no server of engine.servers could be asked for {patience:g} s; start them again, then resume",
                exit_code=75,
            )

    # -- requests ------------------------------------------------------------------------------------------------

    def open(self) -> Flight:
        """A flight whose requests are sent together when it takes its next step."""
        return _ServerFlight(self)

    def check(self, request: Request) -> None:
        """Refuse what servers cannot answer, or cannot record exactly."""
        check_request(request, context_length=self.context_length, vocabulary=self._wanted.vocabulary)
        self._check_sampling(request.sampling)

    def _check_sampling(self, sampling: Sampling) -> None:
        if why := self.dialect.unable(sampling):
            raise UserError(f"a server of the kind {self.dialect.name} {why}")

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers as they end. What is left when nobody reads on is given up."""
        check_numbers(requests)
        flight = _ServerFlight(self)
        tickets = [flight.add(request) for request in requests]
        try:
            while flight:
                for _, completion in flight.step():
                    yield completion
        finally:
            if flight:
                for ticket in tickets:
                    flight.cancel(ticket)
            self.flush()

    def submit(self, tickets: Sequence[Ticket], out: "queue.SimpleQueue[Ended]") -> None:
        """Have requests answered into a queue. Units do not depend on which servers are there: what is drawn is the same."""
        loop = self._background.loop
        for _, group in groupby(tickets, key=lambda ticket: ticket.deadline):
            together = {id(t.request): t for t in group}
            requests = [t.request for t in together.values()]
            count = len({request.prompt for request in requests})
            size = self.dialect.unit_prompts or ceil(count / len(self._state.servers))
            for unit in in_units(requests, prompts=size):
                loop.call_soon_threadsafe(self._take, _Unit([together[id(request)] for request in unit], out))

    def cancelled(self) -> None:
        """Look for units that nobody waits for any more, or whose time is up."""
        self._background.loop.call_soon_threadsafe(self._drop_cancelled)

    def _take(self, unit: _Unit) -> None:
        if self._state.dead is not None:
            unit.out.put(self._state.dead)
            return
        self._state.units.append(unit)
        self._dispatch()

    def _drop_cancelled(self) -> None:
        for unit in [*self._state.units, *self._state.running]:
            if unit.cut() and unit.task is not None:
                unit.task.cancel()  # the connection is given up, by which the server knows
        self._dispatch()

    def _dispatch(self) -> None:
        """Give what waits to servers with room."""
        state = self._state
        while state.units:
            if state.units[0].cut():
                state.units.popleft()
                continue
            room = [s for s in state.servers if s.ready and s.busy < self.dialect.at_once]
            if not room:
                return
            unit, server = state.units.popleft(), min(room, key=lambda s: s.busy)
            server.busy += 1
            state.running.add(unit)
            unit.task = asyncio.ensure_future(self._answer(unit, server))

    async def _answer(self, unit: _Unit, server: Server) -> None:
        requests, deadline = [t.request for t in unit.tickets], unit.tickets[0].deadline
        begun = monotonic()
        seconds = None if deadline is None else max(0.001, deadline - begun)
        try:
            unit.settle(await server.answer(requests, version=self.version, seconds=seconds))
            self._add("servers/busy", monotonic() - begun)
        except (ServerLostError, StaleServerError) as error:
            if isinstance(error, StaleServerError):
                self._add("servers/stale", 1.0)
            self._again(unit, server, str(error))
        except ServerRefusedError as error:
            unit.out.put(UserError(f"{server.url} does not answer: {refusal(error)}", exit_code=1))
        except Exception as error:
            unit.out.put(error)
        finally:
            server.busy -= 1
            self._state.running.discard(unit)
            self._dispatch()

    def _again(self, unit: _Unit, server: Server, why: str) -> None:
        unit.tries += 1
        self._lose(server, why)
        if unit.tries >= _TRIES + 2 * len(self._state.servers):
            unit.out.put(
                UserError(
                    f"a request failed {unit.tries} times, the last time at {server.url}: {why}; look at the servers' output, "
                    "then resume",
                    exit_code=75,
                )
            )
        else:
            self._state.units.appendleft(unit)

    def _fail_all(self, error: Exception) -> None:
        state = self._state
        state.dead = error
        for unit in (*state.units, *state.running):
            unit.out.put(error)
        state.units.clear()

    def close(self) -> None:
        """Give up the connections and remove what was published."""
        self._background.close()
        self._remove()


class _ServerFlight(Flight):
    """Requests to servers. What is added between two steps is shared out together."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine, self._new, self._left, self._cuts = engine, deque[Ticket](), 0, False
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self._left

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        """Take a request on."""
        self._engine.check(request)
        self._new.append(ticket := Ticket(request=request, deadline=deadline))
        self._left += request.n
        self._cuts |= deadline is not None
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a request, without what was sampled of them."""
        ticket.cancelled = True
        self._engine.cancelled()

    def step(self) -> list[tuple[Ticket, Completion]]:
        """Send what is new, and wait a while for answers."""
        if self._new:
            self._engine.submit([self._new.popleft() for _ in range(len(self._new))], self._ended)
        found: list[tuple[Ticket, Completion]] = []
        while self._left:
            try:
                ended = self._ended.get(timeout=0.0 if found else 0.2)
            except queue.Empty:
                if self._cuts:
                    self._engine.cancelled()
                break
            if isinstance(ended, Exception):
                raise ended
            found.append(ended)
            self._left -= 1
        return found


def _alike(servers: Sequence[Server]) -> About:
    """What all servers are; a `UserError` if they differ in what changes the numbers."""
    first = servers[0]
    for other in servers[1:]:
        for what, a, b in (
            ("samples with", first.about.engine, other.about.engine),
            ("computes in", first.about.dtype, other.about.dtype),
        ):
            if a != b:
                raise UserError(
                    f"engine.servers differ: {first.url} {what} {a}, {other.url} {what} {b}; start them alike"
                )
    return first.about
