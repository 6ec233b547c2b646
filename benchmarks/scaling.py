"""How cost and memory grow, and how long a start takes: `python benchmarks/scaling.py`.

A trained token should cost the same however many there are, and the memory of a step must not grow with vocabulary times
length: logits exist for a chunk of positions at a time.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_models
from turns import Side, environment

BATCHES, LENGTHS = (8, 16, 32, 64), (32, 64, 128, 256)
VOCABULARIES, MEMORY_LENGTHS = (4096, 16_384, 65_536), (64, 256)
COMMANDS = {
    "`import rolecall`": ["-c", "import rolecall"],
    "`rolecall --help`": ["-m", "rolecall", "--help"],
    "`rolecall rl --dry-run`": ["-m", "rolecall", "rl", "--dry-run"],
}


def steps(vocabulary: int, prompts: int, new: int, *, count: int = 3) -> tuple[list[dict[str, Any]], float]:
    """What steps of GRPO in fp32 with 8 answers to each prompt say of themselves, and the seconds before the first."""
    directory = bench_models.small(vocabulary)
    side = Side(
        "rolecall",
        sys.executable,
        "step_ours.py",
        {
            "model": directory,
            "rows": [{"prompt": text} for text in bench_models.prompts(directory, 2 * prompts, 32)],
            "prompts": prompts,
            "samples": 8,
            "sampling": {"max_new_tokens": new},
            "optim": {"lr": 1e-6},
            "out": str(bench_models.PLACE / "scaling"),
        },
    )
    found = [side.work() for _ in range(count)]
    side.close()
    return found[1:], side.start_seconds


def cost(prompts: int, new: int) -> dict[str, float]:
    """Microseconds per answer token, of sampling and of the update."""
    found, start = steps(4096, prompts, new)
    tokens = 8 * prompts * new
    best = {phase: min(f["phases"][phase] for f in found) for phase in ("generate", "update")}
    return {"tokens": tokens, "start": start, **{phase: 1e6 * seconds / tokens for phase, seconds in best.items()}}


def memory(vocabulary: int, new: int) -> dict[str, float]:
    """Peak memory of a process that has done two steps of 64 answers."""
    found, _ = steps(vocabulary, 8, new, count=2)
    from safetensors.torch import load_file

    weights = load_file(Path(bench_models.small(vocabulary)) / "model.safetensors")
    parameters = sum(w.numel() for w in weights.values())
    held = 4 * parameters * 4 / 1e9  # weights, gradient and two moments; the sampler's copy is freed for the update
    return {
        "peak": found[-1]["peak_gb"],
        "held": held,
        "above": found[-1]["peak_gb"] - held,
        "logits": 64 * new * vocabulary * 4 / 1e9,
    }


def main() -> None:
    """Print and write runs/bench/scaling.json."""
    out: dict[str, Any] = {"load": os.getloadavg()[0]}
    out["start"] = {}
    for name, command in COMMANDS.items():
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment())
            seconds.append(time.perf_counter() - begun)
        out["start"][name] = min(seconds)
        print(f"{name}: {min(seconds):.2f} s", flush=True)
    out["batches"] = {8 * b: cost(b, 64) for b in BATCHES}
    out["lengths"] = {n: cost(2048 // n, n) for n in LENGTHS}
    for kind in ("batches", "lengths"):
        for size, row in out[kind].items():
            print(
                f"{kind} {size}: generate {row['generate']:.0f} µs, update {row['update']:.0f} µs a token", flush=True
            )
    out["start"]["a run, to its first step"] = min(row["start"] for row in out["batches"].values())
    out["memory"] = {f"{v} x {n}": memory(v, n) for v in VOCABULARIES for n in MEMORY_LENGTHS}
    for name, row in out["memory"].items():
        print(f"vocabulary x length {name}: peak {row['peak']:.2f} GB, {row['above']:.2f} above weights and optimiser")
    (bench_models.PLACE / "scaling.json").write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
