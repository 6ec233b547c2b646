"""Jobs of two ranks to which something happens. `PLACE CASE...`: prints, as JSON, how each case's ranks ended.

Ranks are forked from this process, which has torch loaded, and meet as under any launcher, by RANK, WORLD_SIZE and a port.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rolecall.config.merge import resolve
from rolecall.config.training import SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Built, Job
from rolecall.jobs.running import run as run_job
from rolecall.train.loop import LoopOptions

TIMEOUT = 1.5
STEPS = 40


class Learner:
    """Counts rows and steps. In its fourth rollout something may happen on rank 1; every update needs all ranks."""

    def __init__(self, rank: int, case: str) -> None:
        self.rank, self.case, self.taken, self.done = rank, case, 0, 0
        self.accelerator: Any = None

    def collect(self, step: int) -> int:
        self.taken += 3
        time.sleep(0.05)
        if step == 3 and self.rank == 1:
            if self.case == "slow":
                time.sleep(3 * TIMEOUT)
            elif self.case == "hang":
                time.sleep(1000)
            elif self.case == "error":
                raise UserError("the reward cannot be read", exit_code=1)
        return step

    def update(self, step: int) -> None:
        self.accelerator.gather(torch.ones(1))
        self.done = step + 1

    def metrics(self) -> dict[str, float]:
        return {"loss": 1.0 / self.done}

    def explain(self) -> str:
        return "counted"

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.done = state["taken"], state["done"]


def run(place: Path, case: str, rank: int, **settings: Any) -> int:
    """One rank; its exit code, as the command line would give it."""
    learner = Learner(rank, case)

    def write(directory: Path, extra: dict[str, Any]) -> None:
        (directory / "state.json").write_text(json.dumps({"extra": extra, "learner": learner.state_dict()}))

    def read(directory: Path) -> dict[str, Any]:
        held = json.loads((directory / "state.json").read_text())
        learner.load_state_dict(held["learner"])
        return held["extra"]

    def build(job: Job) -> Built:
        learner.accelerator = job.accelerator
        steps = 6 if case == "slow" else STEPS
        loop = LoopOptions(steps=steps, save_every=0, keep=2, eval_every=0, main="loss")
        return Built(learner=learner, loop=loop, write=write, read=read)

    how = {"rows": "none", "out": str(place), "quiet": True, "rank_timeout": TIMEOUT, "grace": 1.5, **settings}
    try:
        return int(run_job(resolve(SFTOptions, [("test", how)]).options, build=build).outcome.exit_code)
    except UserError as error:
        os.write(2, f"{error}\n".encode())
        return error.exit_code


def forked(place: Path, case: str, rank: int, port: int, ranks: int = 2, **settings: Any) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    os.dup2(os.open(f"{place}.{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    code = 99
    try:
        code = run(place, case, rank, **settings)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    os._exit(code)


def started(place: Path, lines: int) -> None:
    for _ in range(600):
        log = place / "metrics.jsonl"
        if log.is_file() and len(log.read_text().splitlines()) >= lines:
            return
        time.sleep(0.05)


def played(place: Path, case: str) -> dict[str, Any]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    other = {"optim.lr": 0.5, "seed": 7} if case == "different" else {}
    ranks = [forked(place, case, 0, port), forked(place, case, 1, port, **other)]
    how, _, victim = case.partition("-")
    begun = time.monotonic()
    if victim or how == "hang":
        started(place, 3)
        if how == "hang":
            time.sleep(0.3)
        begun = time.monotonic()
        for rank in [int(victim)] if victim else [0, 1]:
            os.kill(ranks[rank], getattr(signal, "SIGTERM" if how == "hang" else f"SIG{how.upper()}"))
    codes: list[int | None] = [None, None]
    for rank in (1 - int(victim), int(victim)) if victim else (0, 1):
        if victim == str(rank):
            os.kill(ranks[rank], signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1])
        if victim != str(rank):
            seconds = time.monotonic() - begun
    saved = sorted(path.name for path in place.glob("checkpoints/*"))
    state = json.loads((place / "checkpoints" / saved[-1] / "state.json").read_text()) if saved else None
    told = [Path(f"{place}.{rank}.txt").read_text() for rank in (0, 1)]
    return {"codes": codes, "told": told, "saved": saved, "state": state, "seconds": seconds}


if __name__ == "__main__":
    place, *cases = sys.argv[1:]
    found = {case: played(Path(place) / case, case) for case in cases}
    alone = Path(place) / "stop-1"
    if "stop-1" in cases:
        os.waitpid(forked(alone, "slow", 0, 0, ranks=1, resume=True), 0)
        found["alone"] = json.loads((alone / "run.json").read_text()) | {"told": Path(f"{alone}.0.txt").read_text()}
    sys.stdout.write(json.dumps(found))
