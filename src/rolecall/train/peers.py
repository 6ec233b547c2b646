"""The processes of a job: how they find each other, whether they were started alike, and whether they are still there.

A collective of torch waits for as long as its slowest rank rolls out, so its own time limit says nothing about whether a
peer lives. Each rank therefore counts up a number in the job's store, from a thread, and watches the numbers of the others.
A rank that stops counting, or leaves a word that it ended, is lost: the connections of this rank's collectives are closed,
so that the main thread comes back from whatever it waits in, and it ends with exit code 75.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rolecall.config.plan import processes
from rolecall.errors import UserError
from rolecall.train.checkpoint import differences
from rolecall.train.exit_codes import ExitCode

_LEFT = b"left "
_NAMED = 5
"""Differences that a message names."""
_log = logging.getLogger("rolecall")


class PeerLost(UserError):
    """Another process of the job is gone. What this one had is saved; the same command may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.RETRY)


class Peers:
    """This rank's view of the others. A job of one process has none, and everything here does nothing."""

    def __init__(self, *, rank: int = 0, ranks: int = 1, timeout: float = 60.0, sockets: frozenset[int] = frozenset()):
        """`sockets` are the descriptors of the process group (`open_sockets` after it was made, less those before)."""
        self.rank, self.ranks, self.timeout, self._sockets = rank, ranks, timeout, sockets
        self.interval = min(1.0, timeout / 5)
        """Seconds between two signs of life."""
        self.lost: str | None = None
        """Who is lost, and how that shows."""
        self.lost_code: int | None = None
        """The exit code that the lost rank left behind, if it said a word."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called, from a thread and more than once, when a peer is lost."""
        self._rounds = 0
        self._quiet = [0] * ranks
        self._closing, self._noticed = threading.Event(), threading.Event()
        if ranks > 1:
            shared: Any = dist.distributed_c10d._get_default_store()
            self._store = shared.clone()  # a connection of its own: the threads wait on it
            Peers._jobs = number = Peers._jobs + 1  # a process may run several jobs, one after the other
            self._keys = [f"rolecall/{number}/{i}/alive" for i in range(ranks)]
            self._store.set(self._keys[rank], b"0")

    _jobs = 0

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse to start if any rank was given other settings than rank 0."""
        if self.ranks == 1:
            return
        self._store.set(f"{self._keys[self.rank]}/settings", json.dumps(settings, sort_keys=True))
        first, *others = (json.loads(self._waited(f"{key}/settings", i)) for i, key in enumerate(self._keys))
        what = [
            f"{name} is {old!r} on rank 0 and {new!r} on rank {i}"
            for i, other in enumerate(others, 1)
            for name, old, new in differences(first, other)
        ]
        self._store.set(f"{self._keys[self.rank]}/compared", b"")
        for i, key in enumerate(self._keys):  # rank 0 may keep the store, which all must have read before it ends
            self._waited(f"{key}/compared", i)
        if what:
            named = "; ".join(what[:_NAMED]) + (f"; and {len(what) - _NAMED} more" if len(what) > _NAMED else "")
            raise UserError(f"the processes of this job were started differently: {named}; start all of them alike")

    def watch(self) -> None:
        """Begin to give signs of life and to look for those of the others."""
        for work in (self._beat, self._stand_by) if self.ranks > 1 else ():
            threading.Thread(target=work, daemon=True, name=f"rolecall{work.__name__}").start()

    def why(self, error: BaseException) -> str | None:
        """What happened to a peer, in words, if that is what `error` in this process comes from."""
        if self.ranks == 1:
            return None
        if self.lost is None:
            if not _is_of_a_collective(error):
                return None
            # A rank that ended with a word is known at the next round; one that was killed is silent.
            for _ in range(3):
                sleep(self.interval)
                if self._is_lost():
                    break
        self._noticed.set()
        if not self._is_lost():
            silent = [i for i in range(self.ranks) if i != self.rank and self._quiet[i] >= 2]
            who = f"rank {silent[0]}" if silent else "a peer"
            self.lost = f"{who} is gone (its connection closed)"
        return self.lost

    def _is_lost(self) -> bool:
        return self.lost is not None

    def all_stopped_at(self, step: int) -> bool:
        """Whether all ranks have broken off after the same step, within a few seconds; then they can still save together."""
        self._store.set(f"{self._keys[self.rank]}/stopped", str(step))
        for key in self._keys:
            for _ in range(int(5 / self.interval)):
                if self._store.check([f"{key}/stopped"]):
                    break
                sleep(self.interval)
            else:
                return False
            if int(self._store.get(f"{key}/stopped")) != step:
                return False
        return True

    def leave(self, code: int, why: str) -> None:
        """Tell the others that this rank ends before the job does, and give them the time to hear it."""
        if self.ranks == 1 or self._closing.is_set():
            return
        self._closing.set()
        self._noticed.set()
        word = b"%s%d %s" % (_LEFT, code, " ".join(why.split())[:300].encode())
        told = threading.Thread(target=self._tell, args=(word,), daemon=True)
        told.start()
        told.join(timeout=self.interval)  # the store may be gone, or its process stopped
        if self.lost is None:
            sleep(2 * self.interval)

    def close(self) -> None:
        """The job is over on all ranks."""
        self._closing.set()
        self._noticed.set()

    def _waited(self, key: str, rank: int) -> bytes:
        pause = min(0.05, self.interval)
        for _ in range(int(self.timeout / pause)):
            if self._store.check([key]):
                return bytes(self._store.get(key))
            sleep(pause)
        raise PeerLost(f"rank {rank} has not come within {self.timeout:g} s (rank_timeout)")

    def _tell(self, word: bytes) -> None:
        with suppress(Exception):
            self._store.set(self._keys[self.rank], word)
            sleep(self.interval / 2)  # a last round of `_beat` may have written over it
            self._store.set(self._keys[self.rank], word)

    def _beat(self) -> None:
        """Rounds are counted, not seconds: a machine that slept has not heard from anybody."""
        last: list[bytes] = [b""] * self.ranks
        count = 0
        while not self._closing.wait(self.interval):
            count += 1
            try:
                self._store.set(self._keys[self.rank], str(count))
                heard = self._store.multi_get(self._keys)
            except Exception:  # of any kind that torch has: the store is gone
                self._lose(f"{_store_owner()} is gone")
                return
            self._rounds += 1
            for i in (i for i in range(self.ranks) if i != self.rank):
                if heard[i].startswith(_LEFT):
                    code, _, why = heard[i].removeprefix(_LEFT).decode().partition(" ")
                    self.lost_code = int(code)
                    self._lose(f"rank {i} ended with exit code {code} ({why})")
                    return
                self._quiet[i] = self._quiet[i] + 1 if heard[i] == last[i] else 0
                if self._quiet[i] * self.interval >= self.timeout:
                    self._lose(f"rank {i} has given no sign of life for {self.timeout:g} s (rank_timeout)")
                    return
            last = heard

    def _stand_by(self) -> None:
        """Notice that the store itself does not answer, and end the process if the main thread does not come back."""
        rounds = silent = after = 0
        while not self._noticed.wait(self.interval):
            silent = 0 if rounds != self._rounds else silent + 1
            rounds = self._rounds
            if self.lost is None and silent * self.interval >= self.timeout:
                self._lose(f"{_store_owner()} has not answered for {self.timeout:g} s (rank_timeout)")
            if self.lost is not None:
                self.on_loss()
                after += 1
            if after * self.interval >= self.timeout:
                sys.stderr.write(
                    f"rolecall: {self.lost}; this process did not come back to save, the last checkpoint stands\n"
                )
                sys.stderr.flush()
                os._exit(ExitCode.RETRY)

    def _lose(self, how: str) -> None:
        if self._closing.is_set():
            return
        self.lost = self.lost or how
        for descriptor in self._sockets:
            with suppress(OSError), _socket_of(descriptor) as one:
                one.shutdown(socket.SHUT_RDWR)


def open_sockets() -> frozenset[int]:
    """This process's connected sockets, less those of the job's store; none where the system does not list them."""
    store, found = int(os.environ.get("MASTER_PORT", "0")), set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # noqa: PTH112, PTH208
        with suppress(OSError), _socket_of(int(name)) as one:
            if one.family != socket.AF_UNIX and store not in (one.getsockname()[1], one.getpeername()[1]):
                found.add(int(name))
    return frozenset(found)


def _socket_of(descriptor: int) -> socket.socket:
    """Another handle on a socket, which may be closed."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(f"{descriptor} is no socket")
    return socket.socket(fileno=os.dup(descriptor))


def _store_owner() -> str:
    """Who keeps the store: torchrun's agent, or rank 0."""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


_RUNS = count()
PATIENCE = timedelta(days=1)
"""For a single exchange between processes: a slow peer is waited for, and `Peers` notices one that is lost."""


def refuse_accelerate() -> None:
    """Raise if `accelerate launch` started this process: it may start one where several were asked for, and the settings that
    it hands over would not be used."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return
    program = sys.argv[0]
    what = ["-m", "rolecall"] if Path(program).stem in ("rolecall", "__main__") else [program]
    line = ["torchrun", "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", "N"), *what, *sys.argv[1:]]
    raise UserError(
        f"this was started by `accelerate launch`, whose settings would not be used; start it with: {shlex.join(line)}"
    )


def join(timeout: float) -> Any:
    """The store of the job's processes, once all of them have come; None if this one is alone or has joined already."""
    if processes() == 1 or dist.is_initialized():
        return None
    rank, ranks = _number("RANK"), processes()
    if not 0 <= rank < ranks:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {ranks}: ranks count from 0 to {ranks - 1}")
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(
            f"WORLD_SIZE is {ranks}, but MASTER_ADDR is not set: start all processes with torchrun, or give them the address of rank 0"
        )
    where = f"{os.environ['MASTER_ADDR']}:{_number('MASTER_PORT')}"
    kept_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    begun = monotonic()
    if not kept_here and not _answers(timeout):
        raise UserError(
            f"rank {rank} cannot reach {where} (MASTER_ADDR, MASTER_PORT), tried for {timeout:g} s (rank_timeout): is rank 0 "
            "started, and may this host connect to it?",
            exit_code=ExitCode.RETRY,
        )
    left = max(1.0, timeout - (monotonic() - begun))
    with _aside_unless_joined() as joined:
        found = _within(left + timeout, lambda: next(iter(rendezvous("env://", timeout=timedelta(seconds=left))))[0])
        joined.append(found is not None and not isinstance(found, BaseException))
    if isinstance(found, BaseException) and "EADDRINUSE" in str(found):
        raise UserError(
            f"port {os.environ['MASTER_PORT']} (MASTER_PORT) is taken on this host: give another, such as torchrun --master_port "
            f"{_free_port()}"
        ) from found
    if found is None or isinstance(found, BaseException):
        came = re.search(r"(\d+)/\d+ clients joined", str(found))
        who = f"only {came[1]} of the {ranks} processes of this job came" if came else "this job cannot come together"
        raise UserError(
            f"{who} at {where} within {timeout:g} s (rank_timeout): start all {ranks}, with the address of rank 0 and a port "
            "that nothing else uses",
            exit_code=ExitCode.RETRY,
        ) from (found if isinstance(found, BaseException) else None)
    found.set_timeout(PATIENCE)
    # A launcher keeps its store: what an earlier run of this process left there is not for this one.
    return PrefixStore(f"rolecall/{next(_RUNS)}", found)


def code_hash() -> str:
    """The first digits of the sha256 of this program's Python files: a version number does not tell two checkouts apart."""
    place, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(place.rglob("*.py")):
        found.update(f"{path.relative_to(place)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _number(name: str) -> int:
    given = os.environ.get(name, "")
    try:
        return int(given)
    except ValueError:
        raise UserError(
            f"{name} is {given!r}, not a number: start all processes with torchrun, which sets it"
        ) from None


def _answers(timeout: float) -> bool:
    """Whether anybody answers at the job's address within the timeout; torch prints C++ frames while it tries."""
    end = monotonic() + timeout
    while (left := end - monotonic()) > 0:
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with suppress(OSError, OverflowError), socket.create_connection(place, timeout=left):
            return True
        sleep(min(0.2, left))
    return False


@contextmanager
def _aside_unless_joined() -> Iterator[list[bool]]:
    """What torch says meanwhile is shown only if True is put on the list: C++ frames say less than the error that is raised."""
    joined, shown = list[bool](), os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield joined
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            if joined == [True]:
                aside.seek(0)
                os.write(2, aside.read())


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call gives, or the error that it raises; None if it takes longer. It is then left behind in its thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True, name="rolecall_join")
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
