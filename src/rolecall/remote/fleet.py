"""The servers of a run, in the event loop's thread: who can be asked, what waits, and what was asked of whom."""

import asyncio
import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.remote.dialect import Published, ServerLostError, ServerRefusedError
from rolecall.remote.probe import Expected
from rolecall.remote.server import Server, StaleServerError, Wanted, refusal
from rolecall.rollout.engine import unanswered
from rolecall.rollout.stops import Ticket
from rolecall.types import Completion, Finish

_log = logging.getLogger("rolecall.rollout")

_TRIES = 3
"""How often a unit is tried, beyond twice for each server, before its failures end the run."""
_LONGEST_PAUSE_S = 5.0

Ended = tuple[Ticket, Completion] | Exception


@dataclass(eq=False, slots=True)
class Unit:
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


class Fleet:
    """Gives units to servers with room, and weights to all of them. A server that is lost is looked for until it is back."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: EngineOptions,
        *,
        wanted: Wanted,
        expected: Expected,
        add: Callable[[str, float], None],
    ) -> None:
        """`add` takes what is measured, by name."""
        self.servers, self.options, self.wanted, self.expected, self._add = servers, options, wanted, expected, add
        self.published: Published | None = None
        self._at_once = servers[0].dialect.at_once
        self._waiting: deque[Unit] = deque()
        self._running: set[Unit] = set()
        self._recoveries: dict[Server, asyncio.Task[None]] = {}
        self._dark: float | None = None  # since when no server can be asked
        self._dead: Exception | None = None  # why nothing is answered any more

    async def sync_all(self, published: Published) -> None:
        """Until one server at least has the weights; those that are out of reach go on being tried."""
        self.published, self._dark, self._dead = published, monotonic(), None
        old = list(self._recoveries.values())
        for task in old:
            task.cancel()
        await asyncio.gather(*old, return_exceptions=True)
        for server in self.servers:
            server.ready = False
        usable = self._usable()
        if published.tensors is not None and len(usable) > 1:
            await Server.broadcast_to(usable, published)
        await asyncio.gather(*(self._bring_up(server) for server in usable))
        while not any(server.ready for server in self.servers):
            self._check_patience()
            await asyncio.sleep(0.05)
        self._dark = None

    async def leave(self) -> None:
        """Have servers give up what they hold beside other versions, as far as they can be reached."""
        leaving = (server.dialect.leave(server.call) for server in self.servers)
        await asyncio.gather(*leaving, return_exceptions=True)

    def _usable(self) -> list[Server]:
        found = [server for server in self.servers if server.out is None]
        if not found:
            why = "; ".join(f"{server.url}: {server.out}" for server in self.servers)
            raise UserError(f"no server is left that samples from the weights that are trained: {why}", exit_code=1)
        return found

    async def _bring_up(self, server: Server) -> None:
        """Give a server the weights. One that does not take them is left out, one that is out of reach tried again later."""
        published = self.published
        assert published is not None
        try:
            await server.sync(published, self.expected)
        except ServerLostError as error:
            self._lose(server, str(error))
        except ServerRefusedError as error:
            self._leave_out(server, f"it does not take version {published.version}: {refusal(error)}")
        except StaleServerError as error:
            self._leave_out(server, f"version {published.version} did not arrive, though it was loaded twice: {error}")

    def _leave_out(self, server: Server, why: str) -> None:
        server.out = why
        _log.warning("%s takes no further part: %s", server.url, why)
        self._add("servers/out", 1.0)
        self._usable()

    def _lose(self, server: Server, why: str) -> None:
        """A server that cannot be asked now; it is looked for until it is back, and given the weights again."""
        server.ready, server.lost = False, why
        if server in self._recoveries or server.out is not None:
            return  # it was lost with all that it was asked
        _log.warning("%s is lost, its requests are sent again: %s", server.url, why)
        self._add("servers/lost", 1.0)
        if not any(other.ready for other in self.servers) and self._dark is None:
            self._dark = monotonic()
        self._recoveries[server] = asyncio.ensure_future(self._recover(server))

    async def _recover(self, server: Server) -> None:
        pause = 0.1
        try:
            while not server.ready and server.out is None:
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                try:
                    await server.reconnect(self.wanted)
                    assert self.published is not None
                    await server.sync(self.published, self.expected)
                except (ServerLostError, ServerRefusedError) as error:
                    server.lost = refusal(error) if isinstance(error, ServerRefusedError) else str(error)
                    self._check_patience()
                except (StaleServerError, UserError) as error:
                    self._leave_out(server, str(error))
            self._dark = None if server.ready else self._dark
        except Exception as error:
            self._fail_all(error)
        finally:
            self._recoveries.pop(server, None)
        self._dispatch()

    def _check_patience(self) -> None:
        dark, patience = self._dark, self.options.server_patience
        if dark is not None and monotonic() - dark > patience:
            why = "; ".join(f"{server.url}: {server.out or server.lost}" for server in self.servers)
            raise UserError(
                f"no server of engine.servers could be asked for {patience:g} s ({why}); start them again, then resume",
                exit_code=75,
            )

    def take(self, unit: Unit) -> None:
        """Have a unit answered."""
        if self._dead is not None:
            unit.out.put(self._dead)
            return
        self._waiting.append(unit)
        self._dispatch()

    def drop_cancelled(self) -> None:
        """Give up units that nobody waits for any more, or whose time is up."""
        for unit in [*self._waiting, *self._running]:
            if unit.cut() and unit.task is not None:
                unit.task.cancel()  # the connection is given up, by which the server knows
        self._dispatch()

    def _dispatch(self) -> None:
        """Give what waits to servers with room."""
        while self._waiting:
            if self._waiting[0].cut():
                self._waiting.popleft()
                continue
            room = [s for s in self.servers if s.ready and s.busy < self._at_once]
            if not room:
                return
            unit, server = self._waiting.popleft(), min(room, key=lambda s: s.busy)
            server.busy += 1
            self._running.add(unit)
            unit.task = asyncio.ensure_future(self._answer(unit, server))

    async def _answer(self, unit: Unit, server: Server) -> None:
        requests, deadline = [t.request for t in unit.tickets], unit.tickets[0].deadline
        begun = monotonic()
        assert self.published is not None
        seconds = None if deadline is None else max(0.001, deadline - begun)
        try:
            unit.settle(await server.answer(requests, version=self.published.version, seconds=seconds))
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
            self._running.discard(unit)
            self._dispatch()

    def _again(self, unit: Unit, server: Server, why: str) -> None:
        unit.tries += 1
        self._lose(server, why)
        if unit.tries >= _TRIES + 2 * len(self.servers):
            unit.out.put(
                UserError(
                    f"a request failed {unit.tries} times, the last time at {server.url}: {why}; look at the servers' output, "
                    "then resume",
                    exit_code=75,
                )
            )
        else:
            self._waiting.appendleft(unit)

    def _fail_all(self, error: Exception) -> None:
        self._dead = error
        for unit in (*self._waiting, *self._running):
            unit.out.put(error)
        self._waiting.clear()
