"""What sampling ahead of training costs in learning: curves for 0, 1, 3 and 8 steps ahead, with and without a correction.

    python benchmarks/results_ahead.py [--seeds 3] [--steps 60] [--lr 1e-3]

The built-in model learns a reward that differs from byte to byte (the byte's number modulo 7), from scratch. Prints for each setting the
mean reward of all steps and of the last ten, over seeds; steps that were stopped as diverged count with their last reward.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import rolecall

CORRECTIONS: dict[str, dict[str, Any]] = {
    "weights (default)": {},
    "clip to behaviour": {"algorithm.old_logprobs": "behaviour"},
    "none": {"replay.weigh_fresh": False},
}


def letters(completions: list[Any], **_: Any) -> list[float]:
    return [sum(ord(letter) % 7 for letter in text) / (6 * max(1, len(text))) for text in completions]


def rewards(ahead: int, how: dict[str, Any], *, seed: int, steps: int, lr: float) -> list[float]:
    with tempfile.TemporaryDirectory() as place:
        run = rolecall.rl(
            rows="addition", reward=letters, prompts=8, samples=8, steps=steps, seed=seed, ahead=ahead, quiet=True,
            out=str(Path(place) / "run"),
            **{"sampling.max_new_tokens": 12, "optim.lr": lr, "save.every": 0, "save.rollouts": 1, "save.updates": 1, **how},
        )  # fmt: skip
        found = [line["reward"] for line in run.metrics if "reward" in line]
    return found + [found[-1]] * (steps - len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = [(0, "none", {})] + [(k, name, how) for k in (1, 3, 8) for name, how in CORRECTIONS.items()]
    found: dict[tuple[int, str], list[list[float]]] = {}
    for seed in range(chosen.seeds):
        for ahead, name, how in settings:
            curve = rewards(ahead, how, seed=seed, steps=chosen.steps, lr=chosen.lr)
            found.setdefault((ahead, name), []).append(curve)
            last = statistics.mean(curve[-10:])
            print(
                f"seed {seed} ahead {ahead} {name}: mean {statistics.mean(curve):.3f}, last ten {last:.3f}", flush=True
            )
    print(
        f"\n| ahead | correction | mean of all {chosen.steps} steps | last ten | worst seed | seeds |\n|---|---|---|---|---|---|"
    )
    for (ahead, name), curves in found.items():
        means, ends = [statistics.mean(c) for c in curves], [statistics.mean(c[-10:]) for c in curves]
        print(
            f"| {ahead} | {name} | {statistics.mean(means):.3f} | {statistics.mean(ends):.3f} | {min(ends):.3f} | {len(ends)} |"
        )


if __name__ == "__main__":
    main()
