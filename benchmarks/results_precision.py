"""What weighing fresh answers does to learning when the engine is coarser than the trainer, over several seeds.

    python benchmarks/results_precision.py [--seeds 3] [--place runs/results-precision]

GRPO on the sorting task from the same seed's short SFT, 40 steps. Besides the engine in float32 and in bfloat16, the
engine's weights are rounded to few bits, which stands for a sampler that is further off (a quantised one). Each engine
runs with fresh answers weighed and not. Runs that are there are not made again; the table is printed at the end.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from results_replay import start_of
from torch import Tensor

import rolecall
from rolecall.rollout import open as engines
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.native import NativeEngine

STEPS, LAST = 40, 3
ENGINES = {"float32": None, "bfloat16": None, "3 bits": 3, "2 bits": 2}
"""Bits of the engine's weights behind the leading one; None: as its dtype has them."""
COMMON: dict[str, Any] = {
    "rows": "sorting",
    "steps": STEPS,
    "prompts": 8,
    "samples": 8,
    "sampling": {"max_new_tokens": 8},
    "optim": {"lr": 1e-4, "warmup_steps": 5},
    "eval": {"every": 5, "rows": 400},
    "save": {"every": 0, "rollouts": 0, "updates": 0},
    "quiet": True,
}


def coarse(bits: int) -> type[NativeEngine]:
    """An engine that rounds its weights; its fingerprint stays that of what it was given."""

    class Coarse(NativeEngine):
        def load(self, weights: Mapping[str, Tensor], version: int) -> None:
            super().load({name: _rounded(w, bits) for name, w in weights.items()}, version)
            self._hash = weights_hash(weights, torch.bfloat16)

    return Coarse


def _rounded(weight: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(weight.detach())
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)


def run_one(place: Path, engine: str, seed: int, *, weighed: bool) -> Path:
    """One run to its end."""
    out = place / f"{engine.replace(' ', '-')}-{'weighed' if weighed else 'plain'}-{seed}"
    if (out / "model").is_dir():
        return out
    bits = ENGINES[engine]
    engines._ENGINES["native"] = NativeEngine if bits is None else coarse(bits)
    outcome = rolecall.rl(
        preset="grpo",
        model=str(start_of(place, seed)),
        engine={"dtype": "float32" if engine == "float32" else "bfloat16"},
        replay={} if weighed else {"weigh_fresh": False},
        out=str(out),
        overwrite=out.exists(),
        seed=seed,
        **COMMON,
    ).outcome
    if outcome.exit_code:
        raise SystemExit(f"{out}: {outcome.reason}; start again")
    return out


def numbers(runs: list[Path], name: str, *, last: int | None = None) -> list[float]:
    """The mean of a number in each run, over its last so many values or all."""
    found = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        held = [line[name] for line in lines if name in line]
        found.append(statistics.mean(held[-last:] if last else held) if held else float("nan"))
    return found


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path("runs/results-precision"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| engine | log-probs apart (mean) | weighed | effective answers | accuracy, mean of all looks | of the last 3 |"
    )
    print("|---|---|---|---|---|---|")
    for engine in ENGINES:
        for weighed in (False, True) if engine != "float32" else (False,):
            runs = [run_one(args.place, engine, seed, weighed=weighed) for seed in range(args.seeds)]
            apart = statistics.mean(numbers(runs, "sampling/sampling_logp_difference/mean"))
            ess = f"{statistics.mean(numbers(runs, 'sampling/weight_ess')):.3f}" if weighed else "-"
            whole, end = (numbers(runs, "eval_accuracy", last=last) for last in (None, LAST))
            shown = [" / ".join(f"{100 * x:.1f}" for x in part) for part in (whole, end)]
            print(
                f"| {engine} | {apart:.1e} | {'yes' if weighed else 'no'} | {ess} | {shown[0]} | {shown[1]} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
