"""What lessons, step credit and self-made tasks bring in `guessing`, one by one and together, at equal samples.

    python benchmarks/results_lessons.py [--seeds 3] [--only "step credit"] [--place runs/results-lessons] [--page docs/results-lessons.md]

The start has learned by demonstrations to guess, mostly by counting up, and to follow advice: to begin with the number that a lesson
names. A model of this size writes no lessons, judgements or tasks, so functions do: the first guess of an attempt that did better
than its group; whether a guess was still possible; another number to find, with its solution.
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
RL = {
    "env": "guessing", "steps": 12, "prompts": 8, "samples": 8, "sampling.max_new_tokens": 4, "optim.lr": 2e-4,
    "optim.warmup_steps": 2, "algorithm.epochs": 2, "algorithm.aggregate": "token-mean", "save.updates": 0,
    "save.rollouts": 0,
}  # fmt: skip


HALF, PLAIN_RATIO = {"lessons.share": 0.5}, {"lessons.ratio": "recomputed"}
ADCA: dict[str, Any] = {"algorithm.credit": "adca", "reward": f"{__file__}:was_possible"}
MADE = {"rows": "self-made"}
"""The rows that `self_made` writes stand in the place of this word."""
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided, recomputed ratio": HALF | PLAIN_RATIO,
    "guided, recomputed ratio, upper clip 0.6": HALF | PLAIN_RATIO | {"lessons.clip_high": 0.6},
    "guided, true behaviour ratio": HALF,
    "guided, true ratio, step credit": HALF | ADCA,
    "guided, true ratio, step credit, self-made tasks": HALF | ADCA | MADE,
    "plain, step credit (adca)": ADCA,
    "plain, step credit (turns)": {"algorithm.credit": "turns", "algorithm.turn_gamma": 0.9},
    "plain, step credit (gigpo)": {"algorithm.credit": "gigpo", "algorithm.credit_weight": 1.0},
    "plain, self-made tasks": MADE,
}


def was_possible(completions: list[Any], log_extra: Any, **kwargs: Any) -> list[None]:
    """A judge of turns: 1 for a guess that what was heard before leaves possible, -1 for any other."""

    def judged(messages: list[Any]) -> list[float]:
        low, high, marks, guess = 1, 10**6, list[float](), 0
        for message in messages:
            text = message["content"].strip()
            if message["role"] == "assistant":
                guess = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
                marks.append(1.0 if low <= guess <= high else -1.0)
            elif guess >= 0:
                low, high = (max(low, guess + 1), high) if text == "higher" else (low, min(high, guess - 1))
        return marks

    log_extra("turn_marks", [judged(messages) for messages in completions])
    return [None] * len(completions)


def another_number(questions: list[str]) -> list[str]:
    """Proposals: any number, and the guesses that find it by halving."""
    found = []
    for place, question in enumerate(questions):
        secret, low, high, said = Random(f"{place}/{question}").randint(1, 7), 1, 7, list[str]()
        while not said or int(said[-1]) != secret:
            said.append(str((low + high) // 2))
            low, high = (int(said[-1]) + 1, high) if int(said[-1]) < secret else (low, int(said[-1]) - 1)
        prompt = [{"role": "user", "content": "1 to 7"}]
        row = {"prompt": prompt, "secret": secret, "draw": 10**6 + place, "task": "guessing"}
        found.append(json.dumps({"row": row, "solution": said}))
    return found


def self_made(place: Path, start: Path, seed: int) -> str:
    """The file of given and self-made rows, half of each, for the policy at the start."""
    path = place / f"self-made-{seed}.jsonl"
    if not path.is_file():
        how = {"n": 64, "given": 32, "words": 0.95, "meaning": 1.01, "sampling.max_new_tokens": 4, "seed": seed}
        who = {"model": str(start), "env": "guessing", "proposer": f"{__file__}:another_number", "out": str(path)}
        done = rolecall.propose(**who, **how)
        print(f"self-made rows: {done.made} beside {done.given}, dropped {dict(done.dropped)}", flush=True)
    return str(path)


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


def page_of(place: Path, seeds: int, before: str) -> str:
    """The page, from the runs that are there; of arms without as many, what the page said before."""
    said = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
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
        if len(runs) < int(said.get(arm, "0 |").split(" |")[-2].split()[-1]):
            lines.append(said[arm])
            continue
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
    return arm.replace(", ", "-").replace(" ", "-").replace("(", "").replace(")", "")


def main() -> None:
    """Make what is missing and write the page after every run. What the page says after its table is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="make the arms with this in their name alone")
    parser.add_argument("--place", type=Path, default=Path("runs/results-lessons"))
    parser.add_argument("--page", type=Path, default=Path("docs/results-lessons.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = given.place / "start-0"
    made(start, rolecall.sft, {"model": "tiny", "rows": demonstrations(0), "steps": 300, "optim.lr": 2e-3}, measure)
    for seed in range(given.seeds):
        for arm, more in [(arm, more) for arm, more in ARMS.items() if given.only in arm]:
            lessons = {"lessons.by": first_guess, "lessons.top": 1} if "lessons.share" in more else {}
            rows = {"rows": self_made(given.place, start, seed)} if "rows" in more else {}
            settings = {**RL, **more, **lessons, **rows, "model": str(start), "seed": seed}
            made(given.place / f"{slug(arm)}-{seed}", rolecall.rl, settings, measure)
            print(arm, seed, measured(given.place / f"{slug(arm)}-{seed}"), flush=True)
        page = given.page.read_text() if given.page.is_file() else ""
        table, *kept = page.partition("\n## ")
        given.page.write_text(page_of(given.place, given.seeds, table) + "".join(kept))


if __name__ == "__main__":
    main()
