"""The audit of rows that are imitated: what trains in them, and what is left out."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.render import Rendered
from rolecall.recipes.audit.model import model_checks
from rolecall.recipes.audit.records import Audit, Finding, Rolled, Subject, error, ok, quoted, share, warning
from rolecall.recipes.audit.rollout import token_sample
from rolecall.recipes.audit.rows import LOOKED_AT, check_round_trip, repeated, texts_of
from rolecall.tasks.kinds import Record, kind_of, record
from rolecall.tasks.rows import place_of
from rolecall.types import Trajectory

_MANY_LONG = 0.05


@dataclass(kw_only=True)
class _Rendered:
    """The rows as tokens, by row number."""

    rows: int
    done: dict[int, Rendered] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    """What rendering warned of, and the first row it did."""


def audit_demonstrations(
    subject: Subject,
    render: Callable[[Record], Rendered],
    *,
    about: dict[str, str],
    max_length: int,
    train_stop: bool,
    shown: int,
) -> Audit:
    """What `rolecall sft` would train on. `render` is how it makes tokens of a row."""
    found = _render_all(subject, render)
    limit = min(max_length, subject.policy.context_length)
    rule = TrainRule(stop=train_stop)
    texts = texts_of(subject.rows, lambda row: None)
    starts = {i: r.ids for i, r in list(found.done.items())[:64]}
    samples = [
        token_sample(
            subject.policy.tokenizer,
            Trajectory(ids=r.ids, roles=r.roles, turns=r.turns, author="demonstrator"),
            rule=rule,
            title=place_of(subject.rows, i),
            note=f"a demonstration of {len(r.ids)} tokens",
        )
        for i, r in list(found.done.items())[:shown]
    ]
    return Audit(
        about=about,
        findings=(
            *model_checks(subject, Rolled(), starts),
            _check_rows(subject, found),
            _check_lengths(subject, found, limit),
            _check_trained(subject, found, rule),
            _check_duplicates(subject, found.rows),
            check_round_trip(subject.policy.tokenizer, subject.rows, texts, []),
        ),
        samples=tuple(samples),
    )


def _render_all(subject: Subject, render: Callable[[Record], Rendered]) -> _Rendered:
    kind = kind_of(subject.rows)
    found = _Rendered(rows=min(len(subject.rows), LOOKED_AT))
    for index in range(found.rows):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                place = place_of(subject.rows, index)
                found.done[index] = render(record(subject.rows[index], kind, number=place))
            except Exception as problem:  # a chat template is a program of the model's author and may raise anything
                found.broken[index] = " ".join(str(problem).split())
        for remark in caught:
            found.remarks.setdefault(str(remark.message), index)
    return found


def _check_rows(subject: Subject, found: _Rendered) -> Finding:
    check = "prompts"
    if found.broken:
        index, why = next(iter(found.broken.items()))
        return error(
            check,
            f"{share(len(found.broken), found.rows)} rows cannot be rendered",
            f"{place_of(subject.rows, index)}: {why}",
            advice="put these rows right, or leave them out",
        )
    if found.remarks:
        remark, index = next(iter(found.remarks.items()))
        return warning(
            check,
            "rows do not render as they were meant",
            f"{place_of(subject.rows, index)}: {remark}",
            advice="use a template that only appends, or rows of one turn each",
        )
    return ok(check, f"all {found.rows:,} rows looked at can be rendered")


def _check_lengths(subject: Subject, found: _Rendered, limit: int) -> Finding:
    check = "context"
    lengths = {i: len(r.ids) for i, r in found.done.items()}
    long = {i: n for i, n in lengths.items() if n > limit}
    if not long:
        longest = max(lengths.values(), default=0)
        return ok(check, f"all rows fit into {limit} tokens", f"the longest has {longest}")
    index = max(long, key=lambda i: long[i])
    evidence = f"{place_of(subject.rows, index)}: {long[index]} tokens"
    summary = f"{share(len(long), len(lengths))} rows are longer than {limit} tokens and would be left out"
    if len(long) <= _MANY_LONG * len(lengths):
        return ok(check, summary, evidence)
    find = error if len(long) == len(lengths) else warning
    return find(check, summary, evidence, advice="raise max_length (up to the model's context), or shorten the rows")


def _check_trained(subject: Subject, found: _Rendered, rule: TrainRule) -> Finding:
    """Whether every row has tokens that train, and every answer ends with a stop that trains."""
    check = "trained-tokens"
    content = {i: sum(role == Role.CONTENT for role in r.roles) for i, r in found.done.items()}
    empty = [i for i, n in content.items() if not n]
    if empty:
        return (error if len(empty) == len(content) else warning)(
            check,
            f"nothing trains in {share(len(empty), len(content))} rows",
            f"{place_of(subject.rows, empty[0])}: {quoted(subject.rows[empty[0]])}",
            advice="give each row an answer of the assistant that is not empty",
        )
    endless = [i for i, r in found.done.items() if any(r.roles[end - 1] != Role.STOP for _, end in r.turns)]
    if endless and rule.stop:
        return warning(
            check,
            f"answers of {share(len(endless), len(content))} rows have no end that trains, so the model does not learn to stop",
            f"{place_of(subject.rows, endless[0])}: {quoted(subject.rows[endless[0]])}",
            advice="see stop-ids: the end of turn that the template writes has to be one of them",
        )
    total = sum(len(r.ids) for r in found.done.values())
    trained = sum(content.values()) + rule.stop * sum(len(r.turns) for r in found.done.values())
    ends = "" if endless else ", and every answer ends with a stop"
    return ok(check, f"{share(trained, total)} tokens train{ends}")


def _check_duplicates(subject: Subject, rows: int) -> Finding:
    first, same = repeated(subject.rows, rows, lambda row: row)
    if len(same) > 0.01 * rows:
        a, b = same[0]
        return warning(
            "duplicates",
            f"{share(len(same), rows)} rows repeat an earlier one",
            f"{place_of(subject.rows, b)} repeats {place_of(subject.rows, a)}",
            advice="remove them, unless they are meant to count more",
        )
    return ok("duplicates", f"{first:,} different rows of {rows:,}")
