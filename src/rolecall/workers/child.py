"""The worker's side: a fresh interpreter that can be killed at any moment.

Frames go over a socket: a length, then the bytes. What comes from the trainer is a pickle; what goes back is JSON, so
that nothing a worker sends can run code in the trainer.
"""

import fcntl
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rolecall.errors import UserError

HEADER = struct.Struct("!Q")

Send = Callable[[dict[str, Any]], None]
Answer = Callable[[Any, Send], None]
"""Does one job and sends what comes of it; the last message of a job has `done`."""


def main(module: str, channel_fd: int, life_fd: int, memory_mb: int | None) -> None:
    """Serve the trainer at the other end of the socket until it hangs up."""
    die_with_trainer(life_fd)
    os.set_inheritable(channel_fd, False)
    channel = socket.socket(fileno=channel_fd)
    limit_memory(memory_mb)

    def send(message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        channel.sendall(HEADER.pack(len(body)) + body)

    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer has hung up: there is nobody to tell
        _serve(import_module(module), channel, send)


def _serve(module: Any, channel: socket.socket, send: Send) -> None:
    setup = _receive(channel)
    if setup is None:
        return
    try:
        ready, answer = module.open_worker(setup)
    except UserError as error:
        send({"fatal": str(error)})
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
        "error": f"{type(error).__name__}{': ' if text else ''}{text}{where}",
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


def limit_memory(memory_mb: int | None) -> None:
    """No core files, and not more memory than that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is not None:
        # Private writable memory, not address space: libraries reserve far more of the latter than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))


def die_with_trainer(life_fd: int) -> None:
    """Have the kernel kill this process when the trainer, which holds the other end of the pipe, is gone.

    A thread could not do it (C code may hold the interpreter's lock), nor could the parent-death signal, which fires
    already when the trainer's *thread* that started this process ends.
    """
    os.set_inheritable(life_fd, False)
    if sys.platform == "linux":
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:  # it went before the line above
        os._exit(1)
