"""One server of a run: what it is, whether it can be asked, and how it gets weights."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rolecall.errors import UserError
from rolecall.remote.broadcast import Receiver, broadcast
from rolecall.remote.connection import Connection
from rolecall.remote.dialect import About, Dialect, Published, ServerLostError, ServerRefusedError
from rolecall.remote.probe import Expected, Scores, difference, probe_requests
from rolecall.types import Completion, Finish, Request

_log = logging.getLogger("rolecall.rollout")

T = TypeVar("T")

_BEATS = 4
"""Signs of life that are asked for within the time that a server may be silent."""


class StaleServerError(Exception):
    """A server does not have the weights it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a server of this run must be."""

    vocabulary: int
    tokenizer: str
    max_new_tokens: int


class Server:
    """Speaks to one server. All of it runs in the event loop's thread."""

    def __init__(self, connection: Connection, dialect: Dialect, about: About, *, silence: float) -> None:
        self.call, self.dialect, self.about, self.silence = connection, dialect, about, silence
        self.url = connection.url
        self.ready = False
        """It has the weights, so that it can be asked."""
        self.out: str | None = None
        """Why it takes no part any more."""
        self.lost = ""
        """Why it could not be asked when that was last tried."""
        self.busy = 0
        """Units that it is answering."""
        self.gap: float | None = None
        """Mean |difference| of its log-probs to the trainer's at the first probe."""
        self.last_gap = 0.0
        self._said: tuple[Scores, Scores] | None = None
        """What it says of the probe's sequences, and what the trainer said when it began to say that."""
        self._sees = True
        self.kept: str | None = None
        """The hash of the weights that it keeps for adapters, as far as is known here."""
        self._took: tuple[Published, str | None] | None = None
        """What came by a broadcast to all and is not probed yet, and what the server said of it."""

    @classmethod
    async def open(cls, connection: Connection, dialects: Sequence[Dialect], *, silence: float) -> "Server":
        """The server at the other end; a `UserError` if there is none that can be spoken to."""
        url = connection.url
        try:
            async with asyncio.timeout(silence):
                for dialect in dialects:
                    if await dialect.recognises(connection):
                        return cls(connection, dialect, await dialect.about(connection), silence=silence)
        except (ServerLostError, TimeoutError) as error:
            why = str(error) or f"it is silent for {silence:g} s"
            raise UserError(f"engine.servers {url}: {why}; start `rolecall serve MODEL` there first") from error
        except ServerRefusedError as error:
            raise UserError(f"engine.servers {url}: {refusal(error)}") from error
        except UserError as error:
            raise UserError(f"engine.servers {url}: {error}") from error
        known = " or ".join(dialect.name for dialect in dialects)
        raise UserError(
            f"engine.servers {url}: no kind of server that is known here ({known}); a plain OpenAI-compatible one cannot "
            "take weights, so it can be evaluated, not trained with"
        )

    def check(self, wanted: Wanted) -> None:
        """Refuse a server of another model, before anything is sent to it."""
        about = self.about
        where = f"engine.servers {self.url} serves {about.model}"
        if about.vocabulary not in (None, wanted.vocabulary):
            raise UserError(
                f"{where} with a vocabulary of {about.vocabulary:,} tokens, but the model that trains has "
                f"{wanted.vocabulary:,}; serve the same model"
            )
        if about.tokenizer not in (None, wanted.tokenizer):
            raise UserError(f"{where} with another tokenizer than the model that trains; serve the same model")
        if about.context_length <= wanted.max_new_tokens:
            raise UserError(
                f"{where} with a context of {about.context_length:,} tokens, which has no room for a prompt and "
                f"sampling.max_new_tokens {wanted.max_new_tokens:,}; serve it with a longer one, or lower that"
            )

    async def answer(self, requests: Sequence[Request], *, version: int, seconds: float | None) -> list[Completion]:
        """The answers by weights of this version, as many as were asked for."""
        found = await self._alive(self.dialect.generate(self.call, requests, seconds=seconds))
        asked = [(r.prompt, r.first_sample + i) for r in requests for i in range(r.n)]
        if [(c.prompt, c.sample) for c in found] != asked:
            raise ServerLostError("it answered other requests than those it was asked")
        if other := {c.policy_version for c in found} - {version}:
            raise StaleServerError(f"it answered with version {min(other)} of the weights, not {version}")
        if any(c.finish is Finish.ABORT for c in found):
            raise ServerLostError("it broke answers off")
        return found

    async def reconnect(self, wanted: Wanted) -> None:
        """Look at a server again that was lost: it may be another one."""
        try:
            async with asyncio.timeout(self.silence):
                before, self.about = self.about, await self.dialect.about(self.call)
        except TimeoutError as error:
            raise ServerLostError(f"it is silent for {self.silence:g} s") from error
        self.kept = None
        self.check(wanted)
        if self.about.dtype != before.dtype:
            raise UserError(f"engine.servers {self.url} now computes in {self.about.dtype}, not in {before.dtype}")

    async def sync(self, published: Published, expected: Expected) -> None:
        """Pause, load, probe, resume; a miss loads once more. A `StaleServerError` if that does not help."""
        why = await self._try(published, expected)
        if why is not None:
            _log.warning("%s: version %d is loaded again: %s", self.url, published.version, why)
            why = await self._try(published, expected)
        if why is not None:
            raise StaleServerError(why)
        self.ready = True

    async def _try(self, published: Published, expected: Expected) -> str | None:
        """Sync once; what is wrong then, None if nothing is. After a broadcast to all it is as its dialect's `load` left it."""
        if self._took is None or self._took[0] is not published:
            await self._alive(self.dialect.pause(self.call))
        why = await self._load(published, expected)
        await self._alive(self.dialect.resume(self.call))
        return why or await self._draw(published, expected)

    async def _draw(self, published: Published, expected: Expected) -> str | None:
        """Whether what it draws is what it scores; no requests but these come before it is ready."""
        asked = probe_requests(expected.sequences)
        try:
            drawn = await self.answer(asked, version=published.version, seconds=None)
        except StaleServerError as error:
            return str(error)
        pairs = list(zip(asked, drawn, strict=True))
        said = await self._alive(self.dialect.score(self.call, [r.prompt_ids + c.ids for r, c in pairs]))
        ends = [scores[len(scores) - len(c.ids) :] for scores, (_, c) in zip(said, pairs, strict=True)]
        gap = difference(ends, [c.behaviour_logprobs for c in drawn])
        if gap <= expected.widest:
            return None
        return (
            f"the tokens it draws have log-probs {gap:.3g} from those it scores them with, {expected.widest:.1g} are "
            "allowed: it draws with a cache of other weights, or at another temperature"
        )

    async def _load(self, published: Published, expected: Expected) -> str | None:
        """Load once; what is wrong then, None if nothing is."""
        hashed = await self._sent(published)
        said = await self._alive(self.dialect.score(self.call, expected.sequences))
        before, trainer = self._said or (None, ())
        if hashed is not None and hashed != published.hash:
            return f"the hash of its weights is {hashed[:12]}, not {published.hash[:12]}: {expected.why(said, 0.0)}"
        if before == said and difference(expected.now, trainer) > expected.noticeable:
            return "it scores as it did before the load, to the last bit: the load was confirmed and not done"
        gap = difference(said, expected.now)
        band = expected.widest if self.gap is None else expected.band(self.gap)
        if not gap <= band:
            return (
                f"its log-probs are {gap:.3g} from the trainer's on average, {band:.1g} are allowed: "
                f"{expected.why(said, band)}"
            )
        self.gap = gap if self.gap is None else self.gap
        self.last_gap = gap
        if before != said:
            self._said = (said, expected.now)
        return None

    @staticmethod
    async def broadcast_to(servers: Sequence["Server"], published: Published) -> None:
        """Have all of them take the weights at once. Who does not is given them alone by `sync`."""

        async def prepared(server: Server) -> Server:
            await server._alive(server.dialect.pause(server.call))
            await server._give_base(published)
            return server

        found = await asyncio.gather(*map(prepared, servers), return_exceptions=True)
        ready = [server for server in found if isinstance(server, Server)]
        said = await _broadcast(ready, published) if len(ready) > 1 else []
        for server, hashed in zip(ready, said, strict=False):
            if isinstance(hashed, BaseException):
                _log.warning("%s: the broadcast to all broke off, it gets the weights alone: %s", server.url, hashed)
            else:
                server._took = (published, hashed)

    async def _sent(self, published: Published) -> str | None:
        """Have the weights loaded. What they belong to comes first, if the server does not have it."""
        took, self._took = self._took, None
        if took is not None and took[0] is published:
            return took[1]
        await self._give_base(published)
        try:
            return await self._given(published)
        except ServerRefusedError as error:
            if error.status != 409 or published.base is None:
                raise
        self.kept = None  # it was restarted, or somebody else gave it weights
        await self._give_base(published)
        return await self._given(published)

    async def _give_base(self, published: Published) -> None:
        base = published.base
        if base is not None and self.kept != base.hash:
            await self._given(base)
            self.kept = base.hash

    async def _given(self, published: Published) -> str | None:
        """Have tensors loaded: by broadcast, from the directory or, where the server does not see it, by sending them."""
        if published.base is None:
            self.kept = None
        if published.tensors is not None:
            return await self._alone(published)
        shared = published.shared and self._sees
        try:
            return await self._alive(self.dialect.load(self.call, replace(published, shared=shared)))
        except ServerRefusedError as error:
            if error.status == 409 or not (shared and self.dialect.uploads):
                raise
        self._sees = False
        hashed = await self._alive(self.dialect.load(self.call, replace(published, shared=False)))
        _log.info("%s does not see %s: the weights are sent to it", self.url, published.directory.parent)
        return hashed

    async def _alone(self, published: Published) -> str | None:
        """A broadcast to this server only, once more if it breaks off while the server is alive."""
        said: str | BaseException | None = None
        for _ in range(2):
            (said,) = await _broadcast([self], published)
            if not isinstance(said, BaseException):
                return said
            if isinstance(said, ServerRefusedError) and said.status == 409:
                raise said
            await self._beat()
        raise ServerRefusedError(
            424, f"{said}; weights cannot be broadcast to it: let it reach this machine, or set engine.sync directory"
        )

    async def _alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something that may take long, as long as the server shows signs of life."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.silence / _BEATS)
                if done:
                    return task.result()
                await self._beat()
        except UserError:
            raise
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ServerLostError(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        finally:
            task.cancel()

    async def _beat(self) -> None:
        try:
            await self.call("GET", self.dialect.sign_of_life, seconds=self.silence)
        except ServerRefusedError as error:
            raise ServerLostError(str(error)) from error


async def _broadcast(servers: Sequence[Server], published: Published) -> list[str | BaseException | None]:
    """What each server says of a broadcast to all of them, or why it failed."""

    def receiver(server: Server) -> Receiver:
        async def load(where: Mapping[str, Any]) -> str | None:
            told = replace(published, broadcast=where)
            return await server._alive(server.dialect.load(server.call, told))

        about = server.about
        return Receiver(url=server.url, processes=about.processes, cuda=about.cuda, load=load)

    assert published.tensors is not None
    return await broadcast(published.tensors, [receiver(s) for s in servers], seconds=servers[0].silence)


def refusal(error: ServerRefusedError) -> str:
    """What a refusal means for the user."""
    if error.status == 401:
        return "it refuses the key; give the server's key in the environment variable ROLECALL_SERVER_KEY"
    if error.status == 403:
        return f"{error}; give the server's key in the environment variable ROLECALL_SERVER_KEY"
    if error.status in (404, 405):
        return f"it answers {error.status}: {error}; as it is, it can be evaluated (`rolecall eval --model URL/v1`), not trained with"
    return f"it answers {error.status}: {error}"
