"""A command whose address space is limited (ulimit -v) runs in a child process: its end is always an exit code.

Refused memory is not always an exception: where a thread gets none for its own variables, such as pyarrow's exception in
the thread that writes rollouts, the C library ends the process; other libraries crash, some only as they are unloaded.
"""

import atexit
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_PDEATHSIG = 1
_ABORTED = 127
"""What the C library ends a process with when it has no memory for a thread."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watched(command: Callable[[], int]) -> int:
    """The exit code of a command; where address space is limited, of one in a child process that is watched."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return command()
    waited, parent = {*_FORWARDED, signal.SIGCHLD}, os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _end_with(parent)
        _leave(command())
    while True:
        told = signal.sigwaitinfo(waited)
        if told.si_signo == signal.SIGCHLD:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return _code(os.waitstatus_to_exitcode(status), limit)
        elif told.si_signo != signal.SIGINT or told.si_code <= 0:  # Ctrl-C reaches the child itself
            os.kill(child, told.si_signo)


def _end_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _leave(code: int) -> NoReturn:
    """End without unloading libraries."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code(code: int, limit: int) -> int:
    if code == -signal.SIGKILL:
        return 128 + signal.SIGKILL
    if code >= 0 and code != _ABORTED:
        return code
    how = "the C library" if code > 0 else signal.Signals(-code).name
    print(
        f"rolecall: out of memory: ended by {how} with {limit / 2**30:.1f} GiB of address space (ulimit -v); raise the "
        "limit, and resume with --resume if there is a checkpoint",
        file=sys.stderr,
        flush=True,
    )
    return 1
