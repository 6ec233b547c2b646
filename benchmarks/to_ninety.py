"""Wall clock to 90 % on the built-in task: our GRPO against TRL's, from the same start, at equal samples, in turns.

    python benchmarks/to_ninety.py [--seeds 2]

The task, start and settings are those of docs/results.md, in the precision that is faster: ours samples and computes in
bf16, TRL with or without bf16 by a trial. Time is that of the training steps until the first model, looked at every 5
steps, that answers 90 % of 400 held-out problems; evaluations and saving are not counted on either side.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from turns import environment

if __name__ == "__main__" and "BENCH_CHILD" not in os.environ:  # threads and allocator are read when Python starts
    os.execve(sys.executable, [sys.executable, *sys.argv], environment() | {"BENCH_CHILD": "1"})

import bench_models
import results_trl_side
from results_runs import Place, reinforce
from step import BF16

GOAL = 0.9


def ours(place: Place, seed: int) -> tuple[float | None, float]:
    """(seconds to the goal, seconds per step)."""
    path = reinforce(place, "grpo", seed, folder="ours", preset="grpo", **BF16)
    lines = [json.loads(line) for line in (path / "timing.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["step_time"] for line in lines if "step_time" in line}
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["eval_accuracy"] for line in found if "eval_accuracy" in line}
    return _reached(curve, steps), statistics.median(steps.values())


def theirs(place: Place, seed: int, *, bf16: bool) -> tuple[float | None, float]:
    """The same of TRL."""
    results_trl_side.compare(place, seed, bf16=bf16)
    result = json.loads((place.at("trl", f"grpo-seed-{seed}") / "result.json").read_text())
    steps = dict(enumerate(result["step_seconds"], 1))
    return _reached({point["step"]: point["accuracy"] for point in result["curve"]}, steps), statistics.median(
        steps.values()
    )


def faster_with_bf16(place: Place) -> dict[bool, float]:
    """TRL's seconds per step without and with bf16."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for bf16 in (False, True, True, False):
        path = place.at("trl", "trial")
        seconds[bf16] += results_trl_side.train(place, path, 0, steps=10, bf16=bf16)["step_seconds"]
    found = {bf16: statistics.median(those) for bf16, those in seconds.items()}
    print(f"TRL without bf16 {found[False]:.3f} s a step, with it {found[True]:.3f} s", flush=True)
    return found


def _reached(curve: dict[int, float], seconds: dict[int, float]) -> float | None:
    goal = next((step for step in sorted(curve) if curve[step] >= GOAL), None)
    return None if goal is None else sum(s for step, s in seconds.items() if step <= goal)


def main() -> None:
    """Print and write runs/bench/to_ninety.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    place = Place(root=bench_models.PLACE / "to-90")
    shutil.rmtree(place.root, ignore_errors=True)
    trial = faster_with_bf16(place)
    bf16 = trial[True] < trial[False]
    pairs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        (a, a_step), (b, b_step) = ours(place, seed), theirs(place, seed, bf16=bf16)
        pairs.append({"seed": seed, "ours": a, "theirs": b, "ours_step": a_step, "theirs_step": b_step})
        print(f"seed {seed}: ours {a} s ({a_step:.2f} s a step), TRL {b} s ({b_step:.2f} s a step)", flush=True)
    ratios = [p["theirs"] / p["ours"] for p in pairs if p["ours"] and p["theirs"]]
    out = {
        "pairs": pairs,
        "ratios": ratios,
        "bf16": bf16,
        "trial": [trial[False], trial[True]],
        "must": 2.5,
        "aim": 5,
        "load": os.getloadavg()[0],
    }
    Path(bench_models.PLACE / "to_ninety.json").write_text(json.dumps(out, indent=1))
    if ratios:
        print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
