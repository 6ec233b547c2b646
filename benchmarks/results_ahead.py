"""What sampling ahead of training costs in learning: curves for 0, 1, 3 and 8 steps ahead, with and without a correction.

    python benchmarks/results_ahead.py [--seeds 3] [--steps 70] [--lr 2e-3] [--curves ahead-curves.jsonl]

The built-in model learns from scratch to write bytes each of which is one more than the one before, modulo 7 (the reward is the
share of neighbours of which that holds, 1/7 by chance), with four optimiser steps per rollout and a high learning rate, so
that a few versions make a difference. Each curve that is done is appended to the
file `--curves`, and one that is there already is not run again. Prints for each setting the mean reward of all steps and of the
last ten, over seeds; steps after a run that was stopped as diverged count with its last reward.
"""

import argparse
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import rolecall

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token weights, at most 2": {"replay.weigh_fresh": True, "replay.weights": "truncate", "replay.weights_level": "token",
                                 "replay.weights_low": 0.0, "replay.weights_high": 2.0},
    "clip to behaviour": {"algorithm.old_logprobs": "behaviour"},
    "none": {"replay.weigh_fresh": False},
}  # fmt: skip


def rising(completions: list[Any], **_: Any) -> list[float]:
    pairs = [[(ord(b) - ord(a)) % 7 == 1 for a, b in pairwise(text)] for text in completions]
    return [sum(found) / max(1, len(found)) for found in pairs]


def rewards(ahead: int, how: dict[str, Any], *, seed: int, steps: int, lr: float) -> list[float]:
    fixed = {"sampling.max_new_tokens": 8, "algorithm.epochs": 2, "algorithm.minibatches": 2, "optim.lr": lr}
    with tempfile.TemporaryDirectory() as place:
        run = rolecall.rl(
            rows="addition", reward=rising, prompts=6, samples=8, steps=steps, seed=seed, ahead=ahead, quiet=True,
            out=str(Path(place) / "run"), **fixed, **{"save.every": 0, "save.rollouts": 1, "save.updates": 1, **how},
        )  # fmt: skip
        found = [line["reward"] for line in run.metrics if "reward" in line]
    return found + [found[-1]] * (steps - len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--curves", type=Path, default=Path("ahead-curves.jsonl"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = [(0, "none", {})] + [(k, name, how) for k in (1, 3, 8) for name, how in CORRECTIONS.items()]
    done = [json.loads(line) for line in chosen.curves.read_text().splitlines()] if chosen.curves.exists() else []
    found = {tuple(one["setting"]): one["rewards"] for one in done}
    for seed in range(chosen.seeds):
        for ahead, name, how in settings:
            key = (ahead, name, seed, chosen.steps, chosen.lr)
            if key in found:
                continue
            found[key] = rewards(ahead, how, seed=seed, steps=chosen.steps, lr=chosen.lr)
            with chosen.curves.open("a") as file:
                file.write(json.dumps({"setting": key, "rewards": found[key]}) + "\n")
            print(f"seed {seed} ahead {ahead} {name}: last ten {statistics.mean(found[key][-10:]):.3f}", flush=True)
    print(
        f"\n| ahead | correction | mean of all {chosen.steps} steps | last ten | seeds from .. to |\n|---|---|---|---|---|"
    )
    for ahead, name, _ in settings:
        curves = [found[ahead, name, seed, chosen.steps, chosen.lr] for seed in range(chosen.seeds)]
        means, ends = [statistics.mean(c) for c in curves], [statistics.mean(c[-10:]) for c in curves]
        print(
            f"| {ahead} | {name} | {statistics.mean(means):.3f} | {statistics.mean(ends):.3f} | {min(ends):.3f} .. {max(ends):.3f} |"
        )


if __name__ == "__main__":
    main()
