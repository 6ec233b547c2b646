"""HTTP to one server, and the thread that all of it runs in.

httpx, since connections must be kept, pooled, given up in the middle of an answer (which is how a server learns that nobody waits)
and secured with TLS, and since it is installed anyway: huggingface_hub needs it. One event loop in one thread holds any
number of requests in flight.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from rolecall.errors import UserError
from rolecall.remote.dialect import Call, ServerLostError, ServerRefusedError
from rolecall.serving.http import UPLOAD
from rolecall.visible import visible_text

T = TypeVar("T")

_PIECE = 4 * 2**20
_CONNECT_SECONDS = 10.0
_SAID = 300
"""Characters of what a server says that are shown."""


class Background:
    """An event loop in a thread of its own, to run coroutines from any other."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.connections: list[Connection] = []
        """Those that are closed with it."""
        thread = threading.Thread(target=_run, args=(self.loop, self.connections), name="rolecall-servers", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self.loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; it is cancelled if the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Give up what is under way, close the connections, and end the thread."""
        self._end()


def _run(loop: asyncio.AbstractEventLoop, connections: "list[Connection]") -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    under_way = asyncio.all_tasks(loop)
    for task in under_way:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
    loop.run_until_complete(asyncio.gather(*(connection.close() for connection in connections)))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Connection(Call):
    """Calls to one server, over connections that are kept."""

    def __init__(self, url: str, *, key: str | None, deadline: float, proxies: bool = False) -> None:
        """An answer must come within `deadline` seconds. The environment's `proxies` are not for servers of a run, which are
        called directly."""
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            raise UserError(f"{url} is no address: its port is a number up to 65535") from error
        self.url, self._deadline = url, deadline
        self._how: dict[str, Any] = {
            "base_url": url,
            "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
            "trust_env": proxies,
            "verify": httpx.create_ssl_context(),
        }
        self._idle: list[httpx.AsyncClient] = []
        self._made: list[httpx.AsyncClient] = []

    @contextmanager
    def _lent(self) -> Iterator[httpx.AsyncClient]:
        """A client with one connection, for one request at a time. httpx's own pool goes through all of its connections for
        every request: with 64 in flight that took 6 ms of CPU for each, and this takes 0.5."""
        if not self._idle:
            self._idle.append(httpx.AsyncClient(**self._how))
            self._made.append(self._idle[-1])
        client = self._idle.pop()
        try:
            yield client
        finally:
            self._idle.append(client)

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Path | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        read: bool = True,
    ) -> Any:
        """The JSON of the answer."""
        limit = self._deadline if seconds is None else seconds
        given: dict[str, Any] = {}
        if isinstance(body, Path):
            head = {"Content-Type": UPLOAD, "Content-Length": str(body.stat().st_size)}
            given = {"content": _pieces(body), "headers": head}
        elif body is not None:
            given = {"json": body}
        try:
            connect = httpx.Timeout(limit, connect=min(limit, _CONNECT_SECONDS))
            with self._lent() as client:
                async with asyncio.timeout(limit):
                    answer = await client.request(method, path, params=query, timeout=connect, **given)
        except TimeoutError as error:
            raise ServerLostError(f"no answer within {limit:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerLostError(_why(error)) from error
        if answer.status_code >= 500 or answer.status_code == 429:
            raise ServerLostError(f"it answers {answer.status_code}: {_message(answer)}")
        if answer.status_code >= 300:
            raise ServerRefusedError(answer.status_code, _message(answer))
        if not (answer.content and read):
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise ServerLostError(f"its answer to {path} is not JSON") from error

    async def close(self) -> None:
        for client in self._made:
            await client.aclose()


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _why(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return "nothing answers there"
    if isinstance(error, httpx.TimeoutException):
        return "it is silent"
    return f"the connection broke ({str(error) or type(error).__name__})"


def _message(answer: httpx.Response) -> str:
    """What a server says is wrong, in a line."""
    try:
        said = answer.json()
        found = said.get("error", said) if isinstance(said, dict) else said
        text = found.get("message") or found.get("detail") if isinstance(found, dict) else found
    except ValueError:
        text = answer.text
    return visible_text(" ".join(str(text or answer.reason_phrase).split()))[:_SAID]
