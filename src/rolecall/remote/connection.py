"""HTTP to one server, and the thread that all of it runs in.

httpx, since connections must be kept, pooled, given up in the middle of an answer (which is how a server learns that nobody waits)
and secured with TLS, and since it is installed anyway: huggingface_hub needs it. One event loop in one thread holds any
number of requests in flight.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rolecall.remote.dialect import Call, ServerLostError, ServerRefusedError
from rolecall.serving.http import UPLOAD
from rolecall.visible import visible_text

T = TypeVar("T")

_PIECE = 4 * 2**20
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

    def __init__(self, url: str, *, key: str | None, silence: float, deadline: float) -> None:
        """A connection must be made and accepted within `silence` seconds, and an answer come within `deadline`."""
        self.url, self._deadline = url, deadline
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(silence),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60.0),
            trust_env=False,  # servers of a run are called directly, whatever proxy the machine has
        )

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Path | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
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
            async with asyncio.timeout(limit):
                answer = await self._client.request(
                    method, path, params=query, timeout=httpx.Timeout(limit, connect=min(limit, 10.0)), **given
                )
        except TimeoutError as error:
            raise ServerLostError(f"no answer within {limit:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerLostError(_why(error)) from error
        if answer.status_code >= 500 or answer.status_code == 429:
            raise ServerLostError(f"it answers {answer.status_code}: {_message(answer)}")
        if answer.status_code >= 300:
            raise ServerRefusedError(answer.status_code, _message(answer))
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise ServerLostError(f"its answer to {path} is not JSON") from error

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()


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
