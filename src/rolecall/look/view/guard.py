"""Who may ask: this machine alone, with the token, from pages of this server; and only to read."""

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN = "token"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Lets a request through to the app, or answers it with 400, 401, 403 or 405."""

    def __init__(self, app: App, *, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost"))
        self.cookie = f"rolecall-view-{port}"
        """Cookies are shared by all ports of a host, so the name has the port."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        refused = self._answer(scope)

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                held = {name for name, _ in message["headers"]}
                added = {"cache-control": "no-store", **_HEADERS}
                message["headers"] = [
                    *message["headers"],
                    *((n.encode(), v.encode()) for n, v in added.items() if n.encode() not in held),
                ]
            await send(message)

        await (refused or self.app)(scope, receive, with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """What to answer instead of the app; None if the request is let through."""
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self.hosts:
            return _refused(403, "this server answers to 127.0.0.1 and localhost alone")
        origin = headers.get("origin")
        if origin is not None and origin.lower().removeprefix("http://") not in self.hosts:
            return _refused(403, "a page of another site asked for this")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _refused(403, "a page of another site asked for this")
        if _is_trick(scope):
            return _refused(400, "this address is not one of this server's")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        known = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        if not any(secrets.compare_digest(t.encode(), self.token.encode()) for t in given or [known]):
            return _refused(
                401, "open the address that rolecall view printed: it ends with the token that is missing here"
            )
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "nothing can be changed here; only GET is answered", allow="GET, HEAD")
        return self._welcome(scope, query) if given else None

    def _welcome(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """The same address without the token, which from now on is a cookie."""
        rest = urlencode([(name, value) for name, value in query if name != TOKEN])
        path = scope["raw_path"].decode("ascii", "replace")
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return answer


def _is_trick(scope: Scope) -> bool:
    """Whether a path tries to be more than names between slashes."""
    path, raw = scope["path"], scope["raw_path"].lower()
    parts = path.split("/")[1:]
    return (
        not path.startswith("/")
        or b"%2f" in raw
        or any(part in (".", "..") for part in parts)
        or "" in parts[:-1]
        or any(ord(c) < 32 or c in "\\\x7f" for c in path)
    )


def _refused(status: int, why: str, **headers: str) -> Response:
    return PlainTextResponse(f"{why}\n", status_code=status, headers=headers)
