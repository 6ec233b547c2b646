"""The rollouts of a run, token by token, and where a step's loss comes from."""

from collections.abc import Mapping
from math import isnan
from typing import Any

from rolecall.look.charts import is_number
from rolecall.look.losses import LossCheck, check_loss
from rolecall.look.page import Data, table, text
from rolecall.look.records import read_step, samples
from rolecall.look.run import RunFiles
from rolecall.look.tokens import SampleSet, token_view


def rollouts_view(run: RunFiles, *, name: str, shown_steps: int) -> tuple[str, list[Data]]:
    """The token view of a run's rollouts, or a sentence why there is none."""
    steps = _steps_to_show(run, shown_steps)
    if not steps:
        if run.command in ("sft", "rm"):
            return f'<p class="note">A run of {text(run.command)} samples nothing, so it records no rollouts.</p>', []
        why = "<code>save.rollouts</code> says how many steps stay, and every 50th stays in any case"
        return f'<p class="note">This run has no rollouts in its directory: {why}.</p>', []
    unit = "step" if run.command == "marl" else "token"
    view = token_view(name, [_set(run, step, unit) for step in steps], unit=unit)
    about = {
        "token": "Every token of some answers, coloured by a number of your choice.",
        "step": "Every step of some agents' episodes, by the action taken, coloured by a number of your choice.",
    }[unit]
    solid = f"A solid line below a {unit} says that it trains."
    return f'<p class="note">{about} {solid}</p>{view.html}', [view.data]


def kl_kind_of(options: Mapping[str, Any]) -> str:
    """The estimate that the run used."""
    kind = str(options.get("kl_kind", "k1"))
    return kind if kind != "auto" else "k3" if options.get("kl_in") == "loss" else "k1"


def _set(run: RunFiles, step: int, unit: str) -> SampleSet:
    algorithm = run.config.get("algorithm")
    options: Mapping[str, Any] = algorithm if isinstance(algorithm, dict) else {}
    clip = None
    if options.get("name") in ("grpo", "ppo") and is_number(options.get("clip_low")):
        clip = (1 - float(options["clip_low"]), 1 + float(options["clip_high"]))
    record = read_step(step, run.rollouts[step], run.updates.get(step))
    chosen, left = samples(record, clip=clip, kl_kind=kl_kind_of(options), unit=unit)
    notes = []
    if record.updates is not None:
        logged = next((line.get("loss") for line in run.steps if line["step"] == step), None)
        notes.append(loss_note(check_loss(record.updates, step=step, logged=logged), run.about))
    elif unit == "token":
        why = "<code>save.updates</code> says how many steps stay"
        notes.append(
            f"What the optimiser did in step {step} is not kept, so there are no ratios and contributions; {why}."
        )
    if left:
        notes.append(f"{left} more of these groups are left out to keep the page small.")
    if unit == "token" and any(sample.pieces is None for sample in chosen):
        notes.append("This record does not say what tokens write, so boxes show ids.")
    html = "".join(note if note.startswith("<") else f'<p class="note">{note}</p>' for note in notes)
    return SampleSet(label=f"step {step}", samples=chosen, note=html, clip=clip)


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
    if isnan(check.mean) and isnan(float(check.logged or 0)):
        return f'<p class="off">{how} {sum_}; {logged}: the loss of this step was not finite.</p>'
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
