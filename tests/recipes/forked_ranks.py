"""`rolecall` as torchrun starts it, in forked children that have torch loaded already."""

import os
import socket
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import rolecall.jobs.rl  # noqa: F401  (here, or every child would import it)
from rolecall.cli import main


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def started(count: int, place: Path, *arguments: str) -> list[int]:
    """A command in so many processes that train together: their ids."""
    port, children = str(free_port()), []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count)
                )
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
                AcceleratorState._reset_state(reset_partial_state=True)
                os.chdir(place)
                code = main([*arguments])
            finally:
                os._exit(code)
        children.append(child)
    return children


def ended(children: list[int]) -> list[int]:
    """How processes ended: their exit codes, or minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def processes(count: int, place: Path, *arguments: str) -> None:
    """A command in so many processes, all of which must end well."""
    assert ended(started(count, place, *arguments)) == [0] * count
