"""What keeps a worker apart from the trainer: namespaces, capabilities, limits, and what it sees of the environment.

The process that the trainer starts becomes a keeper. Its child runs the code, inside pid, mount and (without network)
net namespaces of its own where the kernel allows, and the keeper ends with it, in the same way, once all that it
started is gone:

    trainer ── keeper ── init (pid 1 of the namespaces) ── worker ── whatever it starts
    trainer ── keeper ── worker ── whatever it starts        where namespaces are refused
"""

import ctypes
import errno
import fcntl
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

_PASSED = (
    *("HOME", "PATH", "PWD", "SHELL", "USER", "LOGNAME", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "SSL_CERT_*", "CC", "CXX"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "NUMEXPR_*", "GOMP_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*"),
    *("HF_HOME", "HF_*_CACHE", "HF_*_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_*", "TORCH_HOME", "TOKENIZERS_PARALLELISM"),
    *("NLTK_DATA", "MPLBACKEND", "SDL_*", "ROLECALL_*"),
)
"""Environment variables that every worker sees."""
_PASSED_WITH_NETWORK = ("*_proxy", "*_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_MS_SLAVE_ALL, _MS_PROC = 0x80000 | 0x4000, 0x2 | 0x4 | 0x8
_PDEATHSIG, _CAPBSET_DROP, _SUBREAPER, _NO_NEW_PRIVS = 1, 24, 36, 38
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LANDLOCK = 444
_CAPABILITIES = sum(1 << c for c in (0, 1, 3, 4, 5, 6, 7))
"""What is left to root: its ways with files (chown, dac_override, fowner, fsetid), kill, setgid, setuid."""
_LOWEST_PIDS = 300
"""The kernel gives these numbers to processes once only."""
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walls:
    """What workers of a kind may do."""

    memory_mb: int | None = 2048
    """Private memory of a process; None: no limit."""
    network: bool = False
    variables: tuple[str, ...] = ()
    """Environment variables they see in addition to the usual ones."""
    options: tuple[str, str] = ("network", "variables")
    """What the user calls the two above."""
    processes: int = 512
    """Processes and threads at a time."""
    frame_mb: int = 4
    """The largest message."""

    def environment(self) -> dict[str, str]:
        """The variables of this process that a worker sees."""
        names = (*_PASSED, *self.variables, *(_PASSED_WITH_NETWORK if self.network else ()))
        passed = {key: value for key, value in os.environ.items() if any(fnmatch(key, name) for name in names)}
        return {"OMP_NUM_THREADS": "1"} | passed

    def withheld(self) -> list[str]:
        """The names of the variables of this process that a worker does not see."""
        return [name for name in os.environ if name not in self.environment()]

    def explain(self, error: BaseException, withheld: Iterable[str]) -> str:
        """What to say after an error that comes of these walls; empty if it does not."""
        text = str(error)
        for name in withheld:
            if re.search(rf"\b{re.escape(name)}\b", text) and name != "_":
                return f"; the environment variable {name} is not passed on: name it in {self.options[1]}"
        chain, causes = [error], set[int]()
        while not self.network and chain:
            one = chain.pop()
            if isinstance(one, OSError) and (isinstance(one, socket.gaierror) or one.errno in _UNREACHABLE):
                return f"; it has no network: set {self.options[0]} to give it one"
            causes.add(id(one))
            before = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
            chain += [e for e in before if e is not None and id(e) not in causes]
        return ""


class Refused(Exception):
    """The kernel does not allow namespaces."""


def enclose(walls: Walls, *, namespaces: bool, life_fd: int, close: Sequence[int]) -> None:
    """Returns in the process that is to run the code; this one becomes its keeper and closes `close`.

    Raises `Refused` if it shall have namespaces and the kernel does not allow them.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = 0

    def end(*_: object) -> NoReturn:
        _end_all(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    _signal_when_trainer_is_gone(life_fd)
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    in_userns = False
    if libc is not None:
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        in_userns = _unshare(libc, walls) if namespaces else False
    status_in, status_out = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until `child` is known
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        for fd in (*close, status_out):
            os.close(fd)
        status = os.read(status_in, 4) if namespaces else struct.pack("i", _reap(child))
        _end_all(child)
        _end_like(struct.unpack("i", status)[0] if status else signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for fd in (life_fd, status_in):
        os.close(fd)
    if libc is not None:
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        keeper = select.poll()
        keeper.register(status_out, 0)
        if keeper.poll(0):  # nobody reads it: the keeper went before the lines above
            os._exit(1)
    if namespaces:
        _become_init(libc, walls, status_out, close)
    os.close(status_out)
    if libc is not None:
        _limit(libc, walls, in_userns=in_userns)
        if not namespaces:
            _landlock(libc, walls)


def _become_init(libc: Any, walls: Walls, status_out: int, close: Sequence[int]) -> None:
    """Stay as pid 1 of the namespaces, with which they end; returns in the child."""
    _furnish(libc, walls)
    worker = os.fork()
    if worker:
        for fd in close:
            os.close(fd)
        os.write(status_out, struct.pack("i", _reap(worker)))
        os._exit(0)


def _unshare(libc: Any, walls: Walls) -> bool:
    """Enter the namespaces; whether a user namespace was needed for that (root can do without)."""
    flags = _NEWPID | _NEWNS | (0 if walls.network else _NEWNET)
    in_userns = False
    if libc.unshare(flags) != 0:
        uid, gid = os.geteuid(), os.getegid()
        if libc.unshare(flags | _NEWUSER) != 0:
            raise Refused(os.strerror(ctypes.get_errno()))
        in_userns = True
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        except OSError as error:
            raise Refused(str(error)) from error
    if libc.mount(b"none", b"/", None, _MS_SLAVE_ALL, None) != 0:
        raise Refused(os.strerror(ctypes.get_errno()))
    return in_userns


def _furnish(libc: Any, walls: Walls) -> None:
    """As pid 1: a /proc that shows these processes only, a limit on their number, and a loopback device that is up."""
    mounted = libc.mount(b"proc", b"/proc", b"proc", _MS_PROC, None) == 0
    if mounted and _kernel() >= (6, 14):  # before that, the number is the whole machine's
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(_LOWEST_PIDS + walls.processes))
    if not walls.network:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _limit(libc: Any, walls: Walls, *, in_userns: bool) -> None:
    if walls.memory_mb is not None:
        # Private writable memory, not address space: libraries reserve far more of the latter than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (walls.memory_mb << 20, walls.memory_mb << 20))
    if in_userns and _kernel() >= (5, 14):  # before that, all processes of the user count
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NPROC, (walls.processes, walls.processes))
    for capability in range(64):
        if not _CAPABILITIES >> capability & 1:
            libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, data)
    low = struct.unpack_from("III", data.raw)[1] & (_CAPABILITIES if os.geteuid() == 0 else 0)
    libc.capset(header, struct.pack("IIIIII", low, low, 0, 0, 0, 0))


def _landlock(libc: Any, walls: Walls) -> None:
    """In place of namespaces: no way into processes outside and no signals to them; no TCP, for what it starts too."""
    version = libc.syscall(_LANDLOCK, None, 0, 1)
    tcp, signals = (3 if version >= 4 and not walls.network else 0), (2 if version >= 6 else 0)
    if tcp or signals:
        rules = struct.pack("QQQ", 0, tcp, signals)[: 24 if version >= 6 else 16]
        ruleset = libc.syscall(_LANDLOCK, rules, len(rules), 0)
        libc.syscall(_LANDLOCK + 2, ruleset, 0)
        os.close(ruleset)


def _kernel() -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in os.uname().release.split(".")[:2])


def _reap(worker: int) -> int:
    """How the worker ended; whoever else is orphaned here is buried on the way."""
    while True:
        pid, status = os.wait()
        if pid == worker:
            return status


def _end_all(child: int) -> None:
    """Kill the child and all that becomes a child of this process when its parent goes."""
    left, until = [child] if child else [], monotonic() + 2
    while left and monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        left = _children()


def _children() -> list[int]:
    me, found = os.getpid(), []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(place.read_text().rpartition(")")[2].split()[1]) == me:
                found.append(int(place.parent.name))
    return found


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _signal_when_trainer_is_gone(life_fd: int) -> None:
    """Have the kernel send SIGTERM to this process when the trainer, which holds the other end of the pipe, is gone.

    The parent-death signal fires already when the trainer's *thread* that started this process ends.
    """
    os.set_inheritable(life_fd, False)
    if sys.platform == "linux":
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:  # it went before the lines above
        os._exit(1)


def watch_network(walls: Walls, *, refuse: bool, note: Callable[[str], None]) -> None:
    """Call `note` with what this process tries to reach; with `refuse`, where there is no net namespace, prevent it."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.bind") and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
            if event == "socket.connect":
                note(f"{arguments[1][0]}:{arguments[1][1]}")
            if refuse:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        elif event == "socket.getaddrinfo" and arguments[0] not in (None, "", "localhost"):
            note(f"{arguments[0]}:{arguments[1]}")

    if not walls.network:
        sys.addaudithook(hook)
