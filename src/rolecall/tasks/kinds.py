"""What rows are for: TRL's and verl's formats, recognised by their columns and used unchanged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rolecall.policy.chat_template import tools_of
from rolecall.tasks.rows import RowError, Rows

Kind = Literal["prompt", "prompt_completion", "messages", "text", "preference"]
Text = str | Sequence[Mapping[str, Any]]
"""Plain text, or messages with `role` and `content`."""

_NEEDS: dict[Kind, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "messages": ("messages",),
    "text": ("text",),
}
_ORDER: tuple[Kind, ...] = ("prompt", "prompt_completion", "messages", "text", "preference")
_MISTAKEN = {"question": "prompt", "problem": "prompt", "instruction": "prompt", "conversations": "messages"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A row by meaning. Fields that its kind does not have are None."""

    kind: Kind
    """What it is for."""
    row: Mapping[str, Any]
    """The row itself, all columns."""
    prompt: Text | None = None
    """Of a preference without one: what both answers begin with."""
    completion: Text | None = None
    """The demonstration of a prompt_completion row."""
    chosen: Text | None = None
    """The better answer, without the prompt."""
    rejected: Text | None = None
    """The worse answer, without the prompt."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A whole conversation."""
    text: str | None = None
    """A whole text."""
    tools: Sequence[Any] = field(default_factory=tuple)
    """JSON schemas of its tools, for the chat template."""


def kind_of(rows: Rows, *, among: Sequence[Kind] | None = None, job: str = "training needs") -> Kind:
    """Recognise rows by their columns; `among` are the kinds that a job takes. A row of verl is a "prompt" row."""
    if not rows.columns:
        raise RowError("there are no rows")
    for kind, needs in _NEEDS.items():
        if (among is None or kind in among) and set(needs) <= set(rows.columns):
            return kind
    known = [(column, _MISTAKEN[column]) for column in rows.columns if column in _MISTAKEN]
    hint = f"rename `{known[0][0]}` to `{known[0][1]}`" if known else "rename the columns"
    *others, last = (" and ".join(f"`{name}`" for name in _NEEDS[kind]) for kind in among or _ORDER)
    needed = f"{', '.join(others)}, or {last}" if others else last
    raise RowError(f"the rows have the columns {', '.join(rows.columns)}; {job} {needed}: {hint}")


def records(rows: Rows, kind: Kind | None = None) -> Iterator[Record]:
    """Every row by meaning, in order. `kind` overrides what the columns say (to train on the prompts of pairs, say)."""
    kind = kind or kind_of(rows)
    for number, row in enumerate(rows):
        yield record(row, kind, number=number)


def record(row: Mapping[str, Any], kind: Kind, *, number: int | str = 0) -> Record:
    """One row by meaning; `number`, or a place such as "data.jsonl, line 7", is for messages."""
    number = f"row {number}" if isinstance(number, int) else number
    fields = {name: _checked(row, name, number) for name in _NEEDS[kind]}
    if kind == "preference":
        sides = [fields["chosen"], fields["rejected"]]
        # A text beside conversations that begin with somebody else's message repeats what they begin with.
        whole = isinstance(row.get("prompt"), str) and all(
            not isinstance(side, str) and side[0]["role"] != "assistant" for side in sides
        )
        if row.get("prompt") is not None and not whole:
            fields["prompt"] = _checked(row, "prompt", number)
        else:
            fields["prompt"], fields["chosen"], fields["rejected"] = _parted(
                fields["chosen"], fields["rejected"], number
            )
        if fields["chosen"] == fields["rejected"]:
            raise RowError(f"{number}: `chosen` and `rejected` are the same; a preference needs a difference")
    if kind == "messages" and isinstance(fields["messages"], str):
        raise RowError(f"{number}: `messages` must be a list of messages, it is a text; name the column `text`")
    if kind == "text" and not isinstance(fields["text"], str):
        raise RowError(f"{number}: `text` must be a text; name a list of messages `messages`")
    try:
        tools = tools_of(row)
    except ValueError as error:
        raise RowError(f"{number}: {error}") from error
    return Record(kind=kind, row=row, tools=tools, **fields)


def _checked(row: Mapping[str, Any], name: str, number: str) -> Any:
    """The column's value if it is text or messages."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        if all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value):
            return value
        raise RowError(f"{number}: every message of `{name}` must be an object with `role` and `content`")
    what = "missing" if value is None else "an empty list" if value in ([], ()) else f"a {type(value).__name__}"
    raise RowError(f"{number}: `{name}` must be a text or a list of messages, it is {what}")


def _parted(chosen: Any, rejected: Any, number: str) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of answers that repeat their prompt: what they have in common in front."""
    same = 0
    for mine, theirs in zip(chosen, rejected, strict=False):
        if mine != theirs:
            break
        same += 1
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # the space belongs to the word that follows it
    if not same:
        raise RowError(f"{number}: `chosen` and `rejected` have nothing in common in front; add a `prompt` column")
    if same in (len(chosen), len(rejected)):
        raise RowError(f"{number}: one of `chosen` and `rejected` is the beginning of the other; add a `prompt` column")
    return chosen[:same], chosen[same:], rejected[same:]
