"""The report of a run, or of a demo's runs, as one page."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.look.charts import ACCURACY, PAIRS, Chart, charts, four_digits, is_number, mean_of
from rolecall.look.curves import curve_cards
from rolecall.look.doctor.audit import findings_of
from rolecall.look.doctor.marks import findings_table, marked
from rolecall.look.page import Data, Section, facts, page, table, text
from rolecall.look.records import rollouts_view
from rolecall.look.run import (
    RunFiles,
    check_directory,
    check_format,
    command_line,
    flat,
    is_demo,
    near,
    read_object,
    read_run,
    setting_text,
)

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_SHOWN_STEPS = 2
"""Steps whose rollouts a report of one run shows: the last, and the first that is kept."""


def report_html(path: Path) -> str:
    """The page of the run, or of the demo, in this directory."""
    check_directory(path)
    return _demo_page(path) if is_demo(path) else _run_page(read_run(path))


def curves_of(path: Path) -> dict[str, list[Chart]]:
    """The curves of the run in this directory, or of each run of a demo, by the folder to put them in."""
    check_directory(path)
    names = _demo_runs(path) if is_demo(path) else [""]
    found = {name: read_run(path / name) for name in names}
    return {name: charts(run.steps, run.evaluations, run.timing)[0] for name, run in found.items()}


def _run_page(run: RunFiles) -> str:
    sections, data = _run_sections(run)
    return page(title=run.path.resolve().name, lead=lead_of(run), sections=sections, data=data)


def _demo_page(path: Path) -> str:
    about = read_object(path / "demo.json")
    check_format(path, about)
    sections = [Section(id="demo", title="Before and after", body=_demo_table(about))]
    data: list[Data] = []
    for name in _demo_runs(path):
        run = read_run(path / name)
        inside, drawn_from = _run_sections(run, prefix=f"{name}-", level=2, shown_steps=1)
        sections += [Section(id=name, title=name.replace("-", " "), body=lead_of(run)), *inside]
        data += drawn_from
    lead = (
        '<p class="lead">The whole pipeline on the built-in model: imitation, a reward model, then PPO against that '
        "reward model and GRPO against an exact verifier, both from the same start.</p>"
    )
    return page(title="rolecall demo", lead=lead, sections=sections, data=data)


def _demo_runs(path: Path) -> list[str]:
    """The folders of a demo's runs. Only names that lie right inside it, whatever the file says."""
    names = read_object(path / "demo.json").get("runs")
    if not isinstance(names, list) or not all(isinstance(n, str) and _NAME.fullmatch(n) for n in names):
        raise UserError(f"{path / 'demo.json'} does not name the demo's runs; bring back a whole copy of it")
    return names


def _demo_table(about: Mapping[str, Any]) -> str:
    """The policies side by side, and their answers to problems that the first got wrong."""
    stages = [stage for stage in about.get("stages", []) if isinstance(stage, dict)]
    names = [name for name in ("accuracy", "avg@4") if any(name in s.get("numbers", {}) for s in stages)]
    titles = {"accuracy": "greedy", "avg@4": "sampled"}
    rows = [
        (
            stage.get("name", "?"),
            stage.get("learns_from", ""),
            *(_share(stage.get("numbers", {}).get(name)) for name in names),
            f"{stage.get('seconds', 0):.0f} s",
        )
        for stage in stages
    ]
    caption = f"Right answers to {about.get('rows', '?')} held-out {about.get('task', '')} problems"
    shown = table(["run", "learns from", *(titles[n] for n in names), "time"], rows, numbers=2, caption=caption)
    answers = [row for row in about.get("answers", []) if isinstance(row, dict)]
    if not answers:
        return shown
    head = ["prompt", *(str(stage.get("name")) for stage in stages), "right answer"]
    lines = [(row.get("prompt"), *row.get("answers", []), row.get("gold")) for row in answers]
    beside = table(head, lines, caption="Answers to problems that the start got wrong")
    return f'<div class="tables">{shown}{beside}</div>'


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if is_number(value) else "–"


def _run_sections(
    run: RunFiles, *, prefix: str = "", level: int = 1, shown_steps: int = _SHOWN_STEPS
) -> tuple[list[Section], list[Data]]:
    """The sections of one run and the data they need. `prefix` keeps ids apart where a page has several runs."""

    def section(name: str, title: str, body: str) -> Section:
        return Section(id=f"{prefix}{name}", title=title, body=body, level=level)

    main, rest = run_charts(run)
    found = findings_of(run)
    cards, data = curve_cards(f"{prefix}curves", marked(main, found), always=1)
    more, more_data = curve_cards(f"{prefix}more", rest)
    if rest:
        cards += f"<details><summary>All other numbers ({len(rest)})</summary>{more}</details>"
    tokens, token_data = rollouts_view(run, name=f"{prefix}view", shown_steps=shown_steps)
    inside = level > 1
    ran = what_ran(run)
    if inside:  # a page of several runs has one evaluation for all, at its top
        ran = f"<details><summary>Command, versions and settings</summary>{ran}</details>"
    sections = [
        section("before-after", "Before and after", before_after(run, held_out=not inside)),
        *([section("doctor", "What looks wrong", findings_table(found))] if found else []),
        section("curves", "Curves", cards),
        *(
            [section("tokens", "Step by step" if run.command == "marl" else "Token by token", tokens)]
            if token_data or not inside
            else []
        ),
        section("ran", "What ran", ran),
    ]
    return sections, [data, more_data, *token_data]


def run_charts(run: RunFiles) -> tuple[list[Chart], list[Chart]]:
    """The curves of a run that everybody wants, and one for each other number."""
    main, rest = charts(run.steps, run.evaluations, run.timing, pairs=run.command in PAIRS)
    if run.config.get("samples") == 1:  # one answer is always like itself
        main = [chart for chart in main if chart.name != "flat-groups"]
    return main, rest


def lead_of(run: RunFiles) -> str:
    """What ran and how far, in a sentence."""
    wanted = run.config.get("steps")
    of = f" of {wanted}" if isinstance(wanted, int) and wanted != run.last_step else ""
    state = ", and a process still works on it" if run.locked and of else ""
    what = {
        "sft": "Supervised fine-tuning",
        "rm": "Training of a reward model",
        "rl": "Reinforcement learning",
        "marl": "Multi-agent reinforcement learning",
    }.get(run.command, run.command)
    algorithm = run.config.get("algorithm")
    chosen = algorithm.get("name") if isinstance(algorithm, dict) else run.config.get("algo")
    name = f" ({chosen})" if chosen else ""
    sources = [
        f"{key} {near(run.config[key])}" for key in ("model", "rows", "env") if isinstance(run.config.get(key), str)
    ]
    line = f"{what}{name} with {', '.join(sources)}" if sources else f"{what}{name}"
    return f'<p class="lead"><b>{text(line)}</b>: {run.last_step}{of} steps{state}, seed {text(run.about.get("seed"))}.</p>'


# -- before and after ------------------------------------------------------------------------------------------------


def before_after(run: RunFiles, *, held_out: bool) -> str:
    """Evaluations and the run's own numbers, first and last. `held_out` says so if there are no evaluations."""
    parts = []
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        names = [name for name in last if name.startswith("eval_") and is_number(last[name])]
        rows: list[tuple[str, ...]]
        caption = "Evaluation episodes" if run.command == "marl" else "On rows that are not trained on"
        if len(run.evaluations) > 1:
            head = ["evaluation", f"step {first['step']}", f"step {last['step']}", "change"]
            rows = [(n.removeprefix("eval_"), *_pair(first.get(n), last[n])) for n in names]
        else:
            head = ["evaluation", f"step {last['step']}"]
            rows = [(n.removeprefix("eval_"), four_digits(last[n])) for n in names]
        shown = table(head, rows, numbers=1, caption=caption)
        if "eval_accuracy" in names and run.command not in PAIRS:
            shown += f'<p class="note">accuracy: {ACCURACY}</p>'
        parts.append(f"<div>{shown}</div>")
    elif held_out:
        parts.append(
            '<p class="note">No evaluation was made on held-out rows; <code>eval.every</code> turns it on.</p>'
        )
    if len(run.steps) > 1:
        few = max(1, len(run.steps) // 10)
        names = [name for name in _TRAINED if any(is_number(line.get(name)) for line in run.steps)]
        if "loss" in names and {"reward", "return"} & set(names):  # then it says nothing of how good the policy is
            names.remove("loss")
        rows = [(_TRAINED[n], *_pair(mean_of(run.steps[:few], n), mean_of(run.steps[-few:], n))) for n in names]
        word = "step" if few == 1 else f"{few} steps"
        head = ["while training", f"first {word}", f"last {word}", "change"]
        parts.append(table(head, rows, numbers=1, caption="Means over the steps' own batches"))
    return f'<div class="tables">{"".join(parts)}</div>'


_TRAINED = {
    "reward": "reward",
    "return": "return",
    "loss": "loss",
    "accuracy": "right pairs",
    "completions/mean_length": "answer length",
    "episode_length": "episode length",
    "completions/clipped_ratio": "cut off",
    "entropy": "entropy",
    "kl": "KL to the reference",
}
"""What the table of training compares, and what it calls it."""


def _pair(before: Any, after: Any) -> tuple[str, str, str]:
    if not is_number(before) or not is_number(after):
        return four_digits(before), four_digits(after), ""
    return four_digits(before), four_digits(after), f"{after - before:+.3g}" if after != before else "0"


# -- what ran --------------------------------------------------------------------------------------------------------


def what_ran(run: RunFiles) -> str:
    """The command, versions and all settings."""
    about = run.about
    versions = dict(about["versions"]) if isinstance(about.get("versions"), dict) else {}
    shown: dict[str, Any] = {
        "command": command_line(run),
        "directory": run.path,
        "seed": about.get("seed"),
        "threads": about.get("threads"),
        "processes": about.get("processes", 1),
        "python": about.get("python"),
        **versions,
    }
    for again in about.get("resumed", []):
        if isinstance(again, dict):
            exact = "bit for bit" if again.get("bit_exact") else "with settings changed"
            shown[f"resumed at step {again.get('step')}"] = exact
    settings = facts({name: setting_text(value) for name, value in flat(run.config)})
    return facts(shown, wide=True) + f"<details><summary>All settings</summary>{settings}</details>"
