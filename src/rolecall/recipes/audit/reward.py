"""Checks of the reward: whether it works, knows right from wrong, says the same twice, and is quick enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import UserError
from rolecall.recipes.audit.records import Finding, Rolled, Setup, encoded, error, ok, quoted, share, skipped, warning
from rolecall.recipes.collect import as_completion, run_state
from rolecall.rewards.records import Sample, Scored
from rolecall.tasks.rows import place_of

_FORMS = {
    "as it stands": "{}",
    "in <answer> tags": "<answer>{}</answer>",
    "in \\boxed{}": "\\boxed{{}}",
    "after ####": "#### {}",
}
"""How right answers are commonly written; rows often hold the bare result only."""
_NONSENSE = ("", "I do not know.")
_CLOSE = 1e-6
_MANY_WRONG = 0.2
_MANY_FAILED = 0.5
_SLOW_STEP_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one row's right answer scores, and what wrong ones do."""

    row: int
    """The row's number."""
    gold: str
    """Its answer."""
    right: float | None
    """The best score of the right answer, of the ways to write it; None if all failed."""
    form: str
    """How it was written to score that."""
    forms: tuple[str, ...]
    """The ways that were tried."""
    wrong: float | None
    """The best score of an answer that says nothing."""
    other: float | None
    """The score of another row's different answer; None if there is none."""
    failure: str | None
    """Why the right answer has no score, where the reward says."""
    stumbles: str | None
    """Why an answer that says nothing has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Try:
    """A text to score."""

    row: int
    kind: str
    """right, wrong or other, as in `Probe`."""
    text: str
    form: str = ""


def probe(setup: Setup, golds: Mapping[int, str], rolled: Rolled) -> tuple[list[Probe], str]:
    """Score right and wrong answers to some rows; or nothing, and why."""
    rows = [row for row in dict.fromkeys([*rolled.rows, *golds]) if row in golds][: setup.groups]
    tries = [t for row in rows for t in _tries(setup, row, golds)]
    try:
        samples = [_sample(setup, t, number) for number, t in enumerate(tries)]
        scored = setup.reward.score(samples, state=run_state(setup.options, None, 0))
    except UserError as problem:
        return [], str(problem)
    by_row: dict[int, list[tuple[_Try, Scored]]] = {row: [] for row in rows}
    for t, score in zip(tries, scored, strict=True):
        by_row[t.row].append((t, score))
    return [_probe(row, golds[row], by_row[row]) for row in rows], ""


def _tries(setup: Setup, row: int, golds: Mapping[int, str]) -> list[_Try]:
    gold, shown = golds[row], setup.rows[row].get("completion")
    common = _FORMS if made_of_functions(setup) else {"as it stands": "{}"}
    forms = {name: form.replace("{}", gold) for name, form in common.items()}
    if setup.gold_form is not None:
        forms["in gold_form"] = setup.gold_form.replace("{}", gold)
    if isinstance(shown, str):
        forms["as the row's completion"] = shown
    others = [text for text in golds.values() if text.strip() != gold.strip()]
    return [
        *(_Try(row=row, kind="right", text=text, form=name) for name, text in forms.items()),
        *(_Try(row=row, kind="wrong", text=text) for text in _NONSENSE),
        *(_Try(row=row, kind="other", text=text) for text in others[:1]),
    ]


def _sample(setup: Setup, t: _Try, number: int) -> Sample:
    row = setup.rows[t.row]
    return Sample(
        prompt=row.get("prompt", ""),
        completion=as_completion(row.get("prompt", ""), t.text),
        completion_ids=encoded(setup.policy.tokenizer, t.text) or (),
        row=row,
        prompt_index=t.row,
        sample_index=number,
    )


def _probe(row: int, gold: str, scored: Sequence[tuple[_Try, Scored]]) -> Probe:
    forms = [(s.total, t.form) for t, s in scored if t.kind == "right" and s.total is not None]
    # The first of the best, so that the plainest way to write it is named.
    right, form = max(forms, key=lambda pair: pair[0]) if forms else (None, "")
    totals = {
        kind: [s.total for t, s in scored if t.kind == kind and s.total is not None] for kind in ("wrong", "other")
    }
    failures = {kind: [s.failure for t, s in scored if t.kind == kind and s.failure] for kind in ("right", "wrong")}
    return Probe(
        row=row,
        gold=gold,
        right=right,
        form=form,
        forms=tuple(t.form for t, _ in scored if t.kind == "right"),
        wrong=max(totals["wrong"], default=None),
        other=max(totals["other"], default=None),
        failure=next(iter(failures["right"]), None) if right is None else None,
        stumbles=next(iter(failures["wrong"]), None),
    )


def never_fires(rolled: Rolled, probes: Sequence[Probe]) -> float | None:
    """The one score that all answers got, right, wrong and sampled; None if there are several or too few to tell."""
    if not probes:
        return None
    totals = [t for t in (rolled.scores.totals if rolled.scores else ()) if t is not None]
    totals += [t for p in probes for t in (p.right, p.wrong, p.other) if t is not None]
    return totals[0] if totals and max(totals) - min(totals) <= _CLOSE else None


def worth_of(probes: Sequence[Probe]) -> float | None:
    """How much more right answers score than such as say nothing, half of them at least; None if that is unknown."""
    gaps = sorted(p.right - p.wrong for p in probes if p.right is not None and p.wrong is not None)
    return gaps[len(gaps) // 2] if gaps else None


def check_works(setup: Setup, rolled: Rolled, probes: Sequence[Probe], problem: str) -> Finding:
    """Whether the reward gives a number for every answer. `problem`: why it could not be called."""
    check = "reward"
    if problem:
        return error(
            check,
            "the reward cannot be used",
            problem,
            advice="put the reward or the rows right; training would stop at its first step",
        )
    totals = rolled.scores.totals if rolled.scores else ()
    reasons = [f for f in (rolled.scores.failures if rolled.scores else ()) if f is not None]
    none = [i for i, total in enumerate(totals) if total is None]
    unscored = [p for p in probes if p.right is None]
    stumbles = [p.stumbles for p in probes if p.stumbles is not None]
    if not none and not unscored and not stumbles:
        parts = ", ".join(setup.reward.names)
        return ok(check, f"every answer has a score ({parts})", f"{len(totals)} sampled answers scored")
    reasons += [p.failure for p in probes if p.failure is not None]
    evidence = []
    if none:
        first = place_of(setup.rows, rolled.row_of[none[0]])
        evidence.append(f"{share(len(none), len(totals))} sampled answers have no score, one to {first} among them")
    if unscored:
        evidence.append(f"{share(len(unscored), len(probes))} right answers have no score")
    if stumbles:
        evidence.append(f"an answer that says nothing has no score in {share(len(stumbles), len(probes))} rows")
        reasons += stumbles
    evidence.append(reasons[0] if reasons else "it returned None: is the row's answer column there?")
    bad = len(none) > _MANY_FAILED * max(1, len(totals)) or len(unscored) > _MANY_WRONG * max(1, len(probes))
    find = error if bad else warning
    what = "fails on" if reasons else "does not apply to"
    return find(
        check,
        f"the reward {what} {'most' if bad else 'some'} answers: they take no part in training",
        *evidence,
        advice="let the function return a number for every answer, 0 for one it cannot read",
    )


def check_gold(setup: Setup, rolled: Rolled, probes: Sequence[Probe]) -> Finding:
    """Whether the right answer gets the best reward, and an answer that says nothing less."""
    check = "gold"
    known = [p for p in probes if p.right is not None]
    if not known:
        return skipped(check, "no row with an answer could be scored" if probes else "the rows have no answers")
    constant = never_fires(rolled, known)
    if constant is not None:
        return error(
            check,
            f"the reward never fires: right, wrong and sampled answers all score {constant:g}",
            _row_of(setup, known[0]),
            _ways(known[0]),
            advice=_ADVICE,
        )
    return (
        _no_better_than_nonsense(setup, known)
        or _not_the_best(setup, known)
        or _beaten(setup, rolled, known)
        or _looks_away(setup, known)
        or ok(check, f"the right answer scores best in all {len(known)} rows tried", _row_of(setup, known[0]))
    )


_ADVICE = (
    "check that reward and rows mean the same answer (its column, its rounding); if the reward wants it written in "
    "another way, say how: --gold_form 'The answer is {}'"
)


def _ways(p: Probe) -> str:
    return f"the right answer was written {', '.join(p.forms)}"


def _no_better_than_nonsense(setup: Setup, known: Sequence[Probe]) -> Finding | None:
    bad = [p for p in known if p.wrong is not None and p.right is not None and p.right <= p.wrong + _CLOSE]
    if not bad:
        return None
    find = error if len(bad) > _MANY_WRONG * len(known) and made_of_functions(setup) else warning
    return find(
        "gold",
        f"the right answer scores no more than one that says nothing in {share(len(bad), len(known))} rows",
        _row_of(setup, bad[0]),
        _ways(bad[0]),
        advice=_ADVICE,
    )


def _not_the_best(setup: Setup, known: Sequence[Probe]) -> Finding | None:
    if not setup.exact:
        return None
    best = sum(setup.options.reward_weights or (1.0,) * len(setup.reward.names))
    low = [p for p in known if p.right is not None and p.right < best - _CLOSE]
    if not low:
        return None
    return (error if len(low) > _MANY_WRONG * len(known) else warning)(
        "gold",
        f"the right answer does not get the full reward of {best:g} in {share(len(low), len(known))} rows",
        _row_of(setup, low[0]),
        advice="check these rows' answers, or choose the verifier that reads them",
    )


def _beaten(setup: Setup, rolled: Rolled, known: Sequence[Probe]) -> Finding | None:
    """No sampled answer scores more than the right one."""
    by_row = {p.row: p for p in known}
    totals = rolled.scores.totals if rolled.scores else ()
    margin = max(_CLOSE, 2 * rolled.noise)
    for row, answer, total in zip(rolled.row_of, rolled.answers, totals, strict=False):
        p = by_row.get(row)
        if p is not None and p.right is not None and total is not None and total > p.right + margin:
            return warning(
                "gold",
                f"a sampled answer scores {total:g}, more than the right answer's {p.right:g}",
                f"{place_of(setup.rows, row)}: sampled {quoted(answer)}, right {quoted(p.gold)}",
                advice="check whether the reward can be had without being right",
            )
    return None


def _looks_away(setup: Setup, known: Sequence[Probe]) -> Finding | None:
    """Another row's answer scores less than this row's."""
    tried = [p for p in known if p.other is not None and p.right is not None]
    fooled = [p for p in tried if p.other is not None and p.right is not None and p.other >= p.right - _CLOSE]
    if len(fooled) < len(tried) or len(tried) < 2:
        return None
    return warning(
        "gold",
        "another row's answer scores as much as the right one, in every row: the reward does not look at the row's answer",
        _row_of(setup, fooled[0]),
        advice="let the reward compare with the row's answer, unless only the form of an answer is to be learned",
    )


def made_of_functions(setup: Setup) -> bool:
    """True if the reward is made of functions. A reward model's preference for an answer is only an opinion."""
    return hasattr(setup.reward, "pids")


def _row_of(setup: Setup, p: Probe) -> str:
    numbers = [f"scores {p.right:g} {p.form}" if p.right is not None else "has no score"]
    if p.wrong is not None:
        numbers.append(f"nonsense {p.wrong:g}")
    if p.other is not None:
        numbers.append(f"another row's answer {p.other:g}")
    return f"{place_of(setup.rows, p.row)}: the right answer {quoted(p.gold)} {', '.join(numbers)}"


def check_determinism(setup: Setup, rolled: Rolled) -> Finding:
    """Whether the same answers score the same again."""
    check, scores = "determinism", rolled.scores
    if scores is None:
        return skipped(check, rolled.failure)
    pairs = list(zip(scores.totals, scores.again, strict=True))
    other = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not other:
        return ok(check, f"{len(pairs)} answers scored the same twice")
    gaps = {i: abs(a - b) for i, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b}
    worst = max(gaps, key=lambda i: gaps[i]) if gaps else other[0]
    a, b = pairs[worst]
    return warning(
        check,
        f"the reward is not deterministic: {share(len(other), len(pairs))} answers scored differently the second time",
        f"{quoted(rolled.answers[worst])} scored {_number(a)}, then {_number(b)}",
        advice="seed what is random in it; else a run cannot be repeated or resumed exactly, and the noise trains",
    )


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def check_latency(setup: Setup, rolled: Rolled) -> Finding:
    """Whether scoring a step takes less time than sampling it."""
    check, scores, o = "latency", rolled.scores, setup.options
    if scores is None:
        return skipped(check, rolled.failure)
    answers = o.prompts * o.samples
    reward = scores.seconds / len(scores.totals) * answers
    sampling = rolled.seconds / len(rolled.completions) * answers
    numbers = (
        f"{len(scores.totals)} answers scored in {scores.seconds:.2f} s; a step of {answers} takes about {reward:.2g} s, "
        f"sampling it about {sampling:.2g} s"
    )
    if reward > max(_SLOW_STEP_S, sampling):
        return warning(
            check,
            f"the reward is slow: {1000 * scores.seconds / len(scores.totals):.0f} ms per answer, longer than sampling "
            "takes",
            numbers,
            advice="make the function quicker, or let it take one answer at a time so that several processes share them",
        )
    return ok(check, "scoring takes less time than sampling, or next to none", numbers)
