"""Samples to 90 % on the sorting task with and without replay, in each mode, over several seeds.

    python benchmarks/results_replay.py [--seeds 3] [--place runs/results-replay] [--page docs/results-replay.md]

Every run starts from the same seed's short SFT and ends when greedy answers to held-out problems are 90 % right, or after
120 steps. Runs that are there are not made again, so it can be stopped and started; the page is written from the runs.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch

import rolecall
from rolecall.jobs.demo import mixed_demonstrations

STEPS, PROMPTS, SAMPLES, EVERY, GOAL = 120, 8, 8, 2, 0.9
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "observe": {"replay": {"share": 0.5, "mode": "observe"}},
    "clipped": {"replay": {"share": 0.5, "mode": "clipped"}},
    "shaped": {"replay": {"share": 0.5, "mode": "shaped"}},
}
COMMON: dict[str, Any] = {
    "rows": "sorting",
    "steps": STEPS,
    "prompts": PROMPTS,
    "samples": SAMPLES,
    "sampling": {"max_new_tokens": 8},
    "optim": {"lr": 3e-5, "warmup_steps": 5},
    "eval": {"every": EVERY, "rows": 400, "stop_at": GOAL},
    "save": {"every": 20, "rollouts": 0, "updates": 0},
    "quiet": True,
}


def start_of(place: Path, seed: int) -> Path:
    """A model that sorts the wrong way round half of the time."""
    out = place / f"sft-{seed}"
    if not (out / "model").is_dir():
        made = rolecall.sft(
            model="tiny",
            rows=mixed_demonstrations(),
            steps=150,
            batch=64,
            optim={"lr": 2e-3, "warmup_steps": 20, "schedule": "cosine"},
            save={"every": 0},
            seed=seed,
            out=str(out),
            overwrite=out.exists(),
            quiet=True,
        )
        if made.outcome.exit_code:
            raise SystemExit(f"{out}: {made.outcome.reason}; start again")
    return out


def run_one(place: Path, name: str, seed: int) -> Path:
    """One run to its end, gone on with if it was interrupted."""
    out = place / f"{name}-{seed}"
    if (out / "model").is_dir():
        return out
    began = (out / "config.json").is_file()
    settings = {} if began else {"model": str(start_of(place, seed)), **COMMON, **VARIANTS[name]}
    outcome = rolecall.rl(preset="grpo", out=str(out), seed=seed, resume=began, **settings).outcome
    if outcome.exit_code:
        raise SystemExit(f"{out}: {outcome.reason}; start again to go on")
    return out


def evaluations(run: Path) -> list[tuple[int, float]]:
    """(step, share of right greedy answers)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["eval_accuracy"]) for line in lines if "eval_accuracy" in line]


def steps_to_goal(run: Path) -> int | None:
    """The first evaluated step at the goal."""
    return next((step for step, accuracy in evaluations(run) if accuracy >= GOAL), None)


def numbers_of(run: Path, name: str) -> float | None:
    """The mean of a number over the run's steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = [line[name] for line in lines if name in line]
    return statistics.mean(held) if held else None


def page_of(place: Path, seeds: int) -> str:
    """The page, from the runs that are there."""
    rows = []
    for name in VARIANTS:
        runs = [place / f"{name}-{seed}" for seed in range(seeds) if (place / f"{name}-{seed}" / "model").is_dir()]
        if not runs:
            continue
        reached = [steps_to_goal(run) for run in runs]
        samples = [
            f"{step * PROMPTS * SAMPLES:,}" if step else f"not in {STEPS * PROMPTS * SAMPLES:,}" for step in reached
        ]
        done = [step * PROMPTS * SAMPLES for step in reached if step]
        mean = f"{statistics.mean(done):,.0f}" if len(done) == len(runs) else "-"
        spread = f"{min(done):,} to {max(done):,}" if len(done) == len(runs) else "-"
        ratios = [numbers_of(run, "replay/ess") for run in runs]
        ess = [value for value in ratios if value is not None]
        shown = f"{statistics.mean(ess):.2f}" if ess else "-"
        rows.append(f"| {name} | {' / '.join(samples)} | {mean} | {spread} | {shown} |")
    starts = " / ".join(
        f"{evaluations(place / f'none-{seed}')[0][1]:.1%}"
        for seed in range(seeds)
        if (place / f"none-{seed}" / "metrics.jsonl").is_file()
    )
    return "\n".join(
        [
            "# Results: replay",
            "",
            "Written by `python benchmarks/results_replay.py`, from the runs it makes: CPU, one thread, float32.",
            "",
            f"GRPO on the sorting task ({PROMPTS} prompts x {SAMPLES} answers a step, learning rate {COMMON['optim']['lr']:g}) from a",
            f"short SFT that gets {starts} of 400 held-out problems right. Samples that were *generated* until greedy answers to",
            f"the held-out problems were {GOAL:.0%} right, looked at every {EVERY} steps ({EVERY * PROMPTS * SAMPLES} samples), by seed. With replay, every second",
            "group of a step is a replayed one (`replay.share 0.5`), all else as by default; effective sample size is that of",
            "the ratios of replayed tokens, as a share of their number.",
            "",
            "| replay | samples to the goal, by seed | mean | range | effective sample size |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "`observe` trains on nothing that it replays, and its runs are the runs without replay, bit for bit.",
            "",
        ]
    )


def main() -> None:
    """Make what is missing and write the page after every run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path("runs/results-replay"))
    parser.add_argument("--page", type=Path, default=Path("docs/results-replay.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    # What differs most first; observing, which must change nothing, last.
    for name, seed in sorted(product(VARIANTS, range(given.seeds)), key=lambda one: (one[0] == "observe", one[1])):
        run = run_one(given.place, name, seed)
        print(f"{run.name}: {evaluations(run)[-1]}", flush=True)
        given.page.write_text(page_of(given.place, given.seeds))
    print(given.page.read_text())


if __name__ == "__main__":
    main()
