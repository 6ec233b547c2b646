"""How the processes of a job find each other: what started them, and the store that they share.

torchrun, or any launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Whatever keeps the processes from
coming together ends in a sentence within the timeout; torch alone would wait for a day, which is the patience that a run has
with a slow peer.
"""

import hashlib
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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
from rolecall.train.exit_codes import ExitCode

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
    found = _within(left + timeout, lambda: next(iter(rendezvous("env://", timeout=timedelta(seconds=left))))[0])
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
