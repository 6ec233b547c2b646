"""A worker process as the trainer sees it."""

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from rolecall.visible import visible_text
from rolecall.workers.child import HEADER
from rolecall.workers.hosts import Host, child_program, relay_program, start
from rolecall.workers.walls import Walls

logger = logging.getLogger("rolecall.workers")

_LINES_SHOWN = 50
_LONGEST_LINE = 2000


class Gone(Exception):
    """The worker's end of the channel is closed."""


class Nonsense(Gone):
    """What the worker sends cannot be read; the message says why."""


class Worker:
    """A process, the channel to it, and what it is doing.

    The process is a fresh interpreter (fork and exec in one, whatever threads the trainer has) in a session of its own:
    Ctrl-C does not reach it. It is the keeper of the one that runs the code, as `walls` explains.
    """

    def __init__(
        self, module: str, setup: bytes, *, what: str, walls: Walls, namespaces: bool, host: Host | None = None
    ) -> None:
        """`module` has the `open_worker` that is called with what `setup` pickles. `what` names it in the log. With `host` it runs
        there, and the process here is its relay."""
        self.channel, theirs = socket.socketpair()
        life, self._life = os.pipe()
        self.output, printed = os.pipe()
        os.set_blocking(self.output, False)
        if host is None:
            program = child_program(module, sys.path, theirs.fileno(), life, namespaces)
        else:
            program = relay_program(host, module, theirs.fileno(), namespaces, walls)
        self.process = start(program, fds=(theirs.fileno(), life), printed=printed, env=walls.environment())
        theirs.close()
        os.close(life)
        os.close(printed)
        self.what, self._limit = what, walls.frame_mb << 20
        self._received, self._printed = bytearray(), b""
        self._closed = False
        self.enclosed: bool | None = None
        """Whether it has namespaces of its own, once that is known."""
        self.ready = False
        self.begin(None)
        with suppress(Gone):  # whoever listens to it next finds out
            self.send(pickle.dumps((walls, walls.withheld())), timeout=10.0)
            self.send(setup, timeout=10.0)

    def begin(self, job: Any, *, shown: int = 0) -> None:
        """From now on it does this: a job, what it has not yet reported of one, or nothing but load."""
        self.job = job
        self._since = monotonic()
        self.shown = shown
        """Lines of its output shown since its job began."""
        self.patience = 1
        """How many times as long as usual it may be silent before that is said."""

    @property
    def waited(self) -> float:
        """Seconds since it began what it is doing now."""
        return monotonic() - self._since

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
        try:
            while len(self._received) <= self._limit and not self._closed:
                chunk = self.channel.recv(1 << 16)
                self._received += chunk
                self._closed = not chunk
        except BlockingIOError:
            pass
        except OSError:
            self._closed = True
        messages = list(self._frames())
        if self._closed and not messages:
            raise Gone("the channel is closed")
        return messages

    def _frames(self) -> Iterator[dict[str, Any]]:
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > self._limit:
                raise Nonsense(f"it sent back {size / 1e6:.0f} MB, and {self._limit >> 20} MB is the limit")
            if len(self._received) < HEADER.size + size:
                return
            body = bytes(self._received[HEADER.size : HEADER.size + size])
            del self._received[: HEADER.size + size]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Nonsense("its worker process sent something unreadable") from error
            if not isinstance(message, dict):
                raise Nonsense("its worker process sent something unreadable")
            yield message

    def show_output(self) -> None:
        """Log what it has printed, harmless for a terminal; a job's first lines only."""
        if self.output < 0:
            return
        with suppress(BlockingIOError):
            while chunk := os.read(self.output, 1 << 16):
                *lines, self._printed = (self._printed + chunk).split(b"\n")
                self._show(lines)
                if len(self._printed) > _LONGEST_LINE:
                    self._show([self._printed])
                    self._printed = b""

    def _show(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self.shown += 1
            text = visible_text(line[:_LONGEST_LINE].decode(errors="backslashreplace").rstrip("\r"))
            if self.shown <= _LINES_SHOWN:
                logger.warning("%s printed: %s", self.what, text)
            elif self.shown == _LINES_SHOWN + 1:
                logger.warning("%s printed more, which is not shown", self.what)

    def kill(self) -> str:
        """End the process and all it started, whatever they are doing; say how it had ended, if it had."""
        self.channel.close()
        try:
            if not self._closed:  # else it is ending by itself, and its keeper is about to say how
                self.process.terminate()
            self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:  # what it keeps dies with it
                self.process.kill()
        code = self.process.wait()
        self.show_output()
        if self.output >= 0:
            self._show([self._printed] if self._printed else [])
            os.close(self._life)
            os.close(self.output)
            self.output = -1
        if code >= 0:
            return f"the process ended with exit code {code}"
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"

    def hang_up(self) -> None:
        """Let an idle worker end by itself."""
        self.channel.close()
