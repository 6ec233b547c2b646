"""`rolecall audit`: look before training."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.config.audit import AuditOptions
from rolecall.errors import UserError
from rolecall.files import DiskError, write_atomically
from rolecall.jobs.agents import env_source
from rolecall.jobs.arguments import options_of
from rolecall.jobs.data import demonstrated, open_reward, prompt_rows
from rolecall.jobs.models import open_policy, sampler
from rolecall.look.audit_page import audit_html
from rolecall.look.tokens import Sample
from rolecall.maths.roles import Role, Verdict
from rolecall.recipes.audit import Audit, Setup, Subject, audit_demonstrations, audit_rl
from rolecall.recipes.rendering import rendered_row
from rolecall.rewards.calling import text_of
from rolecall.rewards.records import RewardError
from rolecall.rewards.sources import BUILT_IN
from rolecall.rewards.verifiers import gold_answer
from rolecall.tasks.names import resolve as resolve_rows
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import Stream, head
from rolecall.train.exit_codes import ExitCode

_STREAMED = 2_000
"""Rows of a stream that are looked at."""


def audit(
    *,
    preset: str = "grpo",
    rows: RowsSource | None = None,
    reward: Any = None,
    **settings: Any,
) -> Audit:
    """Look before training: `audit(model="tiny", rows="data.jsonl", reward=my_reward).errors`.

    Takes what `rl` takes (with `job="sft"` what `sft` takes). A page is written only if `html` names it.
    """
    options = options_of(AuditOptions, {**settings, "rows": rows, "reward": reward}, base=preset)
    audited = run(options)
    if options.html is not None:
        write_page(audited, options.html)
    return audited


def run(options: AuditOptions) -> Audit:
    """Run from options, without writing a page."""
    if options.html is not None:
        _check_place(Path(options.html).expanduser(), overwrite=options.overwrite)
    with ExitStack() as stack:
        stack.enter_context(_quiet_rewards())
        if options.job == "sft":
            return _sft(options)
        return _rl(options, stack)


def _rl(options: AuditOptions, stack: ExitStack) -> Audit:
    source = options.rows or "addition"
    if env_source(options.env, source) is not None:
        raise UserError(
            "audit looks at rows that are answered once, not at episodes; `rolecall play --show tokens` shows those"
        )
    found = prompt_rows(source, options.eval, seed=options.seed)
    train, test, task_reward = _bounded(found.train), found.test, found.reward
    task = resolve_rows(source) if task_reward is not None else None
    reward = open_reward(options.reward, task_reward, stack, options, weights=options.reward_weights)
    problem = ""
    try:
        getattr(reward, "check_columns", lambda columns: None)(train.columns)
    except RewardError as error:
        problem = str(error)
    policy = open_policy(options.model, options)
    setup = Setup(
        options=options,
        policy=policy,
        engine=sampler(policy, options),
        reward=reward,
        rows=train,
        held_out=test,
        gold=getattr(task, "gold", _own_answer),
        exact=all(name in BUILT_IN for name in options.reward) if options.reward else task_reward is not None,
        gold_form=options.gold_form,
        groups=options.groups,
        shown=options.show,
    )
    about = _about(options) | {
        "reward": ", ".join(reward.names),
        "looked at": f"{min(options.groups, len(train))} prompts x {options.samples} answers, {len(train):,} rows",
    }
    return audit_rl(setup, about=about, problem=problem)


def _own_answer(row: Mapping[str, Any]) -> str | None:
    """The answer of a row that is of no task: its answer column, or what it demonstrates."""
    shown = row.get("completion")
    return gold_answer(row) or (text_of(shown) if isinstance(shown, str | list) else None)


def _sft(options: AuditOptions) -> Audit:
    rows = _bounded(demonstrated(options.rows or "addition", seed=options.seed))
    policy = open_policy(options.model, options)
    return audit_demonstrations(
        Subject(options=options, policy=policy, rows=rows),
        partial(rendered_row, policy=policy, chat=options.chat),
        about=_about(options) | {"looked at": f"{len(rows):,} rows"},
        max_length=options.longest_row,
        train_stop=options.train_stop is not False,
        shown=options.show,
    )


def _bounded(rows: Rows) -> Rows:
    """The rows; of a stream, as many as are looked at."""
    return head(rows, _STREAMED) if isinstance(rows, Stream) else rows


def _about(options: AuditOptions) -> dict[str, str]:
    return {"command": f"rolecall {options.job}", "model": options.model, "rows": options.rows or "addition"}


def _check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a page that cannot be written, before any work is done."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: give the page a name in it, such as {path / 'audit.html'}")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already: give another name, or overwrite")
    if not path.parent.is_dir():
        raise UserError(f"there is no directory {path.parent} to write {path.name} to: make it first")


def write_page(found: Audit, path: str | Path) -> None:
    """Write the audit as one HTML file."""
    path = Path(path).expanduser()
    samples = [
        Sample(
            title=sample.title,
            pieces=sample.pieces,
            ids=sample.ids,
            roles=[Role[name] for name in sample.roles],
            verdicts=[Verdict[name] for name in sample.verdicts],
            numbers={"behaviour_logprob": sample.logprobs} if any(p is not None for p in sample.logprobs) else {},
            labels=[sample.note],
        )
        for sample in found.samples
    ]
    title = f"Audit of {found.about['model']} on {found.about['rows']}"
    html = audit_html(title=title, about=found.about, findings=found.findings, samples=samples)
    try:
        write_atomically(path, html.encode())
    except DiskError as error:
        raise UserError(str(error), exit_code=ExitCode.DISK) from error


@contextmanager
def _quiet_rewards() -> Iterator[None]:
    """What rewards log of failures is a finding here."""
    logger = logging.getLogger("rolecall.rewards")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
