"""What the built-in tasks of several turns learn on one thread, over several seeds.

    python benchmarks/results_agents.py [--seeds 3] [--only calculator] [--seed 2] [--place runs/results-agents] [--page docs/results-agents.md]

Every seed has a start of its own (SFT on the task's demonstrations), an RL run from there, and both are measured once.
What is there is not made again, so it can be stopped and started; the page is written from what is there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calculator_rows
import textworld_games
import torch

import rolecall

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from kuhn_self_play import strategy_of

from rolecall.tasks.kuhn import exploitability, game_value

HELD_OUT, SAMPLES, LOOKED = 256, 2, 5
"""Held-out rows that are played; episodes of each at temperature 1; last steps that a number of training is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One task."""

    sft: dict[str, Any]
    rl: dict[str, Any]
    measure: Callable[[Path], dict[str, float]]
    """What is known of the model of a run."""
    rows: dict[str, str]
    """The table's rows: what is measured, and its form."""
    counts: tuple[str, ...] = ()
    """Numbers of training to show, first and last steps."""
    env: str | None = None
    """The environment, where the task's name is not that of a built-in one; its rows are files then."""
    rows_of: Callable[[Path, int], tuple[str, str]] | None = None
    """Writes these files for a seed into a directory: demonstrations, and rows to train on; for a built-in task, demonstrations to
    evaluate the start on."""


def played(task: str, room: int) -> Callable[[Path], dict[str, float]]:
    """Greedy and sampled episodes of held-out rows."""

    def measure(run: Path) -> dict[str, float]:
        found = rolecall.eval(
            model=str(run), env=task, n=HELD_OUT, samples=SAMPLES, **{"sampling.max_new_tokens": room}
        ).numbers
        return {"greedy": found["accuracy"], "sampled": found[f"avg@{SAMPLES}"]}

    return measure


def coins(run: Path) -> dict[str, float]:
    """Greedy and sampled episodes of held-out games of TextWorld."""
    more = {"sampling.max_new_tokens": 12, "agent.max_turns": textworld_games.TURNS}
    rows = textworld_games.games(held_out=True)
    found = rolecall.eval(
        model=str(run), env=textworld_games.ENV, rows=rows, n=len(rows), samples=SAMPLES, **more
    ).numbers
    return {"greedy": found["accuracy"], "sampled": found[f"avg@{SAMPLES}"]}


def coin_rows(place: Path, seed: int) -> tuple[str, str]:
    """Demonstrations of a seed, and the games to train on."""
    demonstrations = place / f"demonstrations-{seed}.jsonl"
    if not demonstrations.is_file():
        textworld_games.write(textworld_games.demonstrations(seed), demonstrations)
    return str(demonstrations), textworld_games.write(textworld_games.games(), place / "games.jsonl")


def exact(run: Path) -> dict[str, float]:
    """The strategy's value and what best responses win against it."""
    strategy = strategy_of(str(run / "model"))
    return {"exploitability": exploitability(strategy), "value": game_value(strategy)}


COMMON = {
    "samples": 8,
    "algorithm": {"epochs": 2, "aggregate": "token-mean"},
    "save": {"updates": 0, "rollouts": 0, "every": 10},
}
RIGHT = {"greedy": ".1%", "sampled": ".1%"}
PLANS = {
    "calculator": Plan(
        sft={
            "steps": 2500,
            "batch": 64,
            "optim": {"lr": 3e-3, "warmup_steps": 100, "beta2": 0.98},
            "eval": {"every": 50, "stop_at": 0.085},
        },
        rl={
            "steps": 200,
            "prompts": 8,
            "sampling": {"max_new_tokens": 24},
            "optim": {"lr": 3e-4, "warmup_steps": 3, "schedule": "cosine"},
            "algorithm": {"epochs": 1},
        },
        measure=played("calculator", 24),
        rows=RIGHT,
        rows_of=lambda place, seed: calculator_rows.write(place / "calculator"),
        counts=("agents/tool_calls",),
    ),
    "guessing": Plan(
        sft={"steps": 600, "optim": {"lr": 2e-3}},
        rl={"steps": 30, "prompts": 16, "sampling": {"max_new_tokens": 4}, "optim": {"lr": 2e-4, "warmup_steps": 3}},
        measure=played("guessing", 4),
        rows=RIGHT,
    ),
    "kuhn": Plan(
        sft={"steps": 250, "optim": {"lr": 2e-3}},
        rl={
            "steps": 40,
            "prompts": 18,
            "sampling": {"max_new_tokens": 6},
            "optim": {"lr": 2e-4, "warmup_steps": 5},
            "algorithm": {"scale": "none", "entropy_coef": 0.03},
        },
        measure=exact,
        rows={"exploitability": ".3f", "value": "+.3f"},
        counts=("agents/illegal_moves",),
    ),
    "textworld": Plan(
        sft={"steps": 150, "optim": {"lr": 2e-3}},
        rl={
            "steps": 25,
            "prompts": 8,
            "sampling": {"max_new_tokens": 12},
            "agent": {"max_turns": textworld_games.TURNS},
            "optim": {"lr": 3e-4, "warmup_steps": 3},
            "algorithm": {"epochs": 1},
        },
        measure=coins,
        rows=RIGHT,
        env=textworld_games.ENV,
        rows_of=coin_rows,
    ),
}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def settings_of(task: str, files: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """All settings of both runs of a task, by their dotted names. `files` are the rows where the task is not built in."""
    plan = PLANS[task]
    rows = {} if plan.env is None else {"rows": files[1]}
    demonstrations = {"rows": files[0] if plan.rows_of else task}
    if plan.rows_of and plan.env is None:
        demonstrations["eval.data"] = files[1]
    return {
        "sft": {"model": "tiny", **demonstrations, **flat(plan.sft)},
        "rl": {"env": plan.env or task, **rows, **flat(COMMON), **flat(plan.rl)},
    }


def made(
    out: Path, job: Callable[..., Any], settings: dict[str, Any], measure: Callable[[Path], dict[str, float]]
) -> None:
    """A run, gone on with if it was interrupted, and what is known of its model."""
    if (out / "measured.json").is_file():
        return
    began = (out / "config.json").is_file()
    begun = time.process_time()
    if not (out / "model").is_dir():
        run = job(out=str(out), resume=began, quiet=True, **({} if began else settings))
        if run.outcome.exit_code:
            raise SystemExit(f"{out}: {run.outcome.reason}; start again to go on")
    seconds = None if began else time.process_time() - begun
    (out / "measured.json").write_text(json.dumps({**measure(out), "seconds": seconds}))


def both(place: Path, task: str, seed: int) -> None:
    """A seed's start and its RL run."""
    start, end = place / f"{task}-start-{seed}", place / f"{task}-{seed}"
    rows_of = PLANS[task].rows_of
    settings = settings_of(task, ("", "") if rows_of is None else rows_of(place, seed))
    made(start, rolecall.sft, settings["sft"] | {"seed": seed}, PLANS[task].measure)
    made(end, rolecall.rl, settings["rl"] | {"seed": seed, "model": str(start)}, PLANS[task].measure)


def measured(run: Path) -> dict[str, Any]:
    """What is known of a run that is done."""
    return dict(json.loads((run / "measured.json").read_text()))


def trained(run: Path, name: str, *, last: bool) -> float:
    """The mean of a number of training over its first or last steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = [line.get(name, 0.0) for line in lines if "loss" in line]
    return statistics.mean(held[-LOOKED:] if last else held[:LOOKED])


def spread(values: list[float], form: str) -> str:
    """Mean [lowest, highest]; of one value, that one."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} [{min(values):{form}}, {max(values):{form}}]"


NAMES = {
    "greedy": "right, greedy",
    "sampled": "right, sampled",
    "exploitability": "exploitability",
    "value": "value for the first player",
    "agents/tool_calls": "calls per episode in training",
    "agents/illegal_moves": "games with an illegal word in training",
}


def commands(task: str) -> list[str]:
    """What was run, for one to type."""
    plan, lines = PLANS[task], []
    script, second = ("textworld_games", "games") if plan.env else ("calculator_rows", "calls")
    settings = settings_of(task, ("rows/demonstrations.jsonl", f"rows/{second}.jsonl"))
    if plan.rows_of is not None:
        lines.append(f"python benchmarks/{script}.py rows")
    settings["sft"]["out"], settings["rl"]["out"] = f"runs/{task}-start", f"runs/{task}"
    settings["rl"] = {"model": f"runs/{task}-start", **settings["rl"]}
    for job, held in settings.items():
        words = [f"--{name} {value}" for name, value in held.items() if not name.startswith("save.")]
        line = f"rolecall {job}"
        for word in words:
            if len(line.rpartition("\n")[2]) + len(word) > 112:
                line += " \\\n "
            line += f" {word}"
        lines.append(line)
    return lines


def rows_before(page: str, task: str) -> list[str]:
    """What a page says of a task, whose runs are elsewhere."""
    lines = page.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(f"| {task} |")]
    if not starts:
        return []
    found = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if not line.startswith(("|  |", "| |")):
            break
        found.append(line)
    return found


def page_of(place: Path, seeds: int, before: str) -> str:
    """The page, from the runs that are there; of tasks without runs, what the page said before."""
    lines = [
        "# Results: agents",
        "",
        "Written by `python benchmarks/results_agents.py`, from the runs it makes: CPU, one thread, float32. Numbers are mean",
        f"[lowest, highest] over seeds. Shares are of {HELD_OUT} held-out rows ({textworld_games.HELD_OUT} games of TextWorld), which each model plays once greedily and {SAMPLES} times at",
        f"temperature 1; numbers of training are means over the first and the last {LOOKED} steps. Times are processor time of one run.",
        "[agents.md](agents.md) says what the tasks are and how the settings were found.",
        "",
        "| task | | start | after RL | SFT | RL | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, plan in PLANS.items():
        pairs = [(place / f"{task}-start-{seed}", place / f"{task}-{seed}") for seed in range(seeds)]
        pairs = [pair for pair in pairs if all((run / "measured.json").is_file() for run in pair)]
        if not pairs:
            lines += rows_before(before, task)
            continue
        times = [[s for run in side if (s := measured(run)["seconds"])] for side in zip(*pairs, strict=True)]
        cost = [f"{statistics.mean(side):.0f} s" if side else "" for side in times] + [str(len(pairs))]
        for number, (name, form) in enumerate(plan.rows.items()):
            sides = [spread([measured(run)[name] for run in side], form) for side in zip(*pairs, strict=True)]
            lines.append(
                f"| {'' if number else task} | {NAMES[name]} | {' | '.join(sides + (['', '', ''] if number else cost))} |"
            )
        for name in plan.counts:
            sides = [spread([trained(run, name, last=last) for _, run in pairs], ".2f") for last in (False, True)]
            lines.append(f"| | {NAMES[name]} | {' | '.join(sides)} | | | |")
    for task in [task for task in PLANS if any(line.startswith(f"| {task} |") for line in lines)]:
        lines += ["", f"## {task}", "", "```bash", *commands(task), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make what is missing and write the page after every seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=list(PLANS))
    parser.add_argument("--seed", type=int, help="make this one alone")
    parser.add_argument("--place", type=Path, default=Path("runs/results-agents"))
    parser.add_argument("--page", type=Path, default=Path("docs/results-agents.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(given.seeds) if given.seed is None else [given.seed]:
        for task in [given.only] if given.only else PLANS:
            both(given.place, task, seed)
            start, end = (measured(given.place / f"{task}{side}-{seed}") for side in ("-start", ""))
            print(f"{task} seed {seed}: {start} -> {end}", flush=True)
            before = given.page.read_text() if given.page.is_file() else ""
            given.page.write_text(page_of(given.place, given.seeds, before))


if __name__ == "__main__":
    main()
