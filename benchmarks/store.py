"""What it costs to append a step's rollouts to the store, against the step itself.

    python benchmarks/store.py [--steps 12]

GRPO on the built-in model, single-threaded, at two sizes of step; the median over the steps of one run, written to the
same disk as runs are. `append` is what the step waits for: spelling the tokens and making the columns, and whatever is left
of the writing, which a thread does meanwhile, when the step has been trained. The share of processor time has all of it,
the thread's too, and leaves out waiting for the disk. A larger model makes the step longer and the record no larger.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import rolecall
from rolecall.recipes.experience import Rollout
from rolecall.recipes.records import Records
from rolecall.train.jsonl import read_lines

SIZES = {
    "32 prompts x 8 answers x 8 tokens": {"prompts": 32, "samples": 8, "sampling": {"max_new_tokens": 8}},
    "16 prompts x 8 answers x 64 tokens": {
        "prompts": 16,
        "samples": 8,
        "sampling": {"max_new_tokens": 64, "stop_ids": []},
    },
}


def measure(place: Path, steps: int, settings: dict[str, Any]) -> tuple[float, float, float, int]:
    """(seconds to append, seconds of a step without it, share of processor time, bytes of a step's file), medians."""
    spent: list[float] = []
    begins: list[float] = []
    worked: list[float] = []
    append, finish, write = Records.rolled_out, Records._finish, Records._write

    def timed(self: Records, rollout: Rollout) -> None:
        begun, worked_before = time.perf_counter(), time.thread_time()
        begins.append(time.process_time())
        append(self, rollout)
        worked.append(time.thread_time() - worked_before)
        spent.append(time.perf_counter() - begun)

    def waited(self: Records) -> None:
        begun = time.perf_counter()
        finish(self)
        if spent:
            spent[-1] += time.perf_counter() - begun

    def written(self: Records, *what: Any) -> None:
        begun = time.thread_time()
        write(self, *what)
        worked[-1] += time.thread_time() - begun

    Records.rolled_out, Records._finish, Records._write = timed, waited, written  # type: ignore[method-assign]
    try:
        run = rolecall.rl(
            rows="sorting", steps=steps, out=str(place), save={"every": 0, "updates": 0}, quiet=True, **settings
        )
    finally:
        Records.rolled_out, Records._finish, Records._write = append, finish, write  # type: ignore[method-assign]
    seconds = [timer["update"] + timer["collect"] for timer in read_lines(run.path / "timing.jsonl")]
    size = statistics.median(path.stat().st_size for path in (run.path / "rollouts").iterdir())
    appended = statistics.median(spent[1:])
    whole = statistics.median(b - a for a, b in pairwise(begins))
    work = statistics.median(worked[1:])
    return appended, statistics.median(seconds[1:]) - appended, work / (whole - work), int(size)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'step':36}  append      step     share   of processor time     file")
    with tempfile.TemporaryDirectory(dir=".") as place:
        for number, (name, settings) in enumerate(SIZES.items()):
            append, step, work, size = measure(Path(place) / str(number), given.steps, settings)
            print(
                f"{name:36}  {1000 * append:6.1f} ms  {1000 * step:6.0f} ms  {append / step:6.2%}  {work:18.2%}  "
                f"{size / 1024:5.0f} kB"
            )


if __name__ == "__main__":
    main()
