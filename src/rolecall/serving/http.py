"""A small HTTP/1.1 server for JSON on asyncio: keep-alive, a key, a list of allowed hosts, limits, and hang-ups noticed.

No chunked bodies and no pipelining: a client that sends its next request before it has the answer is cut off after it.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

_log = logging.getLogger("rolecall")

UPLOAD = "application/octet-stream"
"""The content type of bodies that are not JSON."""

_HEAD_BYTES = 32 * 1024
_IDLE_SECONDS, _BODY_SECONDS, _LINGER_SECONDS = 600.0, 120.0, 2.0


class HttpError(Exception):
    """What a client did wrong, in a sentence, and the status for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRequest:
    """A request that was let in."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes


Handler = Callable[[HttpRequest], Awaitable[Any]]
"""Takes a request and returns what to send: as JSON, or `Events`. Cancelled if the client hangs up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """What to send as server-sent events."""

    data: AsyncIterator[str]
    """Of each event, a line."""
    sent: Callable[[bool], None] = lambda whole: None
    """Called in the end: whether the client took all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpServer:
    """What is let in, and who answers it."""

    handler: Handler
    key: str
    """Every request carries it as `Authorization: Bearer KEY`."""
    hosts: frozenset[str]
    """What the `Host` header may say, without its port: a web page on another address cannot call this server."""
    max_body: int
    """Bytes."""
    max_upload: int
    """Bytes of a body that is not JSON (application/octet-stream)."""
    open_paths: frozenset[str] = frozenset({"/health"})
    """What answers without the key."""
    admit: Callable[[str, str], None] | None = None
    """Takes a path and the key that was sent with it, and raises `HttpError` if that is not let in; in place of `key`."""

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen. The port of the returned server is the one that was found, if `port` is 0."""
        return await asyncio.start_server(self._connected, host, port, limit=_HEAD_BYTES)

    async def start_unix(self, path: str) -> asyncio.Server:
        """Listen on a socket of the file system."""
        return await asyncio.start_unix_server(self._connected, path, limit=_HEAD_BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and answer it; whether the connection stays open."""
        try:
            request, keep = await self._read(reader, writer)
        except HttpError as error:
            await _send(writer, error.status, _error(error.status, str(error)), keep=False)
            await _linger(reader)
            return False
        work = asyncio.ensure_future(self.handler(request))
        more = asyncio.ensure_future(reader.read(1))  # nothing comes before the answer but the end of the connection
        try:
            await asyncio.wait({work, more}, return_when=asyncio.FIRST_COMPLETED)
            if more.done() and not more.result():
                return False
            status, answer = await _outcome(work, request)
        finally:
            work.cancel()
            more.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                keep = keep and not await more
        if isinstance(answer, Events):
            await _send_events(writer, answer)
        else:
            await _send(writer, status, answer, keep=keep)
        return keep

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[HttpRequest, bool]:
        """A request, and whether the client wants to send more after it. Who it is is checked before its body is read."""
        async with asyncio.timeout(_IDLE_SECONDS):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError as error:
                raise HttpError(431, f"the head of the request has more than {_HEAD_BYTES:,} bytes") from error
        method, target, version, headers = _parsed(head)
        self._admit(urlsplit(target).path, headers)
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise HttpError(411, "bodies need Content-Length; chunked ones are not read")
        if not (length.isascii() and length.isdigit()):
            raise HttpError(400, "Content-Length is not a number")
        limit = self.max_upload if headers.get("content-type") == UPLOAD else self.max_body
        if len(length) > 15 or int(length) > limit:
            raise HttpError(413, f"the body has more than {limit:,} bytes, which is the limit")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async with asyncio.timeout(_BODY_SECONDS):
            body = await reader.readexactly(int(length))
        parts = urlsplit(target)
        keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return HttpRequest(method=method, path=parts.path, query=query, headers=headers, body=body), keep

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        name = None
        with suppress(ValueError):
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        if name not in self.hosts:
            raise HttpError(403, "the Host header names another server: see --hosts of rolecall serve")
        if path in self.open_paths:
            return
        given = headers.get("authorization", "").encode(errors="replace")
        if self.admit is not None:
            self.admit(path, given.decode().removeprefix("Bearer "))
            return
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise HttpError(401, "the key is missing or wrong: send `Authorization: Bearer KEY`")


async def _outcome(work: "asyncio.Future[Any]", request: HttpRequest) -> tuple[int, Any]:
    """The status and body to answer with."""
    try:
        return 200, await work
    except HttpError as error:
        return error.status, _error(error.status, str(error))
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        return 500, _error(500, f"{type(error).__name__}: {error}")


def _parsed(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    """Method, target, version and headers."""
    first, *lines = head.decode("latin-1")[:-4].split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].startswith("/"):
        raise HttpError(400, "this is not an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise HttpError(400, "a header line cannot be read")
        if name in headers and name in ("content-length", "host", "authorization"):
            raise HttpError(400, f"the header {name} is given twice")
        headers[name] = value.strip()
    return words[0], words[1], words[2], headers


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": HTTPStatus(status).phrase, "code": status}}


async def _linger(reader: asyncio.StreamReader) -> None:
    """Read what a client is still sending, for a while: one that finds the connection reset never reads the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while await reader.read(1 << 16):
                pass


async def _send_events(writer: asyncio.StreamWriter, events: Events) -> None:
    whole = False
    try:
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Cache-Control: no-cache"]
        writer.write("\r\n".join([*head, "Transfer-Encoding: chunked", "", ""]).encode())
        async for data in events.data:
            event = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        whole = True
    finally:
        events.sent(whole)


async def _send(writer: asyncio.StreamWriter, status: int, answer: Any, *, keep: bool) -> None:
    body = json.dumps(answer, allow_nan=False).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(["WWW-Authenticate: Bearer"] if status == 401 else []),
        *([] if keep else ["Connection: close"]),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await writer.drain()
