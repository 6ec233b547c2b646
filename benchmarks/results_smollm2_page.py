"""The section of docs/results.md about SmolLM2."""

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import results_smollm2 as smollm2
from results_curves import Curve, band, curves, save, seeds, spread, table
from results_draw import Line, chart
from results_runs import Place


def smollm2_section(place: Place, docs: Path, missing: list[str]) -> list[str]:
    """The survey, the commands, the curve."""
    folder = place.root / "smollm2"
    runs = curves(place, "smollm2", "rl")
    out = ["## SmolLM2-135M-Instruct on reasoning-gym", ""]
    if not (folder / "survey.json").is_file() or not runs:
        missing.append("smollm2")
        return [*out, "Not run yet.", ""]
    survey = json.loads((folder / "survey.json").read_text())
    shown = smollm2.SFT["steps"] * smollm2.SFT["batch"]
    out += [
        f"As it comes the model talks instead of answering. After SFT on {shown} demonstrations, each seen once, on "
        f"{smollm2.PROBLEMS} problems of the training split of each task\n(`pass@8`: one of 8 sampled answers is right):",
        "",
    ]
    rows = [
        [
            f"`{name}`",
            *(f"{found[key]:.0%}" for key in ("accuracy", "avg@8", "pass@8")),
            "chosen" if name == smollm2.CHOSEN else "",
        ]
        for name, found in survey.items()
    ]
    out += [*table(["task", "right, greedy", "right, sampled", "pass@8", ""], rows), ""]
    line = {"held-out problems right, greedy": band(runs), "mean reward of the step's answers, sampled": rewards(runs)}
    save(docs / "results" / "smollm2.svg", chart(line, title=f"GRPO on {smollm2.CHOSEN.split(':')[1]}", x="steps"))
    gains = [run.end - run.start for run in runs]
    out += [
        f"GRPO from there, {seeds(runs)}: from **{spread([r.start for r in runs])}** to "
        f"**{spread([r.end for r in runs])}** of {smollm2.HELD_OUT} held-out problems, greedily "
        f"({100 * statistics.mean(gains):+.1f} points), in {len(runs[0].seconds)} steps of "
        f"{smollm2.RL['prompts']} prompts x {smollm2.RL['samples']} answers and "
        f"{spread([r.seconds[-1] / 60 for r in runs], '.0f')} minutes without evaluations (a step takes "
        f"{spread([statistics.median(steps_of(r)) for r in runs], '.0f')} s in the median).",
        "",
        *table(["step", *(str(e["step"]) for e in runs[0].evaluations)], curve_rows(runs)),
        "",
        "![Held-out accuracy and reward by step](results/smollm2.svg)",
        "",
        smollm2.CHOICE,
        "",
        "The same by hand:",
        "",
        "```bash",
        *smollm2.commands(),
        "```",
        "",
    ]
    return out


def rewards(runs: Sequence[Curve]) -> Line:
    """Mean, lowest and highest training reward by step."""
    by_step = zip(*([m["reward"] for m in run.metrics] for run in runs), strict=False)
    return [(float(step), statistics.mean(v), min(v), max(v)) for step, v in enumerate(by_step, start=1)]


def curve_rows(runs: Sequence[Curve]) -> list[list[str]]:
    """Held-out accuracy by step, a row per run."""
    return [[f"seed {seed_of(run)}", *(f"{e['eval_accuracy']:.1%}" for e in run.evaluations)] for run in runs]


def steps_of(run: Curve) -> list[float]:
    """Seconds of each step."""
    return [after - before for before, after in itertools.pairwise([0.0, *run.seconds])]


def seed_of(run: Curve) -> int:
    """A run's seed."""
    seed: int = json.loads((run.path / "config.json").read_text())["seed"]
    return seed
