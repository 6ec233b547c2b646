"""`rolecall` as torchrun starts it, in forked children that have torch loaded already."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import rolecall.jobs.rl  # noqa: F401  (here, or every child would import it)
from rolecall.cli import main


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ranks(count: int) -> list[dict[str, str]]:
    """What a launcher tells each of so many processes."""
    together = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    together |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [{**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def nothing() -> None:
    """Nothing to do first."""


def forked(
    environment: dict[str, str],
    place: Path,
    *arguments: str,
    before: Callable[[], None] = nothing,
    call: Callable[[list[str]], int] = main,
) -> int:
    """A command in a process with these variables: its id. `before` is called there first."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(280)  # one that hangs must not outlive the test
        torch.set_num_threads(1)
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        os.chdir(place)
        before()
        code = call([*arguments])
    finally:
        os._exit(code)


def started(count: int, place: Path, *arguments: str, before: Callable[[], None] = nothing) -> list[int]:
    """A command in so many processes that train together: their ids."""
    return [forked(one, place, *arguments, before=before) for one in ranks(count)]


def ended(children: list[int]) -> list[int]:
    """How processes ended: their exit codes, or minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def processes(count: int, place: Path, *arguments: str, before: Callable[[], None] = nothing) -> None:
    """A command in so many processes, all of which must end well."""
    assert ended(started(count, place, *arguments, before=before)) == [0] * count
