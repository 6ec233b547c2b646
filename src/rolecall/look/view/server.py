"""The process of `rolecall view`: one socket on the loopback address."""

import errno
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import uvicorn

from rolecall.errors import UserError
from rolecall.look.view.app import make_app
from rolecall.look.view.runs import Runs

ADDRESS = "127.0.0.1"


def serve(
    root: Path, *, only: str | None, port: int, or_any: bool, ready: Callable[[str], None], first: str | None = None
) -> None:
    """Show the runs of a directory until SIGTERM or Ctrl-C; `ready` gets the address.

    `only` is the one run that is shown, `first` the run that the address leads to. `or_any` takes another port if that one
    is taken.
    """
    listening = _listen(port, or_any=or_any)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(18)
    server: uvicorn.Server | None = None
    app = make_app(
        Runs(root, only=only), token=token, port=port, closing=lambda: server is not None and server.should_exit
    )
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", http="h11", loop="asyncio",
        server_header=False, timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    page = first or only
    ready(f"http://{ADDRESS}:{port}{f'/run/{quote(page)}' if page else '/'}?token={token}")
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # how one ends it
        pass
    finally:
        listening.close()


def _listen(port: int, *, or_any: bool) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((ADDRESS, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE and or_any:
            return _listen(0, or_any=False)
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is taken by another program, perhaps another `rolecall view`: give another --port, or 0 for any"
        else:
            why = f"cannot listen on {ADDRESS} port {port}: {error.strerror or error}; give another --port"
        raise UserError(why) from error
    return listening
