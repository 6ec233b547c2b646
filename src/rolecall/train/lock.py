"""One process per run directory."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from rolecall.files import write_atomically

LOCK = ".lock"
"""Name of the lock file in a run directory."""


class LockedError(Exception):
    """Another process works in this run directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process, named so that no later process can be taken for it."""

    pid: int
    """Its number."""
    start: int | None
    """When it started, in ticks since boot: numbers are used again. None where the system does not say."""
    boot: str
    """The kernel's boot id; empty where the system does not say."""
    pids: str
    """The namespace its number is valid in; empty where the system does not say."""
    host: str
    """The machine or container."""
    token: str = ""
    """Which lock of the process this is."""


class RunLock:
    """Held from `__init__` to `release`, or to the end of the process. A dead holder's lock is taken over."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._own = _holder(os.getpid())
        with _one_at_a_time(directory):
            held_by = _read(self._path)
            if held_by is not None and (why := _refusal(held_by, self._own)):
                raise LockedError(f"{directory} is in use by process {held_by.pid}{why}")
            write_atomically(self._path, json.dumps(asdict(self._own)).encode())

    def release(self) -> None:
        """Give the directory back. In a forked child, and if the lock is another's by now, nothing happens."""
        if self._own.pid != os.getpid():
            return
        with suppress(OSError), _one_at_a_time(self._path.parent):  # gone or read-only: a dead holder's lock is no lock
            if _read(self._path) == self._own:
                self._path.unlink()


def is_held(directory: Path) -> bool | None:
    """Whether a process works in this directory: False if it died there, None if none does. Nothing is changed."""
    try:
        held_by = _read(directory / LOCK)
    except OSError:  # nobody may look
        return None
    return None if held_by is None else _refusal(held_by, _holder(os.getpid())) is not None


def holder_of(directory: Path) -> int | None:
    """The number of the living process that works in this directory, if it is one of this machine and container."""
    try:
        held_by = _read(directory / LOCK)
    except OSError:
        return None
    own = _holder(os.getpid())
    if held_by is None or (held_by.boot, held_by.pids) != (own.boot, own.pids) or not _alive(held_by):
        return None
    return held_by.pid


def _holder(pid: int) -> Holder:
    return Holder(
        pid=pid,
        start=_start_of(pid),
        boot=_text_of("/proc/sys/kernel/random/boot_id"),
        pids=_link_of("/proc/self/ns/pid"),
        host=socket.gethostname(),
        token=uuid4().hex,
    )


def _refusal(held_by: Holder, own: Holder) -> str | None:
    """Why the lock must be respected, as the rest of a sentence; None if its holder is dead."""
    if held_by.boot != own.boot:
        if held_by.host == own.host:
            return None  # this machine was started again since
        return f" on {held_by.host}; if that is gone, delete {LOCK} there"
    if held_by.pids != own.pids:
        return f" in another container ({held_by.host}); if that is gone, delete {LOCK} there"
    if not _alive(held_by):
        return None
    return "; wait for it, stop it, or choose another run name"


def _alive(holder: Holder) -> bool:
    start = _start_of(holder.pid)
    if start is not None or holder.start is not None:
        return start == holder.start
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_of(pid: int) -> int | None:
    """Start time of a living process from /proc; None if it is dead, a zombie, or there is no /proc."""
    stat = _text_of(f"/proc/{pid}/stat")
    # "pid (name) state ppid ...": the name may hold spaces and brackets, so count from the last bracket.
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link_of(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _read(path: Path) -> Holder | None:
    """Who holds the lock; None if nobody does or the file says nothing that can be understood."""
    try:
        found = Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return found if isinstance(found.pid, int) and 0 < found.pid < 2**31 else None


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Between looking at the lock and taking it no other process may do the same.

    The kernel's own lock is not enough to hold a run: a forked worker would inherit it and outlive the run.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)
