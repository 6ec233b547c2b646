"""From a row to tokens with roles: the one place where prompts and demonstrations are rendered for a policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Generic, TypeVar

from rolecall.config.parts import ChatOptions
from rolecall.policy.chat_template import template_kwargs
from rolecall.policy.load import LoadedModel
from rolecall.policy.render import Rendered, render, render_pair
from rolecall.tasks.kinds import Kind, Record, kind_of, record
from rolecall.tasks.rows import Row, RowError, Rows, place_of
from rolecall.tasks.streams import Stream
from rolecall.types import Trajectory

Side = TypeVar("Side")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(Generic[Side]):
    """Two answers to one prompt, prompt included: as ids for a reward model, as trajectories for a policy."""

    chosen: Side
    """The better one."""
    rejected: Side
    """The worse one."""
    margin: float = 0.0
    """By how much a reward model should score the better one higher before the loss is at its middle, log 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs to learn from or to be measured on, and what was left out."""

    pairs: Any
    """A tuple of `Pair` in the order of the rows; of rows that are streamed, a stream of them."""
    too_long: int = 0
    """Rows with a side longer than the limit."""
    same: int = 0
    """Rows whose sides are the same, as written or as the model reads them."""

    def in_words(self) -> str:
        """One sentence for people."""
        left_out = [f"{n} {why}" for n, why in ((self.too_long, "too long"), (self.same, "the same twice")) if n]
        return f"{len(self.pairs)} pairs" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def read_pairs(
    rows: Rows,
    render: Callable[[Record, Any, int], Side],
    *,
    longest: int,
    limit: int | None = None,
    ids: Callable[[Side], Sequence[int]] = lambda side: side,  # type: ignore[assignment, return-value]
) -> Pairs:
    """The first `limit` rows as pairs; of a stream, as they come.

    `render(record, answer, number)` is one side as the model reads it, at most `longest` tokens, which `ids` gives.
    """
    kind_of(rows, among=("preference",), job="a preference needs")
    too_long = same = 0

    def made(number: int, row: Row) -> Pair[Side] | None:
        nonlocal too_long, same
        if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
            same += 1
            return None
        place = place_of(rows, number)
        found = record(row, "preference", number=place)
        try:
            chosen, rejected = (render(found, answer, number) for answer in (found.chosen, found.rejected))
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise RowError(f"{place} cannot be rendered: {' '.join(str(error).split())}") from error
        if not ids(chosen) or not ids(rejected):
            raise RowError(f"{place}: prompt and answer are empty, and the tokenizer has no end-of-text token")
        if ids(chosen) == ids(rejected):
            same += 1
        elif max(len(ids(chosen)), len(ids(rejected))) > longest:
            too_long += 1
        else:
            return Pair(chosen=chosen, rejected=rejected, margin=_margin(row, place))
        return None

    if isinstance(rows, Stream):
        return Pairs(pairs=rows.kept(made))
    numbered = zip(range(len(rows) if limit is None else limit), rows, strict=False)
    pairs = [pair for number, row in numbered if (pair := made(number, row)) is not None]
    if not pairs:
        raise RowError(
            f"no pair is left of {too_long + same} rows: {too_long} have a side longer than {longest} tokens, in {same} "
            "both sides are the same; raise max_length, or look at the rows"
        )
    return Pairs(pairs=tuple(pairs), too_long=too_long, same=same)


def _margin(row: Row, place: str) -> float:
    margin = row.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
        raise RowError(f"{place}: `margin` must be a finite number, it is {margin!r}")
    return float(margin)


_DEMONSTRATIONS: tuple[Kind, ...] = ("prompt_completion", "messages", "text")


def rendered_prompt(row: Mapping[str, Any], *, policy: LoadedModel, chat: ChatOptions) -> Rendered:
    """A prompt to be answered: messages through the chat template with the row's tools, text as it is."""
    prompt = row["prompt"]
    plain = isinstance(prompt, str)
    return render(
        policy.tokenizer,
        prompt,
        system_prompt=None if plain else chat.system_prompt,
        chat_template_kwargs=template_kwargs(row, chat.chat_template_kwargs, plain=plain) or None,
        add_generation_prompt=None if plain else True,
        stop_ids=policy.stop_ids,
    )


def rendered_row(found: Record, *, policy: LoadedModel, chat: ChatOptions) -> Rendered:
    """A demonstration: what the assistant says trains, the rest is given."""
    texts = (found.prompt, found.completion) if found.messages is None else (found.messages,)
    plain = all(text is None or isinstance(text, str) for text in texts)
    how: dict[str, Any] = {
        "chat_template_kwargs": template_kwargs(found.row, chat.chat_template_kwargs, plain=plain) or None,
        "stop_ids": policy.stop_ids,
    }
    if found.messages is not None:
        return render(policy.tokenizer, found.messages, train="assistant", system_prompt=chat.system_prompt, **how)
    if found.text is not None:
        first, rest = found.text[:1], found.text[1:]
        return render_pair(policy.tokenizer, first, rest, **how)
    assert found.prompt is not None
    assert found.completion is not None
    system = None if isinstance(found.prompt, str) else chat.system_prompt
    return render_pair(policy.tokenizer, found.prompt, found.completion, system_prompt=system, **how)


def demonstration_kind(rows: Rows) -> Kind:
    """What to imitate of rows; those with `messages` beside a prompt are conversations."""
    return kind_of(rows, among=_DEMONSTRATIONS, job="sft needs rows with")


def rendered_rows(rows: Rows, policy: LoadedModel, chat: ChatOptions, *, max_length: int) -> tuple[Any, int]:
    """(demonstrations as trajectories, how many were left out because they are too long); of a stream, as they come."""
    kind, limit = demonstration_kind(rows), min(max_length, policy.context_length)

    def made(number: int, row: Row) -> Trajectory | None:
        found = record(row, kind, number=place_of(rows, number))
        try:
            rendered = rendered_row(found, policy=policy, chat=chat)
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise RowError(f"{place_of(rows, number)} cannot be rendered: {' '.join(str(error).split())}") from error
        return _demonstration(rendered, number) if len(rendered.ids) <= limit else None

    if isinstance(rows, Stream):
        return rows.kept(made), 0
    kept = [found for number in range(len(rows)) if (found := made(number, rows[number])) is not None]
    if not kept:
        raise RowError(f"all {len(rows)} rows are longer than max_length {limit}; raise it or shorten the rows")
    return kept, len(rows) - len(kept)


def _demonstration(rendered: Rendered, number: int) -> Trajectory:
    return Trajectory(ids=rendered.ids, roles=rendered.roles, turns=rendered.turns, author="demonstrator", group=number)


def rendered_pairs(
    rows: Rows, policy: LoadedModel, chat: ChatOptions, *, max_length: int, limit: int | None = None
) -> Pairs:
    """Preferences as pairs of trajectories, of the first `limit` rows; of a stream, as they come."""

    def render_side(found: Record, answer: Any, number: int) -> Trajectory:
        return _demonstration(rendered_row(replace(found, completion=answer), policy=policy, chat=chat), number)

    longest = min(max_length, policy.context_length)
    return read_pairs(rows, render_side, longest=longest, limit=limit, ids=lambda side: side.ids)
