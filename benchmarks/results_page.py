"""docs/results.md, its pictures, and the last section of every page of docs/algorithms, from finished runs."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_curves import SEEDS, Curve, band, curves, save, seeds, spread, table
from results_draw import Line, chart
from results_runs import ANSWERS, DEMONSTRATIONS, HELD_OUT, LR, STEPS, Place, greedy, is_done
from results_smollm2_page import smollm2_section

from rolecall.config.rl_presets import PRESETS

LIMIT = 180.0
"""Seconds of RL in which PPO, GRPO and RLOO shall get there."""
GOAL = 0.9


def write(place: Place, docs: Path) -> list[str]:
    """Write everything that finished runs allow; returns what is missing."""
    missing: list[str] = []
    parts = [
        HEAD.format(
            machine=machine(),
            times=times(place),
            answers=ANSWERS,
            held_out=HELD_OUT,
            lr=LR,
            steps=STEPS,
            demonstrations=DEMONSTRATIONS,
        )
    ]
    for section in (presets_section, trl_section, rules_section, preferences_section, smollm2_section):
        parts += section(place, docs, missing)
    if missing:
        parts += ["## Missing", "", "Not run yet, or not finished: " + ", ".join(missing) + ".", ""]
    docs.joinpath("results.md").write_text("\n".join(parts).rstrip() + "\n")
    return missing


HEAD = """# Results

Made by `make results` (three seeds) or `make results-quick` (one), which run `benchmarks/results.py`: every number here
comes from runs that it started, and bad ones stand beside good ones. Numbers are mean [lowest, highest] over seeds.

{machine} {times}

**Task.** `sorting`: five digits to be put in order, with the task's own held-out split: {held_out} problems that no run
trains on, answered greedily. **Start.** The built-in model after SFT on {demonstrations:,} demonstrations of which every second one
sorts the wrong way round: it knows how to sort, but not which way is wanted. Every run of a seed begins there.
**Samples.** {answers} answers per step, {steps} steps, learning rate {lr:g} for the policy. Task, start, learning
rate, steps and GSPO's clip range were chosen on problems of the *training* split (`benchmarks/results.py --validation`):
`sorting:length=8` and a weaker start were tried first and learned too slowly for a comparison of minutes. The held-out
problems were asked once meanwhile, in a trial of three steps of TRL. The task is easy: what is mostly learned is which
way round to sort, so presets differ little. **Time** is what RL takes: sampling, scoring, updating; without evaluations
and checkpoints.

Of other parts: [replay](results-replay.md) (samples to 90 % with and without it, in each mode), [agents](results-agents.md) (the
built-in tasks of several turns), [multi-agent](results-marl.md) (IQL, VDN, QMIX, IPPO, MAPPO).
"""


def presets_section(place: Place, docs: Path, missing: list[str]) -> list[str]:
    """One table and one picture of all presets; and each preset's page."""
    found = {name: curves(place, "presets", name) for name in PRESETS}
    missing += missing_of("presets", found)
    found = {name: runs for name, runs in found.items() if runs}
    out = ["## Every preset on the same task and samples", ""]
    if not found:
        return [*out, "Not run yet.", ""]
    rows = []
    for name, runs in found.items():
        times = [run.time_to(GOAL) for run in runs]
        known = [t for t in times if t is not None]
        reached = f"{spread(known, '.0f')} s" if len(known) == len(runs) else f"{len(known)} of {len(runs)} seeds"
        drawn = statistics.mean(answers_of(run) for run in runs)
        each = statistics.mean(run.seconds[-1] / len(run.seconds) for run in runs)
        rows.append(
            [
                f"[{name}](algorithms/{name}.md)",
                spread([run.start for run in runs]),
                spread([run.end for run in runs]),
                spread([run.within(LIMIT) for run in runs]),
                reached,
                f"{drawn:,.0f}",
                f"{each:.2f} s",
                str(len(runs)),
            ]
        )
    head = ["preset", "start", "end", "within 3 min", "to 90 %", "answers", "a step", "seeds"]
    out += [*table(head, rows), "", "![Held-out accuracy by step](results/presets.svg)", ""]
    save(docs / "results" / "presets.svg", chart({n: band(r) for n, r in found.items()}, title=TITLE, x="steps"))
    for name, runs in found.items():
        lines = {name: band(runs)} | ({"grpo": band(found["grpo"])} if "grpo" in found and name != "grpo" else {})
        save(docs / "algorithms" / "curves" / f"{name}.svg", chart(lines, title=TITLE, x="steps"))
        measured(
            docs / "algorithms" / f"{name}.md",
            f"On `sorting`, from {spread([r.start for r in runs])} to {spread([r.end for r in runs])} held-out accuracy in "
            f"{STEPS} steps of {ANSWERS} answers, {seeds(runs)} ([all presets](../results.md)):\n\n"
            f"![Held-out accuracy by step](curves/{name}.svg)",
        )
    out += ["`answers` counts all that were sampled for training: DAPO's replacements and ReMax's greedy ones too.", ""]
    return out


TITLE = "held-out problems right, greedy answers"


def trl_section(place: Place, docs: Path, missing: list[str]) -> list[str]:
    """TRL's GRPO beside ours."""
    ours = curves(place, "presets", "grpo")
    paths = [place.root / "trl" / f"grpo-seed-{seed}" / "result.json" for seed in SEEDS]
    theirs = [json.loads(path.read_text()) for path in paths if path.is_file()]
    missing += [] if theirs else ["trl"]
    out = ["## TRL's GRPO at equal samples", ""]
    if not theirs or not ours:
        return [*out, "Not run yet.", ""]
    rows = []
    lines: dict[str, Line] = {"rolecall": band(ours)}
    steps = sorted({point["step"] for run in theirs for point in run["curve"]})
    by_step = {s: [p["accuracy"] for run in theirs for p in run["curve"] if p["step"] == s] for s in steps}
    lines["TRL 1.16"] = [(s, statistics.mean(v), min(v), max(v)) for s, v in by_step.items()]
    each = [run.seconds[-1] for run in ours]
    rows.append(["rolecall", spread([run.end for run in ours]), f"{spread(each, '.0f')} s", str(len(ours))])
    last = [run["curve"][-1]["accuracy"] for run in theirs]
    rows.append(
        ["TRL 1.16", spread(last), f"{spread([r['train_seconds'] for r in theirs], '.0f')} s", str(len(theirs))]
    )
    save(docs / "results" / "trl.svg", chart(lines, title=TITLE, x="steps"))
    out += [*table(["GRPO of", "end", "time of all steps", "seeds"], rows), "", "![Both](results/trl.svg)", ""]
    out += [
        "The same start, problems, verifier, 32 prompts x 8 answers, learning rate, warm-up and clipping of gradients; no "
        "KL. TRL runs in an environment of its own (`.venv-trl`); its models are evaluated by our evaluator. The order "
        "of the problems and the random numbers differ.",
        "",
    ]
    return out


def rules_section(place: Place, docs: Path, missing: list[str]) -> list[str]:
    """Both train rules."""
    found = {name: curves(place, "rules", name) for name in ("content+stop", "content")}
    missing += missing_of("rules", found)
    rows = []
    for name, runs in found.items():
        if runs:
            last = [run.evaluations[-1] for run in runs]
            sampled = [run.metrics[-1] for run in runs]
            rows.append(
                [
                    f"`{name}`",
                    spread([e["eval_accuracy"] for e in last]),
                    spread([e["eval_mean_length"] for e in last], ".2f"),
                    spread([e["eval_clipped_ratio"] for e in last]),
                    spread([m["completions/mean_length"] for m in sampled], ".2f"),
                    spread([m["completions/clipped_ratio"] for m in sampled]),
                    str(len(runs)),
                ]
            )
    head = ["rule", "accuracy", "length", "cut off", "sampled length", "sampled cut off", "seeds"]
    out = [
        "## Both train rules",
        "",
        "GRPO with room for 16 tokens; a right answer has 5 digits and the stop token.",
        "",
    ]
    return [*out, *(table(head, rows) if rows else ["Not run yet."]), ""]


def preferences_section(place: Place, docs: Path, missing: list[str]) -> list[str]:
    """Reward model, PPO against it, best of n, expert iteration, DPO."""
    names = ("ppo", "ppo-kl", "expert-iteration")
    found = {name: curves(place, "preferences", name) for name in names}
    others = ("reward-model", "best-of-n", "dpo")
    ready = {n: [s for s in SEEDS if is_done(place.root / "preferences" / f"{n}-seed-{s}")] for n in others}
    missing += missing_of("preferences", {**found, **ready})
    out = ["## From preferences: SFT, a reward model, and what is made of it", ""]
    if not all(found.values()) or not all(ready.values()):
        return [*out, "Not run yet.", ""]
    out += [PREFERENCES, ""]
    rows = [["SFT", spread([r.start for r in found["ppo"]]), spread([first(r) for r in found["ppo"]], ".2f"), ""]]
    labels = {
        "ppo": "PPO, no KL",
        "ppo-kl": "PPO, KL 0.2 in the reward",
        "expert-iteration": "expert iteration, 6 rounds",
    }
    for name, runs in found.items():
        best = [max(e["eval_accuracy"] for e in run.evaluations) for run in runs]
        scores = [run.evaluations[-1]["eval_train_reward"] for run in runs]
        rows.append([labels[name], spread([r.end for r in runs]), spread(scores, ".2f"), f"best {spread(best)}"])
    rows += best_of_rows(place, ready["best-of-n"])
    rows.append(dpo_row(place, ready["dpo"]))
    out += [*table(["method", "held-out right", "reward model's score", ""], rows), ""]
    for what, key, limits in (
        ("held-out problems right", "eval_accuracy", (0.0, 1.0)),
        ("reward model's score of the same answers", "eval_train_reward", (None, None)),
    ):
        lines = {labels[name]: band(found[name], key) for name in ("ppo", "ppo-kl")}
        picture = chart(lines, title=what, x="steps", low=limits[0], high=limits[1])
        save(docs / "results" / f"preferences-{key.removeprefix('eval_')}.svg", picture)
    out += [
        "![Gold](results/preferences-accuracy.svg)",
        "",
        "![Reward model](results/preferences-train_reward.svg)",
        "",
    ]
    held = [read_evaluation(place.root / "preferences" / f"reward-model-seed-{s}") for s in ready["reward-model"]]
    out += [f"The reward model ranks {spread([h['eval_accuracy'] for h in held])} of held-out pairs right.", ""]
    return out


PREFERENCES = (
    "Pairs: the right answer against wrong ones that the SFT model gave to 300 problems of the training split. The reward "
    "model trains on them; PPO, best of n and expert iteration see only its score; the verifier (held-out right) has no "
    "say. Where the score rises and the share of right answers does not, the policy pleases the reward model and not us."
)


def best_of_rows(place: Place, done: Sequence[int]) -> list[list[str]]:
    """Best of 4, 16 and 64."""
    files = [place.root / "preferences" / f"best-of-n-seed-{s}" / "best_of_n.json" for s in done]
    held = [json.loads(path.read_text()) for path in files]
    rows = []
    for k in (4, 16, 64):
        gold = [line["mean"] for h in held for line in h["judge_of_best"] if line["k"] == k]
        score = [line["mean"] for h in held for line in h["best_of"] if line["k"] == k]
        rows.append([f"best of {k}, sampled", spread(gold), spread(score, ".2f"), "unbiased estimate"])
    return rows


def dpo_row(place: Place, done: Sequence[int]) -> list[str]:
    """DPO's final model, evaluated as the others are."""
    gold, score = [], []
    for seed in done:
        path = place.root / "preferences" / f"dpo-seed-{seed}"
        table = path / "held_out.json"
        if not table.is_file():
            judge = str(place.root / "preferences" / f"reward-model-seed-{seed}")
            table.write_text(json.dumps(greedy(path, train_reward=judge)))
        held = json.loads(table.read_text())
        gold.append(held["accuracy"])
        score.append(held["train_reward"])
    return ["DPO on the same pairs", spread(gold), spread(score, ".2f"), "sees no reward model"]


# -- pieces ----------------------------------------------------------------------------------------------------------------


def read_evaluation(path: Path) -> dict[str, Any]:
    """A run's last evaluation."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_accuracy" in line][-1]


def first(run: Curve) -> float:
    """The training reward of the start's greedy answers."""
    return run.evaluations[0]["eval_train_reward"]


def answers_of(run: Curve) -> float:
    """All answers that were sampled to train on."""
    config = json.loads((run.path / "config.json").read_text())
    asked = sum(m.get("resample/prompts", config["prompts"]) for m in run.metrics)
    return asked * (config["samples"] + (config["algorithm"]["name"] == "remax"))


def missing_of(experiment: str, found: dict[str, Any]) -> list[str]:
    """Names without a finished run."""
    return [f"{experiment}/{name}" for name, runs in found.items() if not runs]


def measured(page: Path, text: str) -> None:
    """Put the text into the page's last section."""
    if page.is_file():
        before, _, _ = page.read_text().partition("\n## Measured\n")
        page.write_text(f"{before}\n## Measured\n\n{text}\n")


def machine() -> str:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"Machine: {name}, {os.cpu_count()} cores, Python {platform.python_version()}."


def times(place: Place) -> str:
    """How long the experiments took, as far as this script ran them."""
    path = place.root / "seconds.json"
    if not path.is_file():
        return ""
    held = json.loads(path.read_text())
    each = ", ".join(f"{name} {seconds / 60:.0f}" for name, seconds in held.items())
    return f"Minutes: {each}; in all {sum(held.values()) / 60:.0f}."
