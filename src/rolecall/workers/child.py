"""The worker's side: a fresh interpreter that can be killed at any moment.

Frames go over a socket: a length, then the bytes. What comes from the trainer is a pickle; what goes back is JSON, so
that nothing a worker sends can run code in the trainer.
"""

import gc
import json
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.workers.walls import Refused, Walls, enclose, watch_network

HEADER = struct.Struct("!Q")

Send = Callable[[dict[str, Any]], None]
Answer = Callable[[Any, Send], None]
"""Does one job and sends what comes of it; the last message of a job has `done`."""


def main(module: str, channel_fd: int, life_fd: int, namespaces: bool) -> None:
    """Serve the trainer at the other end of the socket until it hangs up."""
    trainer = socket.socket(fileno=channel_fd)
    walls, unseen = _receive(trainer)
    try:
        enclose(walls, namespaces=namespaces, life_fd=life_fd, close=(channel_fd,))
        refused = ""
    except Refused as error:
        refused = str(error)
    _WALLS.walls, _WALLS.unseen, _WALLS.channel = walls, unseen, trainer

    def send(message: dict[str, Any]) -> None:
        if _WALLS.sought:
            message = message | {"sought": _WALLS.sought.pop()}
            _WALLS.sought.clear()
        body = json.dumps(message).encode()
        if len(body) > walls.frame_mb << 20:
            error = f"it sent back {len(body) / 1e6:.0f} MB, and {walls.frame_mb} MB is the limit"
            kept = {name: message[name] for name in ("at", "done") if name in message}
            body = json.dumps(kept | ({"error": error} if kept else {"fatal": error})).encode()
        trainer.sendall(HEADER.pack(len(body)) + body)

    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer has hung up: there is nobody to tell
        send({"refused": refused})  # the first frame, before any other code has run
        if not refused:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            ours = import_module(module)
            watch_network(walls, refuse=not namespaces, note=_WALLS.sought.append)
            _serve(ours, trainer, send)


@dataclass(slots=True)
class _Enclosed:
    """The walls around this process, for messages."""

    walls: Walls = field(default_factory=Walls)
    unseen: list[str] = field(default_factory=list)
    sought: list[str] = field(default_factory=list)
    """What it tried to reach without a network."""
    channel: socket.socket | None = None


_WALLS = _Enclosed()


def channel() -> socket.socket:
    """What the trainer is heard by: for an `Answer` that takes messages while it works."""
    assert _WALLS.channel is not None
    return _WALLS.channel


def receive() -> Any:
    """The next message of the trainer's while a job is done; None when it has hung up."""
    return _receive(channel())


def _serve(module: Any, channel: socket.socket, send: Send) -> None:
    setup = _receive(channel)
    if setup is None:
        return
    try:
        ready, answer = module.open_worker(setup)
    except UserError as error:
        send({"fatal": f"{error}{_WALLS.walls.explain(error, _WALLS.unseen)}"})
        return
    except BaseException as error:  # user code may raise anything, SystemExit too
        send({"fatal": described(error)["error"], "raised": True})
        return
    gc.freeze()
    send({"ready": ready})
    while (job := _receive(channel)) is not None:
        try:
            answer(job, send)
        except UserError as error:
            send({"fatal": str(error)})
        except BaseException as error:  # whatever user code raises, SystemExit too, is this job's failure
            send(described(error) | {"done": True})


def described(error: BaseException) -> dict[str, Any]:
    """What was raised, where, and whether memory ran out."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    # The text may quote the model: control characters are shown, not sent to a terminal.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)[:300])
    return {
        "error": f"{type(error).__name__}{': ' if text else ''}{text}{where}{_WALLS.walls.explain(error, _WALLS.unseen)}",
        "memory": isinstance(error, MemoryError),
    }


def _receive(channel: socket.socket) -> Any:
    """The next thing the trainer sends; None when it has hung up."""
    header = _read(channel, HEADER.size)
    if header is None:
        return None
    body = _read(channel, HEADER.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def _read(channel: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = channel.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return buffer
