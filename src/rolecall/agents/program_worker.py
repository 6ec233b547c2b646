"""Programs that play episodes, in a worker: each runs in a process of its own, forked from the worker once their code is loaded.

The endpoint they call is in the trainer. A process beside them listens on this worker's loopback address, which may be a
network of its own, and passes everything on.
"""

import asyncio
import inspect
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.errors import UserError, out_of_range
from rolecall.workers.child import Answer, Send, channel, described, receive
from rolecall.workers.load import load_object, split_name

Run = Callable[[str, str, Mapping[str, Any]], Any]
"""(base URL, key, row) -> what the episode is worth."""

BEAT_S = 2.0
"""Seconds between signs of life."""
_TAIL = 400
"""Characters of what a program wrote to stderr that its failure quotes."""
_OUT = 1 << 20


class ProgramError(UserError):
    """A program that cannot be run at all."""


def open_worker(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Answer]:
    """(nothing to say, what runs programs)."""
    name, source = setup["name"], setup["source"]
    run: Run
    if isinstance(source, list):
        run = Command(source)
    elif isinstance(source, bytes):
        run = pickle.loads(source)
    elif source.startswith("verifiers:"):
        from rolecall.agents.verifiers_env import VerifiersProgram

        run = VerifiersProgram(source)
    else:
        what = f"agent {name!r}"
        run = load_object(*split_name(source, what=what, error=ProgramError), what=what, error=ProgramError)
    _check(run, name)
    _adopt()
    port, relay = _relay(setup["socket"])

    def answer(job: Mapping[str, Any], send: Send) -> None:
        if "states" in job:
            try:
                send({"scores": run.score(job["states"]), "done": True})  # type: ignore[union-attr]
            except Exception as error:  # the group's failure, not the worker's
                send(described(error) | {"done": True})
            return
        try:
            _Programs(run, port, job, send).play()
        finally:
            _end_left(but=relay)
        send({"done": True})

    return {"port": port, "grouped": bool(getattr(run, "grouped", False))}, answer


def _check(run: Any, name: str) -> None:
    if not callable(run):
        raise ProgramError(f"agent {name!r} is a {type(run).__name__}, not a function")
    try:
        inspect.signature(run).bind("base_url", "key", "row")
    except TypeError as error:
        raise ProgramError(f"agent {name!r} cannot be called with (base_url, key, row): {error}") from error
    except ValueError:  # written in C: nothing is known of its arguments
        return


class Command:
    """Any program: the row as JSON on stdin, the address and the key in the environment. The last line it prints, if that
    is JSON, is what it returns."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self, base_url: str, key: str, row: Mapping[str, Any]) -> Any:
        try:
            done = subprocess.run(self.words, input=json.dumps(row).encode(), capture_output=True, check=False)
        except OSError as error:
            raise ProgramError(f"{self.words[0]} cannot be started: {error.strerror or error}") from error
        if done.returncode:
            tail = done.stderr.decode(errors="backslashreplace").strip()[-_TAIL:]
            how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
            raise ProgramError(f"{self.words[0]} ended with {how}{': ' if tail else ''}{tail}")
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None


@dataclass(slots=True)
class _Running:
    """A program's process."""

    pid: int
    result: int
    """Where it writes what came of it."""
    written: bytearray = field(default_factory=bytearray)


class _Programs:
    """Runs the episodes of a job, several at a time, until all have ended."""

    def __init__(self, run: Run, port: int, job: Mapping[str, Any], send: Send) -> None:
        self._run, self._port, self._send = run, port, send
        self._waiting, self._at_once = deque[dict[str, Any]](job["episodes"]), int(job["at_once"])
        self._running: dict[int, _Running] = {}

    def play(self) -> None:
        """All of them."""
        beat = time.monotonic()
        try:
            while self._running or self._waiting:
                while self._waiting and len(self._running) < self._at_once:
                    self._begin(self._waiting.popleft())
                self._listen()
                for at in list(self._running):
                    self._look_after(at)
                if time.monotonic() - beat > BEAT_S:
                    beat = time.monotonic()
                    self._send({"beat": True})
        finally:
            for at in list(self._running):
                self._bury(at)

    def _begin(self, episode: dict[str, Any]) -> None:
        url = f"http://127.0.0.1:{self._port}{episode['path']}"
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            _become(self._run, theirs, url, episode["key"], episode["row"])
        os.close(theirs)
        os.set_blocking(ours, False)
        self._running[episode["at"]] = _Running(pid, ours)
        self._send({"at": episode["at"], "begun": True})

    def _listen(self) -> None:
        """Wait for something to happen: a program writes, or the trainer says that one shall end."""
        trainer = channel()
        ends = [running.result for running in self._running.values()]
        ready, _, _ = select.select([trainer.fileno(), *ends], [], [], 0.05)
        if trainer.fileno() in ready:
            said = receive()
            if said is None:  # the trainer has hung up
                os._exit(0)
            at = said["end"]
            if at in self._running:
                self._bury(at)
            self._waiting = deque(e for e in self._waiting if e["at"] != at)
            self._send({"at": at, "ended": True})

    def _look_after(self, at: int) -> None:
        running = self._running[at]
        _read(running)
        pid, status = os.waitpid(running.pid, os.WNOHANG)
        if not pid:
            return
        _read(running)
        self._bury(at, reaped=True)
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # it may have written anything there itself
            self._send({**_said(json.loads(bytes(running.written))), "at": at})
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        self._send({"at": at, "error": f"its process ended with {how}"})

    def _bury(self, at: int, *, reaped: bool = False) -> None:
        """End a program and what it started."""
        running = self._running.pop(at)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGKILL)
        if not reaped:
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(running.pid, 0)
        os.close(running.result)


def _said(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a program's process says of it, and nothing that would be about the worker."""
    if "error" in found:
        return {"error": str(found["error"]), "raised": True}
    reward = found["reward"]
    return {"reward": None if reward is None else float(reward), "result": dict(found["result"])}


def _read(running: _Running) -> None:
    with suppress(BlockingIOError):
        while chunk := os.read(running.result, 1 << 16):
            if len(running.written) < _OUT:
                running.written += chunk


def _become(run: Run, result: int, url: str, key: str, row: Mapping[str, Any]) -> None:
    """The program's process: runs it, writes what came of it, and ends."""
    code = 1
    try:
        os.setsid()
        keep = os.dup2(result, 3)
        os.closerange(4, 1 << 16)
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        try:
            said = _worth(_returned(run, url, key, row))
        except ProgramError as error:
            said = {"error": str(error)}
        except BaseException as error:  # whatever it raises, SystemExit too, is its episode's failure
            said = described(error)
        body = json.dumps(said).encode()
        if len(body) > _OUT:
            body = json.dumps({"error": f"it returned {len(body):,} bytes, and {_OUT:,} is the limit"}).encode()
        while body:
            body = body[os.write(keep, body) :]
        code = 0
    finally:
        os._exit(code)


def _returned(run: Run, url: str, key: str, row: Mapping[str, Any]) -> Any:
    found = run(url, key, row)
    if not inspect.isawaitable(found):
        return found

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited())


def _worth(found: Any) -> dict[str, Any]:
    """What a program returns: a number, an object with a `reward`, or nothing."""
    more: dict[str, Any] = {}
    if isinstance(found, Mapping):
        more = {str(name): value for name, value in found.items() if name != "reward" and _plain(value)}
        found = found.get("reward")
    if found is not None and not (isinstance(found, bool | int | float) or hasattr(found, "__float__")):
        shown = f"a {type(found).__name__} ({found!r:.60})"
        raise ProgramError(f'it returned {shown}; return a number, or an object with "reward"')
    reward = None if found is None else float(found)
    if reward is not None and (why := out_of_range(reward)) is not None:
        raise ProgramError(f"it returned the reward {reward}, which {why}")
    return {"reward": reward, "result": more}


def _plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _adopt() -> None:
    """Become the parent of whatever programs leave behind."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _end_left(*, but: int) -> None:
    """End what programs have left behind in sessions of its own, when no program runs any more."""
    for _ in range(1000):  # what they start meanwhile becomes this process's child in turn
        left = [pid for pid in _children() if pid != but]
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not left:
            return


def _children() -> list[int]:
    paths = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text().split()]


def _relay(path: str) -> tuple[int, int]:
    """Start what passes connections on to the trainer's endpoint: the port it listens on, and its process."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
    except OSError as error:
        raise ProgramError(
            "programs cannot be given an endpoint without a network here, as the kernel refuses namespaces: set agent.network"
        ) from error
    listener.listen(256)
    port: int = listener.getsockname()[1]
    pid = os.fork()
    if not pid:
        try:
            os.dup2(listener.fileno(), 3)
            os.closerange(4, 1 << 16)
            asyncio.run(_pass_on(socket.socket(fileno=3), path))
        finally:
            os._exit(0)
    listener.close()
    return port, pid


async def _pass_on(listener: socket.socket, path: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_unix_connection(path)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))

    server = await asyncio.start_server(connected, sock=listener)
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side hangs up, then hang up on the other."""
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    finally:
        writer.close()
