"""The addresses of `rolecall view`."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from rolecall.errors import UserError
from rolecall.look.page import asset
from rolecall.look.view.guard import App, Guard
from rolecall.look.view.pages import NotThere, Pages
from rolecall.look.view.runs import Runs

_EVERY_S = 0.5
"""Between two looks at a run's files."""
_TABLE_EVERY_S = 2.0
_ALIVE_EVERY = 20
"""Looks without news after which a comment keeps the connection open."""
_log = logging.getLogger("rolecall")


def make_app(runs: Runs, *, token: str, port: int, closing: Callable[[], bool] = lambda: False) -> App:
    """The server of these runs. Streams end when it is `closing`."""
    site = _Site(Pages(runs, version=_version()), closing)
    routes = [
        Route("/", site.page(lambda request: site.pages.index())),
        Route("/events", site.table_events),
        Route("/static/{name}", _static),
        Route("/compare", site.page(lambda request: site.pages.compare(_given(request)))),
        Route(
            "/compare/curves",
            site.data(
                lambda request: site.pages.compared_curves(_given(request), also_rest="all" in request.query_params)
            ),
        ),
        Route(
            "/compare/answers",
            site.page(lambda request: site.pages.same_prompt(_given(request), request.query_params.get("prompt", ""))),
        ),
        Route("/audit/{name}", site.page(lambda request: site.pages.audit(request.path_params["name"]))),
        Route("/run/{run}", site.page(lambda request: site.pages.run(request.path_params["run"]))),
        Route("/run/{run}/curves", site.data(lambda request: site.pages.curves(request.path_params["run"]))),
        Route("/run/{run}/events", site.run_events),
        Route("/run/{run}/findings", site.data(lambda request: site.pages.findings(request.path_params["run"]))),
        Route(
            "/run/{run}/answers",
            site.page(lambda request: site.pages.answers(request.path_params["run"], request.query_params)),
        ),
        Route(
            "/run/{run}/answers/{step:int}/{row:int}",
            site.page(lambda request: site.pages.answer(**request.path_params, given=request.query_params)),
        ),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: site.nowhere}), token=token, port=port)


class _Site:
    """Pages as answers."""

    def __init__(self, pages: Pages, closing: Callable[[], bool]) -> None:
        self.pages, self.closing = pages, closing

    def page(self, make: Callable[[Request], str]) -> Callable[[Request], Response]:
        """A page, or one that says in a sentence why there is none."""
        return _answering(make, HTMLResponse, self.pages.error)

    def data(self, make: Callable[[Request], Any]) -> Callable[[Request], Response]:
        """JSON, or a sentence in it."""
        return _answering(make, _json, lambda why: {"error": why})

    async def nowhere(self, request: Request, error: Exception) -> Response:
        """The page for an address that is none."""
        return HTMLResponse(self.pages.error("there is no such page here"), status_code=404)

    async def table_events(self, request: Request) -> Response:
        """Says when the table of runs is no longer the one that was seen."""
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")

        async def told() -> AsyncIterator[str | None]:
            nonlocal seen
            while True:
                now = await run_in_threadpool(self.pages.table_key)
                if now != seen:
                    seen = now
                    yield f"id: {now}\nevent: changed\ndata: {{}}\n\n"
                yield None
                await self._wait(_TABLE_EVERY_S)

        return self._stream(request, told())

    async def run_events(self, request: Request) -> Response:
        """The points of a run's curves that came since those that were seen, and when its state changes."""
        run = request.path_params["run"]
        seen = _seen(request.headers.get("last-event-id") or request.query_params.get("seen", ""))
        told_of = request.query_params.get("state", "")

        async def told() -> AsyncIterator[str | None]:
            nonlocal seen, told_of
            while True:
                try:
                    news = await run_in_threadpool(self.pages.news, run, seen)
                except Exception as error:
                    yield f"event: gone\ndata: {json.dumps({'why': _sentence(error)})}\n\n"
                    return
                if news["restarted"]:
                    yield "event: restart\ndata: {}\n\n"
                    return
                if news["state"] != told_of:
                    told_of = news["state"]
                    yield f"event: state\ndata: {json.dumps(told_of)}\n\n"
                if tuple(news["seen"]) != seen:
                    seen = tuple(news["seen"])
                    yield f"id: {'-'.join(map(str, seen))}\nevent: points\ndata: {_dumped(news)}\n\n"
                yield None
                await self._wait(_EVERY_S)

        return self._stream(request, told())

    async def _wait(self, seconds: float) -> None:
        while seconds > 0 and not self.closing():
            await asyncio.sleep(min(seconds, 0.25))
            seconds -= 0.25

    def _stream(self, request: Request, told: AsyncIterator[str | None]) -> Response:
        async def sent() -> AsyncIterator[str]:
            quiet = 0
            yield "retry: 2000\n\n"
            async for message in told:
                if self.closing() or await request.is_disconnected():
                    return
                quiet = quiet + 1 if message is None else 0
                if message is not None:
                    yield message
                elif quiet % _ALIVE_EVERY == 0:
                    yield ": still here\n\n"

        return StreamingResponse(sent(), media_type="text/event-stream")


def _answering(
    make: Callable[[Request], Any], answer: Any, failed: Callable[[str], Any]
) -> Callable[[Request], Response]:
    def answering(request: Request) -> Response:
        try:
            return answer(make(request))
        except Exception as error:
            return answer(failed(_sentence(error)), _status(error))

    return answering


def _given(request: Request) -> list[str]:
    return request.query_params.getlist("run")


def _seen(text: str) -> tuple[int, ...]:
    parts = text.split("-")
    return tuple(map(int, parts)) if len(parts) == 3 and all(p.isascii() and p.isdigit() for p in parts) else (0, 0, 0)


def _status(error: Exception) -> int:
    if isinstance(error, NotThere | FileNotFoundError):
        return 404
    if isinstance(error, UserError | OSError):
        return 422
    return 500


def _sentence(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or 'a file'} is gone; reload to see what is there now"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"
    _log.exception("a page could not be made")
    return "this page could not be made, which is a bug; the terminal of rolecall view says more"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: Any, status: int = 200) -> Response:
    return Response(_dumped(value).encode("utf-8", "replace"), status_code=status, media_type="application/json")


_STATIC: dict[str, tuple[str, Callable[[], str]]] = {
    "style.css": ("text/css", lambda: asset("page.css") + asset("uplot.css") + asset("view.css")),
    "uplot.js": ("text/javascript", lambda: asset("uplot.js")),
    "view.js": (
        "text/javascript",
        lambda: (
            '"use strict";\n(() => {\n'
            + "\n".join(map(asset, ("page.js", "curves.js", "view.js", "plots.js", "live.js")))
            + "})();"
        ),
    ),
    "icon.svg": ("image/svg+xml", lambda: asset("icon.svg")),
}
"""What pages load. Style and script begin with those of the report."""


def _version() -> str:
    return sha256("".join(make() for _, make in _STATIC.values()).encode()).hexdigest()[:12]


def _static(request: Request) -> Response:
    if request.path_params["name"] not in _STATIC:
        return Response(status_code=404)
    kind, make = _STATIC[request.path_params["name"]]
    return Response(make(), media_type=kind, headers={"cache-control": "private, max-age=86400"})
