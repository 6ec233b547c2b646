"""The report of a run, or of a demo's runs, as one page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.look.charts import charts
from rolecall.look.curves import curve_cards
from rolecall.look.losses import LossCheck, check_loss
from rolecall.look.page import Data, Section, facts, page, table, text
from rolecall.look.records import read_step, samples
from rolecall.look.run import RunFiles, check_directory, is_demo, read_object, read_run
from rolecall.look.tokens import SampleSet, token_view

_SHOWN_STEPS = 2
"""Steps whose rollouts a report of one run shows: the last, and the first that is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Sections of a page and the data they need."""

    sections: list[Section]
    data: list[Data]


def report_html(path: Path) -> str:
    """The page of the run, or of the demo, in this directory."""
    check_directory(path)
    return _demo_page(path) if is_demo(path) else _run_page(read_run(path))


def _run_page(run: RunFiles) -> str:
    parts = run_parts(run)
    return page(title=f"{run.path.resolve().name}", lead=_lead(run), sections=parts.sections, data=parts.data)


def run_parts(run: RunFiles, *, prefix: str = "", level: int = 1, shown_steps: int = _SHOWN_STEPS) -> Parts:
    """The sections of one run. `prefix` keeps ids apart where a page has several runs."""

    def section(name: str, title: str, body: str) -> Section:
        return Section(id=f"{prefix}{name}", title=title, body=body, level=level)

    main, rest = charts(run.steps, run.evaluations, run.timing)
    cards, data = curve_cards(f"{prefix}curves", main)
    more, more_data = curve_cards(f"{prefix}more", rest)
    if rest:
        cards += f"<details><summary>All other numbers ({len(rest)})</summary>{more}</details>"
    tokens, token_data = _tokens(run, prefix, shown_steps)
    sections = [
        section("before-after", "Before and after", _before_after(run)),
        section("curves", "Curves", cards),
        section("tokens", "Token by token", tokens),
        section("ran", "What ran", _what_ran(run)),
    ]
    return Parts(sections=sections, data=[data, more_data, *token_data])


def _lead(run: RunFiles) -> str:
    wanted = run.config.get("steps")
    of = f" of {wanted}" if isinstance(wanted, int) and wanted != run.last_step else ""
    state = ", and a process still works on it" if run.locked and of else ""
    what = {
        "sft": "Supervised fine-tuning",
        "rm": "Training of a reward model",
        "rl": "Reinforcement learning",
    }.get(run.command, run.command)
    algorithm = run.config.get("algorithm")
    name = f" ({algorithm['name']})" if isinstance(algorithm, dict) and "name" in algorithm else ""
    sources = [f"{key} {run.config[key]}" for key in ("model", "rows") if isinstance(run.config.get(key), str)]
    line = f"{what}{name} with {', '.join(sources)}" if sources else f"{what}{name}"
    return f'<p class="lead"><b>{text(line)}</b>: {run.last_step}{of} steps{state}, seed {text(run.about.get("seed"))}.</p>'


# -- before and after ------------------------------------------------------------------------------------------------


def _before_after(run: RunFiles) -> str:
    parts = []
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        names = [name for name in last if name.startswith("eval_") and _is_number(last[name])]
        rows: list[tuple[str, ...]]
        if len(run.evaluations) > 1:
            head = ["held-out rows", f"step {first['step']}", f"step {last['step']}", "change"]
            rows = [(n.removeprefix("eval_"), *_pair(first.get(n), last[n])) for n in names]
        else:
            head = ["held-out rows", f"step {last['step']}"]
            rows = [(n.removeprefix("eval_"), _told(last[n])) for n in names]
        parts.append(
            table(head, rows, numbers=1, caption="Evaluations: greedy answers to rows that are not trained on")
        )
    else:
        parts.append(
            '<p class="note">No evaluation was made on held-out rows; <code>eval.every</code> turns it on.</p>'
        )
    if len(run.steps) > 1:
        few = max(1, len(run.steps) // 10)
        names = [name for name in _TRAINED if any(_is_number(line.get(name)) for line in run.steps)]
        if "reward" in names:  # with rewards, the loss says nothing about how good the policy is
            names.remove("loss")
        rows = [(_TRAINED[n], *_pair(_mean(run.steps[:few], n), _mean(run.steps[-few:], n))) for n in names]
        word = "step" if few == 1 else f"{few} steps"
        head = ["while training", f"first {word}", f"last {word}", "change"]
        parts.append(table(head, rows, numbers=1, caption="Means over the steps' own batches"))
    return f'<div class="tables">{"".join(parts)}</div>'


_TRAINED = {
    "reward": "reward",
    "loss": "loss",
    "accuracy": "right pairs",
    "completions/mean_length": "answer length",
    "completions/clipped_ratio": "cut off",
    "entropy": "entropy",
    "kl": "KL to the reference",
}
"""What the table of training compares, and what it calls it."""


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    held = [float(line[name]) for line in lines if _is_number(line.get(name))]
    return sum(held) / len(held) if held else None


def _pair(before: Any, after: Any) -> tuple[str, str, str]:
    if not _is_number(before) or not _is_number(after):
        return _told(before), _told(after), ""
    return _told(before), _told(after), f"{after - before:+.3g}" if after != before else "0"


# -- token by token --------------------------------------------------------------------------------------------------


def _tokens(run: RunFiles, prefix: str, shown_steps: int) -> tuple[str, list[Data]]:
    steps = _steps_to_show(run, shown_steps)
    if not steps:
        if run.command in ("sft", "rm"):
            return f'<p class="note">A run of {text(run.command)} samples nothing, so it records no rollouts.</p>', []
        why = "<code>save.rollouts</code> says how many steps stay, and every 50th stays in any case"
        return f'<p class="note">This run has no rollouts in its directory: {why}.</p>', []
    algorithm = run.config.get("algorithm")
    options: Mapping[str, Any] = algorithm if isinstance(algorithm, dict) else {}
    clip = None
    if options.get("name") in ("grpo", "ppo") and _is_number(options.get("clip_low")):
        clip = (1 - float(options["clip_low"]), 1 + float(options["clip_high"]))
    sets = []
    for step in steps:
        record = read_step(step, run.rollouts[step], run.updates.get(step))
        chosen, left = samples(record, clip=clip, kl_kind=str(options.get("kl_kind", "k1")), unit="token")
        note = ""
        if record.updates is not None:
            logged = next((line.get("loss") for line in run.steps if line["step"] == step), None)
            note = loss_note(check_loss(record.updates, step=step, logged=logged), run.about)
        else:
            note = '<p class="note">What the optimiser did in this step is not kept, so there are no ratios and contributions; <code>save.updates</code> says how many steps stay.</p>'
        if left:
            note += f'<p class="note">{left} more answers of these groups are left out to keep the page small.</p>'
        if any(sample.pieces is None for sample in chosen):
            note += '<p class="note">This record does not say what tokens write, so boxes show ids.</p>'
        sets.append(SampleSet(label=f"step {step}", samples=chosen, note=note, clip=clip))
    view = token_view(f"{prefix}view", sets)
    about = '<p class="note">Every token of some answers, coloured by a number of your choice. A solid line below a token says that it trains.</p>'
    return about + view.html, [view.data]


def _steps_to_show(run: RunFiles, most: int) -> list[int]:
    """The last step with all its records, then the first."""
    full = [step for step in run.rollouts if step in run.updates]
    last = full[-1:] or list(run.rollouts)[-1:]
    first = [step for step in list(run.rollouts)[:1] if step not in last]
    return [*last, *first][:most]


def loss_note(check: LossCheck, about: Mapping[str, Any]) -> str:
    """The sums of contributions, an optimiser step a line, and the comparison with the metrics."""
    terms = list(dict.fromkeys(term for made in check.minibatches for term in made.terms))
    many = len(terms) > 1
    head = ["optimiser step", "answers", "trained tokens", *([*terms] if many else []), "sum of contributions"]
    rows = [
        (
            f"epoch {m.epoch + 1}, mini-batch {m.minibatch + 1}",
            m.answers,
            m.trained,
            *([_exact(m.terms.get(term)) for term in terms] if many else []),
            _exact(m.total) if m.terms else "nothing trained",
        )
        for m in check.minibatches
    ]
    shown = table(head, rows, numbers=1, caption="Contributions of all answers of the step, coefficients included")
    made = [m for m in check.minibatches if m.terms]
    if len(made) > 6:
        shown = f"<details><summary>{len(made)} optimiser steps</summary>{shown}</details>"
    return f"<h3>Where the loss of step {check.step} comes from</h3>{shown}{_verdict(check, len(made), about)}"


def _verdict(check: LossCheck, made: int, about: Mapping[str, Any]) -> str:
    if check.mean is None:
        return '<p class="note">Nothing trained in this step, so there is no loss.</p>'
    how = (
        "The contributions add up to"
        if made == 1
        else f"The mean of the {made} sums, which is what the metrics log, is"
    )
    sum_ = f'<b class="contribution-sum">{_exact(check.mean)}</b>'
    if check.difference is None:
        return f"<p>{how} {sum_}. The metrics have no loss for this step to compare with.</p>"
    logged = f'<code>loss</code> in metrics.jsonl is <b class="logged-loss">{_exact(check.logged)}</b>'
    gap = f'difference <b class="loss-difference">{_gap(check.difference)}</b>'
    if check.agrees:
        size = f"Their absolute values add up to {check.size:.4g}."
        return f'<p class="ok">{how} {sum_}; {logged}; {gap}. They agree. {size}</p>'
    why = (
        "The files hold one process's share of several."
        if about.get("processes", 1) != 1
        else "They do not agree: something is wrong with the record."
    )
    return f'<p class="off">{how} {sum_}; {logged}; {gap}. {why}</p>'


def _gap(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _exact(value: float | None) -> str:
    return "–" if value is None else f"{value:+.9g}"


# -- what ran --------------------------------------------------------------------------------------------------------


def _what_ran(run: RunFiles) -> str:
    about = run.about
    versions = dict(about["versions"]) if isinstance(about.get("versions"), dict) else {}
    arguments = list(about["arguments"]) if isinstance(about.get("arguments"), list) else []
    shown: dict[str, Any] = {
        "command": " ".join(["rolecall", *map(str, arguments)])
        if arguments and arguments[0] == run.command
        else f"rolecall.{run.command}(…) from Python",
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
    settings = facts(dict(_flat(run.config)))
    return (
        facts(shown).replace('class="facts"', 'class="facts wide"')
        + f"<details><summary>All settings</summary>{settings}</details>"
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- the demo --------------------------------------------------------------------------------------------------------


def _demo_page(path: Path) -> str:
    about = read_object(path / "demo.json")
    sections, data = [], []
    stages = [stage for stage in about.get("stages", []) if isinstance(stage, dict)]
    sections.append(Section(id="demo", title="Before and after", body=_demo_table(about, stages)))
    for name in about.get("runs", []):
        run = read_run(path / str(name))
        parts = run_parts(run, prefix=f"{name}-", level=2, shown_steps=1)
        sections.append(Section(id=str(name), title=str(name), body=_lead(run)))
        sections += parts.sections
        data += parts.data
    lead = (
        '<p class="lead">The whole pipeline on the built-in model: imitation, a reward model, then PPO against that '
        "reward model and GRPO against an exact verifier, both from the same start.</p>"
    )
    return page(title="rolecall demo", lead=lead, sections=sections, data=data)


def _demo_table(about: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in ("accuracy", "avg@4", "mean_length") if any(name in s.get("numbers", {}) for s in stages)]
    titles = {"accuracy": "greedy", "avg@4": "sampled", "mean_length": "mean length"}
    rows = [
        (
            stage.get("name", "?"),
            stage.get("learns_from", ""),
            *(_share(name, stage.get("numbers", {}).get(name)) for name in names),
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
    return shown + "<br>" + table(head, lines, caption="Answers to problems that the start got wrong")


def _share(name: str, value: Any) -> str:
    if not _is_number(value):
        return "–"
    return f"{value:.2f}" if name == "mean_length" else f"{100 * value:.1f} %"


def _told(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else "–"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
