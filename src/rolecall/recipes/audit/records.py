"""What an audit gets and gives. The results are plain values, so that a page can be made of them without a model."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rolecall.config.rl import RLOptions
from rolecall.policy.load import LoadedModel
from rolecall.policy.token_text import token_texts
from rolecall.rewards.records import Reward
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.types import Completion, Request


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Looked at, and as it should be."""
    WARNING = "warning"
    """Training runs, but probably does not do what was meant."""
    ERROR = "error"
    """Training fails, or learns something wrong."""
    SKIPPED = "skipped"
    """Could not be looked at; the summary says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    """The check's name, as docs/audit.md lists it."""
    level: Level
    """How bad it is."""
    summary: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    """Numbers, rows and tokens that show it."""
    advice: str = ""
    """What to change; empty where nothing has to."""

    @property
    def problem(self) -> bool:
        """True for a warning or an error."""
        return self.level in (Level.WARNING, Level.ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSample:
    """One sequence token by token. The tuples have one entry per token."""

    title: str
    """Which row and which answer it is."""
    note: str
    """How it ended and what it scored."""
    ids: tuple[int, ...]
    """Token ids, those of the prompt first."""
    pieces: tuple[bytes, ...]
    """What each token writes, as UTF-8; a token may hold a part of a character."""
    roles: tuple[str, ...]
    """`maths.roles.Role` by name."""
    verdicts: tuple[str, ...]
    """`maths.roles.Verdict` by name."""
    reasons: Mapping[str, str]
    """The sentence of each verdict that occurs."""
    logprobs: tuple[float | None, ...]
    """None where the policy did not choose."""
    score: float | None = None
    """The reward; None where there is none."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each token; a byte that is no whole character is written `\\xe2`."""
        return tuple(piece.decode("utf-8", errors="backslashreplace") for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """All findings, in the order of the checks, and samples to look at."""

    about: Mapping[str, str]
    """What was audited: model, rows, reward and how much of them was looked at."""
    findings: tuple[Finding, ...]
    """One per check."""
    samples: tuple[TokenSample, ...] = ()
    """Some sequences token by token."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that must be put right before training."""
        return tuple(f for f in self.findings if f.level is Level.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings to think about."""
        return tuple(f for f in self.findings if f.level is Level.WARNING)

    def __getitem__(self, check: str) -> Finding:
        """The finding of the check of that name."""
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(f"no check {check!r} was made; there are {', '.join(f.check for f in self.findings)}")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and the rows it would train on."""

    options: RLOptions
    """The settings. Those of `rolecall sft` have names in common with these."""
    policy: LoadedModel
    """The model."""
    rows: Rows
    """What it trains on."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids at which answers end."""
        own = self.options.sampling.stop_ids
        return self.policy.stop_ids if own is None else own

    @property
    def template(self) -> str | None:
        """The chat template: one that is given, or else the model's."""
        given = self.options.chat.chat_template_kwargs.get("chat_template")
        return given or self.policy.tokenizer.chat_template

    @property
    def conversational(self) -> bool:
        """True if rows hold messages, told by the first one."""
        row = self.rows[0]
        parts = [row.get(name) for name in ("prompt", "completion", "messages")]
        return any(isinstance(part, list | tuple) for part in parts)


@dataclass(frozen=True, kw_only=True)
class Setup(Subject):
    """What RL would train."""

    engine: Engine
    """What samples from the model."""
    reward: Reward
    """What scores its answers."""
    held_out: Rows | None = None
    """What it is evaluated on, if it is."""
    gold: Callable[[Mapping[str, Any]], str | None]
    """A row's right answer, None if it has none."""
    gold_form: str | None = None
    """One more way to write a right answer; {} stands for it."""
    exact: bool = False
    """True if every part of the reward is a verifier of rolecall's own, whose best score is known to be 1."""
    groups: int = 8
    """Prompts that are answered."""
    shown: int = 2
    """Answers shown token by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of some answers, scored twice."""

    totals: tuple[float | None, ...]
    """One per answer; None where the reward failed or does not apply."""
    again: tuple[float | None, ...]
    """The same, the second time."""
    failures: tuple[str | None, ...]
    """Why there is no total, where the reward says."""
    seconds: float
    """What the second time took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rolled:
    """Answers to the first prompts of the first step, as training would draw them."""

    rows: Sequence[int] = ()
    """The row of each request."""
    requests: Sequence[Request] = ()
    """In order; a request's `prompt` is its place in the step."""
    completions: Sequence[Completion] = ()
    """All answers, those to one prompt together."""
    answers: Sequence[str] = ()
    """What the reward reads of each."""
    scores: Scores | None = None
    """None if they could not be scored."""
    seconds: float = 0.0
    """Time in the engine."""
    failure: str = ""
    """Why there are no answers, or no scores, where there are none."""
    by_prompt: Mapping[int, int] = field(default_factory=dict)
    """The place in `requests` of each prompt number."""

    @property
    def row_of(self) -> list[int]:
        """The row of each answer."""
        return [self.rows[self.by_prompt[c.prompt]] for c in self.completions]

    @property
    def noise(self) -> float:
        """How far the same answer's scores lay apart at most."""
        pairs = zip(self.scores.totals, self.scores.again, strict=True) if self.scores else ()
        return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def ok(check: str, summary: str, *evidence: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(check=check, level=Level.OK, summary=summary, evidence=evidence)


def skipped(check: str, summary: str) -> Finding:
    """A check that could not be made."""
    return Finding(check=check, level=Level.SKIPPED, summary=summary)


def warning(check: str, summary: str, *evidence: str, advice: str) -> Finding:
    """A check that found something to think about."""
    return Finding(check=check, level=Level.WARNING, summary=summary, evidence=evidence, advice=advice)


def error(check: str, summary: str, *evidence: str, advice: str) -> Finding:
    """A check that found something that must be put right."""
    return Finding(check=check, level=Level.ERROR, summary=summary, evidence=evidence, advice=advice)


_LONGEST = 60
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def named(tokenizer: Any, token: int) -> str:
    """A token with its id: `'<|im_end|>' (258)`."""
    return f"{token_texts(tokenizer, [token])[0]!r} ({token})"


def named_all(tokenizer: Any, ids: Iterable[int]) -> str:
    """Several tokens with their ids."""
    return ", ".join(named(tokenizer, i) for i in ids) or "none"


def quoted(text: Any) -> str:
    """A text as Python would write it, cut to a length that fits a line."""
    shown = text if isinstance(text, str) else str(text)
    return repr(shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…")


def share(part: int, whole: int) -> str:
    """`3 of 8 (38%)`."""
    return f"{part} of {whole} ({part / max(1, whole):.0%})"


def is_text(tokenizer: Any, token: int) -> bool:
    """True if the token is a piece of ordinary text; those made for a purpose are written `<…>` or `[…]`.

    Told by the name because a tokenizer marks as special whatever its settings call eos or pad, letters too.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    return name is not None and not _SPECIAL.fullmatch(name)


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that are no text, those too that the settings give no part to."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def encoded(tokenizer: Any, text: str) -> tuple[int, ...] | None:
    """The text's tokens and none around it; None if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair, which JSON can hold
        return None
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
