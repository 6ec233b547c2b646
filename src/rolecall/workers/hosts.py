"""Worker processes on other machines: a host there starts them, and a relay here stands for each.

The pool sees a process and a channel as ever, so walls, deadlines and replacement stay its own. The relay carries bytes; when it ends,
for whatever reason, the host ends the worker, and when the worker ends, the relay ends like it. Who wants a worker started must know the
host's token; what then goes over the network is not encrypted.
"""

import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from rolecall.errors import UserError
from rolecall.workers.walls import Walls

_FRAME = struct.Struct("!Bi")
_CHANNEL, _PRINTED, _ENDED = range(3)
"""What a frame from the host carries: bytes of the channel, of the output, or how the process ended."""
_CONNECT_S = 10.0
_END_S = 5.0
_PLACE_S = 60.0
"""How long Ray may take to find room that there is."""
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where workers can be started."""

    address: str
    port: int
    token: str


def start(program: str, *, fds: tuple[int, int], printed: int, env: dict[str, str], cwd: str | None = None) -> Any:
    """A fresh interpreter in a session of its own, with its channel and a pipe that tells when the trainer is gone."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        pass_fds=fds,
        start_new_session=True,
        env=env,
        cwd=cwd,
    )


def child_program(module: str, paths: list[str], channel: int, life: int, namespaces: bool) -> str:
    """It gets the trainer's sys.path before it imports anything, so that it finds what the trainer finds."""
    return (
        f"import sys; sys.path[:] = {paths!r}\n"
        f"from rolecall.workers.child import main; main({module!r}, {channel}, {life}, {namespaces})"
    )


def relay_program(host: Host, module: str, channel: int, namespaces: bool, walls: Walls) -> str:
    """What runs here in the place of a worker there."""
    hello = {"module": module, "namespaces": namespaces, "paths": sys.path, "cwd": str(Path.cwd())}
    hello |= {"network": walls.network, "variables": list(walls.variables)}
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from rolecall.workers.hosts import Host, relay; relay(Host(**{asdict(host)!r}), {hello!r}, {channel})"
    )


def relay(host: Host, hello: dict[str, Any], channel_fd: int) -> NoReturn:
    """Carry bytes between the trainer's channel and the host, and end as the worker does."""
    channel = socket.socket(fileno=channel_fd)
    try:
        there = socket.create_connection((host.address, host.port), timeout=_CONNECT_S)
    except OSError as error:
        os.write(1, f"the machine {host.address} that should run a worker does not answer: {error}\n".encode())
        os._exit(1)
    there.settimeout(None)
    there.sendall(json.dumps({**hello, "token": host.token}).encode() + b"\n")
    threading.Thread(target=_carry, args=(channel, there), daemon=True).start()
    stream = there.makefile("rb")
    while header := stream.read(_FRAME.size):
        kind, size = _FRAME.unpack(header)
        if kind == _ENDED:
            if size < 0:
                signal.signal(-size, signal.SIG_DFL)
                os.kill(os.getpid(), -size)
            os._exit(size)
        body = stream.read(size)
        with suppress(OSError):  # the trainer has hung up: there is nobody to tell
            channel.sendall(body) if kind == _CHANNEL else os.write(1, body)
    os._exit(1)  # the host is gone


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK):
            sink.sendall(chunk)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class WorkerHost:
    """On the other machine: starts a worker for each relay that knows the token."""

    def __init__(self, address: str | None = None) -> None:
        """Listens at `address`, by default the one that Ray calls this machine."""
        if address is None:
            import ray

            address = ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        port, token = self._listener.getsockname()[1], secrets.token_urlsafe(24)
        self._host = Host(address=str(address), port=port, token=token)
        threading.Thread(target=self._accept, daemon=True).start()

    def where(self) -> Host:
        """How it is reached."""
        return self._host

    def close(self) -> None:
        """Start no more."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, relay: socket.socket) -> None:
        with relay:
            relay.settimeout(_CONNECT_S)
            try:
                stream = relay.makefile("rb")
                hello = json.loads(stream.readline(1 << 20))
                known = secrets.compare_digest(str(hello.pop("token")), self._host.token)
            except (OSError, ValueError, LookupError, AttributeError):
                return
            if known:
                relay.settimeout(None)
                _work(relay, stream, hello)


def _work(relay: socket.socket, stream: Any, hello: dict[str, Any]) -> None:
    """A worker from its start to its end."""
    ours, theirs = socket.socketpair()
    life, our_life = os.pipe()
    output, printed = os.pipe()
    paths = [*sys.path, *(path for path in hello["paths"] if path not in sys.path)]
    program = child_program(hello["module"], paths, theirs.fileno(), life, hello["namespaces"])
    env = Walls(network=hello["network"], variables=tuple(hello["variables"])).environment()
    cwd = hello["cwd"] if Path(hello["cwd"]).is_dir() else None
    process = start(program, fds=(theirs.fileno(), life), printed=printed, env=env, cwd=cwd)
    theirs.close()
    os.close(life)
    os.close(printed)
    lock = threading.Lock()

    def tell(kind: int, body: bytes, number: int | None = None) -> None:
        with lock, suppress(OSError):  # a relay that is gone is noticed where it is read
            relay.sendall(_FRAME.pack(kind, len(body) if number is None else number) + body)

    def report() -> None:
        with suppress(OSError):
            while chunk := ours.recv(_CHUNK):
                tell(_CHANNEL, chunk)

    def show() -> None:
        while chunk := os.read(output, _CHUNK):
            tell(_PRINTED, chunk)
        os.close(output)

    threads = [threading.Thread(target=work, daemon=True) for work in (report, show)]
    for thread in threads:
        thread.start()

    def end() -> None:
        code = process.wait()
        for thread in threads:  # its children may hold the channel open
            thread.join(_END_S)
        tell(_ENDED, b"", code)
        with suppress(OSError):
            relay.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=end, daemon=True).start()
    with suppress(OSError):
        while chunk := stream.read1(_CHUNK):
            ours.sendall(chunk)
    ours.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    os.close(our_life)


class RayHosts:
    """Hosts in actors of Ray, spread over its machines (needs `rolecall[ray]`)."""

    def __init__(self, count: int, *, what: str, option: str | None) -> None:
        """`what` and `option` are for the sentence if there is no room."""
        from rolecall.workers.ray_cluster import check_resources, connected, in_words, refuse_missing

        self._ray, self._own = connected(cpus=count)
        self._actors: list[Any] = []
        try:
            check_resources(self._ray, count, {"CPU": 1.0}, what=what, option=option)
            actor = self._ray.remote(WorkerHost).options(num_cpus=1, scheduling_strategy="SPREAD")
            self._actors = [actor.remote() for _ in range(count)]
            waits = [actor.where.remote() for actor in self._actors]
            self.hosts: tuple[Host, ...] = tuple(self._ray.get(waits, timeout=_PLACE_S))
        except self._ray.exceptions.RayError as error:
            self.close()
            refuse_missing(error)
            why = f"no room within {_PLACE_S:g} s" if isinstance(error, TimeoutError) else in_words(error)
            raise UserError(
                f"Ray could not place {what}: {why}; look at `ray status`, then resume", exit_code=75
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them, and what they run."""
        for actor in self._actors:
            with suppress(Exception):  # it may be dead, and so may be the cluster
                self._ray.kill(actor, no_restart=True)
        if self._own:
            self._ray.shutdown()
            self._own = False
