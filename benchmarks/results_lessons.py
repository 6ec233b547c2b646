"""What lessons bring in `guessing`, with each way of taking the ratio, at equal samples.

    python benchmarks/results_lessons.py [--seeds 3] [--place runs/results-lessons] [--page docs/results-lessons.md]

The start has learned by demonstrations to guess, mostly by counting up, and to follow advice: to begin with the number that a lesson
names. A model of this size writes no lessons, so a function does: the first guess of an attempt that did better than its group.
What is there is not made again, so it can be stopped and started.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from results_agents import made, measured, spread

import rolecall
from rolecall.agents.play import LESSONS
from rolecall.tasks.names import find_task

HELD_OUT, SAMPLES, DEMONSTRATIONS = 64, 4, 4000
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided, recomputed ratio": {"lessons.share": 0.5, "lessons.ratio": "recomputed"},
    "guided, recomputed ratio, upper clip 0.6": {
        "lessons.share": 0.5,
        "lessons.ratio": "recomputed",
        "lessons.clip_high": 0.6,
    },
    "guided, true behaviour ratio": {"lessons.share": 0.5},
}
RL = {
    "env": "guessing", "steps": 12, "prompts": 8, "samples": 8, "sampling.max_new_tokens": 4, "optim.lr": 2e-4,
    "optim.warmup_steps": 2, "algorithm.epochs": 2, "algorithm.aggregate": "token-mean", "save.updates": 0,
    "save.rollouts": 0,
}  # fmt: skip


def first_guess(attempts: list[Any]) -> list[str | None]:
    """The lesson of an attempt."""
    texts = [attempt.completion[0]["content"].strip() for attempt in attempts]
    good = [attempt.score > attempt.mean and text.isdigit() for attempt, text in zip(attempts, texts, strict=True)]
    return [f"begin with {text}" if use else None for text, use in zip(texts, good, strict=True)]


def demonstrations(seed: int) -> list[dict[str, Any]]:
    """The task's own, and as many that follow advice: after the first guess they halve what is left."""
    task, rng = find_task("guessing"), Random(seed)
    rows = task.rows("train", n=DEMONSTRATIONS, seed=seed)
    found = [{"prompt": row["prompt"], "completion": task.gold(row)} for row in rows]
    for row in rows:
        advice, secret, low, high, said = rng.randint(1, task.high), row["secret"], 1, task.high, list[dict[str, str]]()
        for left in range(task.tries - 1, -1, -1):
            guess = (low + high) // 2 if said else advice
            said.append({"role": "assistant", "content": str(guess)})
            if guess == secret or not left or low > high:
                break
            said.append({"role": "user", "content": "higher" if guess < secret else "lower"})
            low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        lesson = {"role": "user", "content": f"{LESSONS}\n- begin with {advice}"}
        found.append({"prompt": [*row["prompt"], lesson], "completion": said})
    rng.shuffle(found)
    return found


def measure(run: Path) -> dict[str, float]:
    """How often held-out numbers are found, without lessons, at temperature 1 and greedily."""
    how = {"sampling.max_new_tokens": 4}
    found = rolecall.eval(model=str(run), env="guessing", n=HELD_OUT, samples=SAMPLES, **how).numbers
    return {"sampled": found[f"avg@{SAMPLES}"], "greedy": found["accuracy"]}


def last_of(run: Path, name: str) -> float | None:
    """The mean of a number over the last four steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = [line[name] for line in lines if name in line][-4:]
    return sum(held) / len(held) if held else None


def page_of(place: Path, seeds: int) -> str:
    """The page, from the runs that are there."""
    lines = [
        "# Results: lessons",
        "",
        "Written by `python benchmarks/results_lessons.py`, from the runs it makes: `guessing` with the built-in model, CPU, one thread, float32.",
        f"Numbers are mean [lowest, highest] over seeds; shares are of {HELD_OUT} held-out rows, played without lessons {SAMPLES} times at temperature 1 and",
        f"once greedily. All arms have {RL['steps']} steps of {RL['prompts']} x {RL['samples']} episodes from one start, which counts up from 1 unless a lesson",
        "tells it where to begin. Lessons come from a function (the first guess of an attempt that beat its group), because a model of this",
        "size writes none; an episode reads one (`lessons.top 1`), as in the demonstrations. Scores and ratios of training are means over the last four steps.",
        "",
        "| | found, sampled | found, greedy | score with lessons | score without | ratio of guided tokens | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ("start", *ARMS):
        runs = [
            run for seed in range(seeds) if (run := place / f"{slug(arm)}-{seed}").joinpath("measured.json").is_file()
        ]
        if not runs:
            continue
        cells = [spread([measured(run)[name] for run in runs], ".1%") for name in ("sampled", "greedy")]
        for name, form in (("score_with", ".2f"), ("score_without", ".2f"), ("ratio", ".2f")):
            held = [x for run in runs if (x := last_of(run, f"lessons/{name}")) is not None]
            cells.append(spread(held, form) if held else "")
        lines.append(f"| {arm} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines) + "\n"


def slug(arm: str) -> str:
    """An arm's name in a path."""
    return arm.replace(", ", "-").replace(" ", "-")


def main() -> None:
    """Make what is missing and write the page after every run. What the page says after its table is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path("runs/results-lessons"))
    parser.add_argument("--page", type=Path, default=Path("docs/results-lessons.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = given.place / "start-0"
    made(start, rolecall.sft, {"model": "tiny", "rows": demonstrations(0), "steps": 300, "optim.lr": 2e-3}, measure)
    for seed in range(given.seeds):
        for arm, more in ARMS.items():
            lessons = {"lessons.by": first_guess, "lessons.top": 1} if more else {}
            settings = {**RL, **more, **lessons, "model": str(start), "seed": seed}
            made(given.place / f"{slug(arm)}-{seed}", rolecall.rl, settings, measure)
            print(arm, seed, measured(given.place / f"{slug(arm)}-{seed}"), flush=True)
        kept = given.page.read_text().partition("\n## ")[1:] if given.page.is_file() else ("", "")
        given.page.write_text(page_of(given.place, given.seeds) + "".join(kept))


if __name__ == "__main__":
    main()
