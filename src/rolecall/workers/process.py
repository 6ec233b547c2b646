"""A worker process as the trainer sees it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from rolecall.workers.child import HEADER

_LARGEST_FRAME = 1 << 30


class Gone(Exception):
    """The worker's end of the channel is closed, or speaks nonsense."""


class Worker:
    """A process, the channel to it, and what it is doing.

    The process is a fresh interpreter (fork and exec in one, whatever threads the trainer has) in a session of its own:
    Ctrl-C does not reach it, and a kill takes its children along.
    """

    def __init__(self, module: str, setup: bytes, *, memory_mb: int | None) -> None:
        """`module` has the `open_worker` that the process calls with what `setup` pickles."""
        self.channel, theirs = socket.socketpair()
        life, self._life = os.pipe()
        # The child gets the trainer's sys.path before it imports anything, so that it finds what the trainer finds.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from rolecall.workers.child import main; main({module!r}, {theirs.fileno()}, {life}, {memory_mb})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), life),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        theirs.close()
        os.close(life)
        self._received = bytearray()
        self.ready = False
        self.job: Any = None
        self.since = monotonic()
        """When it began what it is doing now: loading, a job, or what it has not yet reported of a job."""
        with suppress(Gone):  # whoever listens to it next finds out
            self.send(setup, timeout=10.0)

    def send(self, body: bytes, *, timeout: float) -> None:
        """Raise `Gone` if the worker does not take it in time."""
        self.channel.settimeout(timeout)
        try:
            self.channel.sendall(HEADER.pack(len(body)))
            self.channel.sendall(body)
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting. Raise `Gone` if there are none and will be none."""
        self.channel.setblocking(False)
        gone = False
        try:
            while chunk := self.channel.recv(1 << 16):
                self._received += chunk
            gone = True
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        messages = list(self._frames())
        if gone and not messages:
            raise Gone("the channel is closed")
        return messages

    def _frames(self) -> Iterator[dict[str, Any]]:
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > _LARGEST_FRAME:
                raise Gone(f"a frame of {size} bytes")
            if len(self._received) < HEADER.size + size:
                return
            body = bytes(self._received[HEADER.size : HEADER.size + size])
            del self._received[: HEADER.size + size]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Gone("a frame that is not JSON") from error
            if not isinstance(message, dict):
                raise Gone("a frame that is not an object")
            yield message

    def kill(self) -> str:
        """End the process and its children, whatever they are doing; say how it had ended, if it had."""
        self.channel.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # an ended process keeps its status and, until wait, its number
        code = self.process.wait()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        if code >= 0:
            return f"the process ended with exit code {code}"
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"

    def hang_up(self) -> None:
        """Let an idle worker end by itself."""
        self.channel.close()
