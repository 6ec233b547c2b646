"""What agents learn, over five seeds: writes docs/results-marl.md from the runs themselves.

    python benchmarks/results_marl.py            all tasks; a run that is done is not run again, a broken one goes on
    python benchmarks/results_marl.py --quick    one seed
    python benchmarks/results_marl.py --page     only write the page from what is there
    python benchmarks/results_marl.py --judge    judge the agents of finished runs again
    python benchmarks/results_marl.py --only climbing

One process, one thread. Seeds go round: every task gets its first seed before any gets its second. The return of a run is
that of fresh episodes played by the final agents, with seeds that no training or evaluation used. Needs rolecall[marl],
and rolecall[plot] for the curves.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import rolecall
from rolecall.marl.acting import Actor, How
from rolecall.marl.envs import open_envs
from rolecall.marl.nets import load_agents
from rolecall.marl.runner import Runner

SEEDS = 5
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results-marl.md"
CURVES = ROOT / "docs" / "marl-speaker-listener.svg"
ALGOS = ("iql", "vdn", "qmix", "ippo", "mappo")
Q, PPO = ("iql", "vdn", "qmix"), ("ippo", "mappo")


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, who plays it, and how long."""

    title: str
    env: str
    algos: tuple[str, ...]
    settings: dict[str, Any]
    goal: float | None
    """The return that counts as solved."""
    best: str
    """What there is to get."""
    fresh: int = 256
    """Episodes the final agents are judged by."""
    more: dict[str, Any] = field(default_factory=dict)
    """Settings in which the algorithms differ, by "q" or "ppo", and then by name."""

    def command(self, algo: str, seed: int | str) -> str:
        """The same on the command line."""
        flags = "".join(f" --{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in self.of(algo).items())
        return f"rolecall marl --env {self.env} --algo {algo} --seed {seed}{flags}"

    def temperature(self, algo: str) -> float:
        """Of the final agents' choices when they are judged, as in the run's own evaluations; 0 takes the best."""
        given = self.of(algo)
        return float(not given.get("eval.greedy")) if algo in PPO else float(given.get("eval.temperature", 0.0))

    def how(self, algo: str) -> How:
        return "sample" if self.temperature(algo) else "greedy"

    def of(self, algo: str) -> dict[str, Any]:
        kind = "ppo" if algo in PPO else "q"
        return {**self.settings, **self.more.get(kind, {}), **self.more.get(algo, {})}


LBF = {"eval.every": 25, "eval.episodes": 128, "optim.schedule": "linear"}
PPO_LBF = {"agent.hidden": 128, "optim.lr": 1e-3, "ppo.gamma": 0.97, "ppo.minibatches": 8, "ppo.entropy_end": 0.0}
"""Many small optimiser steps, and less and less chance in what agents do."""
REMEMBERS = {"agent.recurrent": True, "agent.last_action": True, "agent.hidden": 64}
"""Who sees two cells far must remember where it has been: a GRU that is told its last move."""
Q_LBF = {
    "agent.hidden": 128,
    "optim.lr": 1e-3,
    "q.gamma": 0.85,
    "q.batch": 8,
    "q.updates": 32,
    "q.epsilon_steps": 150_000,
    "q.epsilon_spread": 0.5,
}
"""A small discount: what a wasted step costs must be more than the error of a value. Some environments go on exploring:
agents that find the first piece of food and then hardly try anything new may stay without the second."""
SMALL = {"steps": 150, "q.buffer": 500, "q.updates": 4, "q.epsilon_steps": 40_000}
"""Q-learning of a matrix game needs less of everything."""
GAME = {"eval.every": 50, "eval.greedy": True}
TASKS = (
    Task(
        title="Climbing",
        env="climbing",
        algos=ALGOS,
        settings=GAME,
        more={
            "ppo": {"steps": 160, "ppo.entropy_coef": 0.1, "ppo.entropy_end": 0.0},
            "q": {**SMALL, "steps": 400, "q.epsilon_steps": 100_000, "optim.schedule": "linear"},
        },
        goal=175,
        best="275 together, 175 without luck, 125 is the safe trap",
    ),
    *(
        Task(
            title=f"Penalty, k = {k}",
            env=f"penalty:{k}",
            algos=ALGOS,
            settings=GAME,
            more={"ppo": {"steps": 120}, "q": SMALL},
            goal=250 if k == 0 else 50,
            best="250" if k == 0 else "250 for the two risky agreements, 50 for the safe one",
        )
        for k in (0, -100)
    ),
    Task(
        title="LBF 8x8-2p-2f-coop",
        fresh=2048,
        env="lbf:8x8-2p-2f-coop",
        algos=("mappo", "ippo", "vdn", "qmix"),
        settings={**LBF, "eval.stop_at": 0.975},
        more={
            "ppo": {"steps": 400, **PPO_LBF},
            "q": Q_LBF,
            "vdn": {"steps": 900, "eval.temperature": 0.1},
            "qmix": {"steps": 500, "eval.temperature": 0.02},
        },
        goal=0.95,
        best="1",
    ),
    Task(
        title="LBF 8x8-2p-2f-2s-coop",
        fresh=2048,
        env="lbf:8x8-2p-2f-2s-coop",
        algos=("mappo", "ippo"),
        settings={**LBF, **PPO_LBF, "steps": 400, "ppo.minibatches": 4, **REMEMBERS},
        goal=0.95,
        best="1; agents see two cells far",
    ),
    Task(
        title="MPE speaker-listener",
        env="mpe:speaker-listener",
        algos=("mappo", "ippo", "vdn", "qmix"),
        settings={"steps": 250, "eval.every": 25, "eval.episodes": 64},
        goal=None,
        best="0, never reached: the listener has a way to go",
    ),
)


def place(runs: Path, task: Task, algo: str, seed: int) -> Path:
    return runs / f"{task.env.replace(':', '-')}-{algo}-{seed}"


def played(task: Task, algo: str, seed: int, out: Path) -> None:
    """One run, or the rest of one, and its summary in `result.json`."""
    done = out / "result.json"
    if done.is_file():
        return
    resume = (out / "config.json").is_file()
    spent = (
        json.loads((out / "spent.json").read_text()) if (out / "spent.json").is_file() else {"cpu": 0.0, "wall": 0.0}
    )
    cpu, wall = time.process_time(), time.perf_counter()
    settings = (
        {"out": str(out), "resume": True} if resume else {"env": task.env, "algo": algo, "seed": seed, "out": str(out)}
    )
    try:
        run = rolecall.marl(**settings, **({} if resume else task.of(algo)), quiet=True)
    finally:
        if out.is_dir():
            spent = {
                "cpu": spent["cpu"] + time.process_time() - cpu,
                "wall": spent["wall"] + time.perf_counter() - wall,
            }
            (out / "spent.json").write_text(json.dumps(spent))
    if run.outcome.exit_code != 0:
        raise SystemExit(int(run.outcome.exit_code))
    last = next(line for line in reversed(run.metrics) if "env_steps" in line)
    result = {
        **fresh(task, out, seed, temperature=task.temperature(algo) or 1.0),
        "env_steps": last["env_steps"],
        "step": last["step"],
        **spent,
        "torch": torch.__version__,
    }
    done.write_text(json.dumps(result))
    print(
        f"{task.title}, {algo}, seed {seed}: {result[task.how(algo)]:.3f} (likeliest {result['greedy']:.3f}) in "
        f"{spent['cpu']:.0f} s CPU, {spent['wall']:.0f} s",
        flush=True,
    )


def fresh(task: Task, out: Path, seed: int, *, temperature: float) -> dict[str, float]:
    """Mean return of fresh episodes when agents draw, do what they think best, or that but for 5 % random choices."""
    agents, _ = load_agents(out / "model")
    envs = open_envs(task.env, task.fresh)
    runner = Runner(envs, rewards="team", seed=10_000 + seed)
    ways: tuple[How, ...] = ("sample", "greedy", "epsilon")
    found = {
        how: runner.run(Actor(agents, how=how, epsilon=0.05, temperature=temperature), phase=9, step=0).episodes
        for how in ways
    }
    envs.close()
    return {how: float(episodes.returns().mean()) for how, episodes in found.items()}


def judged_again(task: Task, algo: str, seed: int, out: Path) -> None:
    """The same for a run that is finished."""
    path = out / "result.json"
    if path.is_file():
        result = json.loads(path.read_text())
        result |= fresh(task, out, seed, temperature=task.temperature(algo) or 1.0)
        path.write_text(json.dumps(result))
        print(
            f"{task.title}, {algo}, seed {seed}: {result[task.how(algo)]:.3f} (likeliest {result['greedy']:.3f})",
            flush=True,
        )


def results(runs: Path, task: Task, algo: str) -> dict[int, dict[str, Any]]:
    found = {}
    for seed in range(SEEDS):
        path = place(runs, task, algo, seed) / "result.json"
        if path.is_file():
            found[seed] = json.loads(path.read_text())
    return found


def table(runs: Path, task: Task) -> list[str]:
    lines = [
        "| algorithm | seeds | return of each | mean | reached | likeliest | with 5 % random | environment steps | CPU s | wall s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for algo in task.algos:
        found = results(runs, task, algo)
        if not found:
            lines.append(f"| {algo} | 0 | not run yet | | | | | | | |")
            continue
        returns = [r[task.how(algo)] for r in found.values()]
        greedy, noisy = (statistics.mean(r[how] for r in found.values()) for how in ("greedy", "epsilon"))
        digits = 3 if abs(max(returns, key=abs)) < 10 else 1
        reached = "" if task.goal is None else f"{sum(r >= task.goal - 1e-6 for r in returns)} of {len(returns)}"

        def middle(key: str, found: dict[int, dict[str, Any]] = found) -> str:
            numbers = [r[key] for r in found.values()]
            return f"{statistics.median(numbers):,.0f} (to {max(numbers):,.0f})"

        lines.append(
            f"| {algo} | {len(found)} | {', '.join(f'{r:.{digits}f}' for r in returns)} | {statistics.mean(returns):.{digits}f} "
            f"| {reached} | {greedy:.{digits}f} | {noisy:.{digits}f} | {middle('env_steps')} | {middle('cpu')} | {middle('wall')} |"
        )
    return lines


def curves(runs: Path, task: Task) -> bool:
    """Evaluation returns against environment steps: the mean over seeds, and their range."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    if not any(results(runs, task, algo) for algo in task.algos):
        return False
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for algo in task.algos:
        series = []
        for seed in results(runs, task, algo):
            path = place(runs, task, algo, seed) / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            series.append({line["step"]: line["eval_return"] for line in lines if "eval_return" in line})
        if not series:
            continue
        steps = sorted(set.intersection(*(set(s) for s in series)))
        at = [step * 32 * 25 for step in steps]  # every episode has 25 steps
        columns = [[s[step] for s in series] for step in steps]
        (line,) = axes.plot(at, [statistics.mean(c) for c in columns], label=f"{algo} ({len(series)})")
        axes.fill_between(at, [min(c) for c in columns], [max(c) for c in columns], alpha=0.15, color=line.get_color())
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return of evaluation episodes")
    axes.legend(frameon=False, title="algorithm (seeds)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(CURVES, metadata={"Date": None})
    plt.close(figure)
    return True


def page(runs: Path) -> None:
    """The results page from the runs that are there."""
    count = sum(len(results(runs, task, algo)) for task in TASKS for algo in task.algos)
    whole = SEEDS * sum(len(task.algos) for task in TASKS)
    text = [
        "# What agents learn",
        "",
        f"Written by `python benchmarks/results_marl.py` from {count} of {whole} runs (five seeds each, one process, one",
        "thread). The return of a run is the mean over 256 fresh episodes of the final agents, in foraging over 2,048: a run",
        "there ends at a good evaluation, and few episodes would flatter it. Their seeds are in neither training nor evaluation.",
        "",
        "Q-learners take the action that they think best, PPO's agents in matrix games too. In foraging Q-learners draw from",
        "softmax(Q / temperature), and PPO's agents elsewhere from their policy, as they do in training: two that stand in each",
        "other's way, or wait for each other at different places, and always do the same never get apart. *Reached* counts the",
        "seeds that got the goal. The two columns behind it are the means over seeds when agents always take the likeliest (or",
        "best) action, and when 5 % of these are random.",
        "",
        "Times are medians, the largest behind them; the machine was shared, and some runs were halted for minutes in favour",
        "of other work, so CPU seconds say more than the wall's clock. Settings of foraging, temperatures among them, were",
        "chosen on the first three seeds, those of climbing after a look at all five.",
        "",
    ]
    for task in TASKS:
        goal = "" if task.goal is None else f" The goal is {task.goal:g}."
        text += [f"## {task.title}", "", f"To be had: {task.best}.{goal}", "", *table(runs, task), ""]
        if task.env.startswith("mpe") and curves(runs, task):
            text += ["Mean over seeds, and the range:", "", f"![Returns by environment steps]({CURVES.name})", ""]
        # One command for algorithms that differ in nothing else.
        commands = {str(task.of(algo)): task.command(algo, 0) for algo in reversed(task.algos)}
        text += ["```bash", *reversed(commands.values()), "```", ""]
    PAGE.write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/results-marl"))
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--judge", action="store_true", help="only judge finished runs again, and write the page")
    parser.add_argument("--only", default="", help="tasks whose environment contains this")
    parser.add_argument("--algos", nargs="+", default=ALGOS, choices=ALGOS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.page:
        given.runs.mkdir(parents=True, exist_ok=True)
        for seed in range(1 if given.quick else SEEDS):
            for task in TASKS:
                for algo in [a for a in task.algos if a in given.algos and given.only in task.env]:
                    (judged_again if given.judge else played)(task, algo, seed, place(given.runs, task, algo, seed))
                    page(given.runs)
    page(given.runs)


if __name__ == "__main__":
    main()
