"""From a row to tokens with roles: the one place where prompts and demonstrations are rendered for a policy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rolecall.config.parts import ChatOptions
from rolecall.policy.load import LoadedModel
from rolecall.policy.render import Rendered, render, render_pair
from rolecall.policy.row_template import template_kwargs
from rolecall.recipes.preferences import Pairs, read_pairs
from rolecall.tasks.kinds import Kind, Record, kind_of, record
from rolecall.tasks.rows import Row, RowError, Rows, place_of
from rolecall.tasks.streams import Stream
from rolecall.types import Trajectory

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
