"""Two programs that take turns on one machine: the driver's side and the side that is driven.

A machine that is shared changes its speed from minute to minute, so only neighbours can be compared. Both sides are
started once, each in its own environment and process, and then told to do one piece of work after another. This file is
imported by all of them and needs nothing but Python.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BUSY = 0.3
"""The share of the machine's time that others use from which it is busy."""
_MARK = "@turn "
ALLOCATOR = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""Debian's package libtcmalloc-minimal4. Every side gets it, where it is installed."""


def environment(threads: int = 2) -> dict[str, str]:
    """The same for every side: threads, and the better allocator.

    Threads that spin while they wait are the faster ones on an idle machine and many times slower on a busy one.
    """
    chosen = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if _used(0.5) > BUSY:
        chosen["OMP_WAIT_POLICY"] = "PASSIVE"
    if ALLOCATOR.exists():
        chosen["LD_PRELOAD"] = str(ALLOCATOR)
    return {**os.environ, **chosen, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def _used(seconds: float) -> float:
    """The share of the machine's time that is used while this program waits."""

    def read() -> list[int]:
        return [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]

    if not Path("/proc/stat").exists():
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    before = read()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, read(), strict=True)]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def take_turn(**facts: Any) -> None:
    """Called by the driven side when a piece of work is done; returns when the next one is wanted."""
    facts["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(_MARK + json.dumps(facts), flush=True)
    if sys.stdin.readline().strip() != "go":
        os._exit(0)


class Side:
    """A driven program. Its first report, before any work, says that it has started."""

    def __init__(self, name: str, python: str, script: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
        self._log = Path(settings["out"]).with_suffix(".log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        self._report()
        self.start_seconds = time.perf_counter() - begun

    def work(self) -> dict[str, Any]:
        """One piece of work: its `seconds` as the driver saw them, and what the side says of it."""
        assert self._process.stdin is not None
        begun = time.perf_counter()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = self._report()
        return {**found, "seconds": time.perf_counter() - begun}

    def close(self) -> None:
        """End the program and all that it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _report(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return found
        raise SystemExit(
            f"{self.name} ended with {self._process.wait()}; its last words:\n{self._log.read_text()[-3000:]}"
        )
