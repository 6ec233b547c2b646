"""Where two runs part: the first step, answer and token, and what differs there."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rolecall.look.charts import is_number
from rolecall.look.diff.steps import Record, metrics_part, read_record, rollouts_part, updates_part
from rolecall.look.run import RunFiles

GIVEN = ("sft", "dpo", "rm")
"""Commands that learn from given answers, and record none."""
Line = dict[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first difference between two runs; all that is recorded before it is the same."""

    step: int
    """The training step; 0 is the evaluation before the first."""
    kind: str
    """What differs: weights, data, order, random number, sampling, observation, sampled token, log-prob, finish, reward,
    value, advantage, verdict, loss, gradient, setting, evaluation or number."""
    answer: int | None = None
    """The trajectory's row in that step's rollouts file."""
    token: int | None = None
    """The token of it."""
    sentence: str
    """What differs, with both values."""
    recorded: bool
    """Whether both runs have the record of that step; without it there are only the numbers of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """Two runs, followed from the start until they part."""

    parting: Parting | None
    """None if they are the same as far as both go."""
    steps: int
    """Steps that both runs have."""
    records: int
    """Those of them up to the parting whose rollouts both have."""
    weights: bool | None
    """Whether they start from the same weights; None if no record says it."""
    order: bool | None
    """Whether the prompts are the same, in the same order, in all records up to the parting; None without a record."""


def follow(a: RunFiles, b: RunFiles) -> Followed:
    """Compare two runs step by step, until something differs."""
    lines_a, lines_b = _by_step(a.steps), _by_step(b.steps)
    judged_a, judged_b = _by_step(a.evaluations), _by_step(b.evaluations)
    steps = sorted((lines_a.keys() & lines_b.keys()) | (judged_a.keys() & judged_b.keys()))
    weights, order, records, parting = None, None, 0, None
    for step in steps:
        one, two = read_record(a, step), read_record(b, step)
        whole = one is not None and two is not None
        records += whole
        if step == 1 and one is not None and two is not None and one.weights and two.weights:
            weights = one.weights == two.weights
        lines = (lines_a.get(step), lines_b.get(step)), (judged_a.get(step), judged_b.get(step))
        found = _step_parts(one, two, lines, given=a.command in GIVEN)
        if found is not None:
            parting = _placed(found, step, steps, recorded=whole)
            if parting.kind == "data" and _seen_elsewhere(a, b, parting):
                parting = replace(parting, kind="order")
        if one is not None and two is not None and order is not False:
            order = one.rollouts["prompt_text"].equals(two.rollouts["prompt_text"])
        if parting is not None:
            break
    both = len(lines_a.keys() & lines_b.keys())
    return Followed(parting=parting, steps=both, records=records, weights=weights, order=order)


def _step_parts(
    a: Record | None, b: Record | None, lines: Iterable[tuple[Line | None, Line | None]], *, given: bool
) -> dict[str, Any] | None:
    """What differs first in a step, in the order in which a step computes it: its record, its numbers, its evaluation."""
    if a is not None and b is not None and (found := rollouts_part(a, b) or updates_part(a, b)) is not None:
        return found
    for one, two in lines:
        if one is not None and two is not None and (found := metrics_part(one, two, given=given)) is not None:
            return found
    return None


def _seen_elsewhere(a: RunFiles, b: RunFiles, parting: Parting) -> bool:
    """Whether the second run's prompt is one that the first run has too, at another place."""
    record = read_record(b, parting.step)
    if record is None or parting.answer is None:
        return False
    prompt = record.rollouts["prompt_text"][parting.answer].as_py()
    records = (read_record(a, step) for step in a.rollouts)
    return any(one is not None and prompt in one.rollouts["prompt_text"].to_pylist() for one in records)


def _placed(found: dict[str, Any], step: int, steps: list[int], *, recorded: bool) -> Parting:
    """At its step; weights that differ were made by the update before."""
    before = [s for s in steps if 0 < s < step]
    if found["kind"] == "weights" and before:
        said = f"the update of step {before[-1]} gave other weights, though all that is recorded of it is the same"
        return Parting(step=before[-1], kind="gradient", sentence=said, recorded=recorded)
    return Parting(step=step, recorded=recorded, **found)


def _by_step(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {int(line["step"]): line for line in lines if is_number(line["step"])}
