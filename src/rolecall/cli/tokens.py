"""What audit, generate and play print: findings, answers and episodes, whole or token by token."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import isnan
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rolecall.config.audit import AuditOptions
from rolecall.config.use import GenerateOptions, PlayOptions
from rolecall.errors import UserError
from rolecall.files import plain
from rolecall.jobs.audit import run as run_audit
from rolecall.jobs.audit import write_page
from rolecall.jobs.generate import Answer, Generated, Prompt, ServedAnswer
from rolecall.jobs.generate import run as run_generate
from rolecall.jobs.play import Conversation
from rolecall.jobs.play import run as run_play
from rolecall.maths.roles import Role
from rolecall.recipes.audit import Audit, Finding, Level, TokenSample
from rolecall.types import Trajectory
from rolecall.visible import visible_text, visible_token

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red", Level.SKIPPED: "dim"}
_ORDER = (Level.ERROR, Level.WARNING, Level.OK, Level.SKIPPED)
_ENDS = 24
"""Tokens shown of each end of a long run of the same role."""


def audit(options: AuditOptions) -> int:
    """Print samples and findings, the worst last, and write the page; 1 if there is an error."""
    page = _page_path(options)
    with _working(options):
        found = run_audit(options)
    if options.json:
        print(json.dumps(_audit_row(found), ensure_ascii=False))
    else:
        _show_findings(found, quiet=options.quiet)
    if page is not None:
        if options.html is None:
            page.parent.mkdir(exist_ok=True)
        write_page(found, page)
        if not options.quiet:
            print(f"page: {page}", file=sys.stderr)
    return 1 if found.errors else 0


def _page_path(options: AuditOptions) -> Path | None:
    """Where the page goes."""
    if not options.page:
        return None
    if options.html is not None:
        return Path(options.html).expanduser()
    number, runs = 1, Path("runs")
    if runs.exists() and not runs.is_dir():
        raise UserError(
            "runs is a file, and the page goes into a directory of that name: give another place with --html"
        )
    while (runs / f"audit-{number}.html").exists():
        number += 1
    return runs / f"audit-{number}.html"


def _working(options: AuditOptions) -> AbstractContextManager[object]:
    """Something that moves on a terminal while the model answers."""
    console = Console(stderr=True)
    if options.quiet or not console.is_terminal:
        return nullcontext()
    answers = f", {options.groups} x {options.samples} answers" if options.job == "rl" else ""
    return console.status(Text(f"looking at {visible_text(options.model)} and its rows{answers}"))


def _audit_row(found: Audit) -> dict[str, object]:
    samples = [
        {
            "title": sample.title,
            "note": sample.note,
            "score": sample.score,
            "ids": sample.ids,
            "tokens": sample.tokens,
            "roles": [role.lower() for role in sample.roles],
            "verdicts": [verdict.lower() for verdict in sample.verdicts],
            "logprobs": sample.logprobs,
        }
        for sample in found.samples
    ]
    return {"about": dict(found.about), "findings": [plain(f) for f in found.findings], "samples": samples}


def _show_findings(found: Audit, *, quiet: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not quiet:
        for name, value in found.about.items():
            console.print(Text(f"{name:10} {visible_text(value)}"))
        for sample in found.samples:
            console.print(Text("\n".join(_sample_tokens(sample))))
        console.print()
    width = max(len(f.check) for f in found.findings)
    for finding in sorted(found.findings, key=lambda f: -_ORDER.index(f.level)):
        if not quiet or finding.problem:
            for line in _finding_lines(finding, width):
                console.print(line)
    levels = Counter(f.level for f in found.findings)
    counts = [f"{levels[level]} {level}{'s' * (level in _ORDER[:2] and levels[level] != 1)}" for level in _ORDER]
    console.print(Text(f"\n{', '.join(counts)}"))


def _finding_lines(finding: Finding, width: int) -> Iterator[Text]:
    margin = " " * (11 + width)
    yield Text.assemble(
        (f"{finding.level:7}", _STYLES[finding.level]), f"  {finding.check:{width}}  {visible_text(finding.summary)}"
    )
    for evidence in finding.evidence if finding.problem else ():
        yield Text(f"{margin}{visible_text(evidence)}", style="dim")
    if finding.advice:
        yield Text(f"{margin}change: {visible_text(finding.advice)}")


def _sample_tokens(sample: TokenSample) -> Iterator[str]:
    """A line per token, then what the verdicts mean. Of a long run of the same role the middle is left out."""
    yield f"\n{visible_text(sample.title)}: {sample.note}"
    yield "   pos  role         verdict         log-prob      id  token"
    columns = (sample.roles, sample.verdicts, sample.logprobs, sample.ids, sample.tokens)
    lines = [
        f"{position:6}  {role.lower():11}  {verdict.lower():14}  {_number(logprob)}  {token:6}  {visible_token(text)}"
        for position, (role, verdict, logprob, token, text) in enumerate(zip(*columns, strict=True))
    ]
    for _, run in groupby(range(len(lines)), key=lambda i: sample.roles[i]):
        places = list(run)
        if len(places) <= 2 * _ENDS:
            yield from (lines[i] for i in places)
            continue
        yield from (lines[i] for i in places[:_ENDS])
        yield f"     …  {len(places) - 2 * _ENDS} more; the page shows them all"
        yield from (lines[i] for i in places[-_ENDS:])
    for sentence in sample.reasons.values():
        yield f"        {sentence}"


def generate(options: GenerateOptions) -> None:
    """Answers on stdout, a summary on stderr."""
    generated = run_generate(options)
    last_prompt = None
    for answer in generated.answers if options.out is None else ():
        if options.json:
            print(json.dumps(_answer_row(answer), ensure_ascii=False))
            continue
        if answer.group != last_prompt:
            last_prompt = answer.group
            print(f"> {visible_text(_prompt_text(answer.prompt))}")
        tokens = (
            f", {len(answer.ids)} tokens, log-prob {sum(answer.logprobs):.2f}" if isinstance(answer, Answer) else ""
        )
        print(f"--- answer {answer.sample}: {answer.finish}{tokens}")
        shown = (
            _answer_tokens(answer)
            if isinstance(answer, Answer) and options.show == "tokens"
            else [visible_text(answer.text)]
        )
        print("\n".join(shown))
    if options.out is not None:
        print(f"{generated.written} of {len(generated.answers)} answers are in {options.out}")
    sys.stdout.flush()
    print(_summary(generated), file=sys.stderr)


def _answer_row(answer: Answer | ServedAnswer) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(answer, name) for name in ("prompt", "text", "finish", "group", "sample")}
    if isinstance(answer, Answer):
        t = answer.trajectory
        row |= {"ids": t.ids, "roles": _roles(t), "logprobs": _logprobs(t)}
    return row


def _roles(trajectory: Trajectory) -> list[str]:
    return [Role(role).name.lower() for role in trajectory.roles]


def _logprobs(trajectory: Trajectory) -> list[float | None]:
    """None where the policy did not choose the token, as in the prompt."""
    return [None if isnan(value) else value for value in trajectory.behaviour_logprobs or ()]


def _number(logprob: float | None) -> str:
    return f"{'-' if logprob is None else f'{logprob:.3f}':>8}"


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n> ".join(f"{message['role']}: {message.get('content', '')}" for message in prompt)


def _answer_tokens(answer: Answer) -> Iterator[str]:
    t = answer.trajectory
    yield "   pos  role     log-prob      id  token"
    rows = zip(_roles(t), _logprobs(t), t.ids, answer.tokens, strict=True)
    for position, (role, logprob, token, text) in enumerate(rows):
        yield f"{position:6}  {role:7}  {_number(logprob)}  {token:6}  {visible_token(text)}"


def _summary(generated: Generated) -> str:
    answers = generated.answers
    tokens = sum(len(answer.ids) for answer in answers if isinstance(answer, Answer))
    ends = ", ".join(f"{count} {finish}" for finish, count in Counter(str(a.finish) for a in answers).most_common())
    speed = f", {tokens} tokens in {generated.seconds:.2f} s: {tokens / max(generated.seconds, 1e-9):.0f} tokens/s"
    said = f"{len(answers)} answer{'s' * (len(answers) != 1)} ({ends})" + (speed if tokens else "")
    return f"{said} ({generated.engine})"


def play(options: PlayOptions) -> None:
    """Each player's side of each episode."""
    for side in run_play(options):
        if options.json:
            print(json.dumps(_side_row(side), ensure_ascii=False))
            continue
        reward = "no reward" if side.reward is None else f"reward {side.reward:g}"
        turns = sum(len(t.turns) for t in side.trajectories)
        print(f"--- episode {side.episode}, {side.player}: {side.finish}, {turns} turns, {reward}")
        print("\n".join(_side_tokens(side) if options.show == "tokens" else _side_text(side)))
        if side.failure is not None:
            print(f"broken off: {visible_text(side.failure)}")


def _side_row(side: Conversation) -> dict[str, object]:
    return {
        "episode": side.episode,
        "player": side.player,
        "messages": [dict(message) for message in side.messages],
        "reward": side.reward,
        "finish": side.finish,
        "failure": side.failure,
        "samples": [
            {"ids": t.ids, "roles": _roles(t), "authors": _authors(t), "logprobs": _logprobs(t)}
            for t in side.trajectories
        ],
    }


def _side_text(side: Conversation) -> Iterator[str]:
    for message in side.messages:
        author = message.get("author", message["role"])
        yield f"{visible_text(str(author))}: {visible_text(message['content'])}"


def _side_tokens(side: Conversation) -> Iterator[str]:
    """A line per token. Only the policy's own have a log-prob, and only they train."""
    for number, (t, texts) in enumerate(zip(side.trajectories, side.tokens, strict=True)):
        if number:
            yield f"... the context was cut; sample {number + 1} continues"
        yield "   pos  author      role         log-prob      id  token"
        rows = zip(_authors(t), _roles(t), _logprobs(t), t.ids, texts, strict=True)
        for position, (author, role, logprob, token, text) in enumerate(rows):
            name = visible_text(author)[:10]
            yield f"{position:6}  {name:10}  {role:11}  {_number(logprob)}  {token:6}  {visible_token(text)}"


def _authors(trajectory: Trajectory) -> list[str]:
    return [who for start, end, who in trajectory.authors or () for _ in range(end - start)]
