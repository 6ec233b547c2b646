"""What becomes of a conversation as it grows, by name: the `agent.context` of a run, or a row's `context_manager`.

    append     nothing: when the context is full, the episode ends
    window     when it is full, the oldest turns are dropped
    memory     the same, but what the policy wrote in <note>…</note> stays
    summary    before it is full, the policy writes a summary, and goes on from the prompt and that
    thoughts   <think>…</think> of earlier turns is dropped as the next one begins

Each new context begins a new sample, in which all that is kept of the past is only read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from rolecall.config.agents import AgentOptions
from rolecall.errors import UserError
from rolecall.tasks.env import Message

COLUMN = "context_manager"
"""The column in which a row names its own."""

THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
"""One that was cut off goes to the end of the turn."""

_NOTE = re.compile(r"<note>(.*?)</note>", re.DOTALL)

QUESTION: Message = {
    "role": "user",
    "content": "Summarise the conversation so far for yourself: what is known and what is left to do. From here on you will "
    "read only the task and your summary.",
    "author": "memory",
}
"""What the policy is asked when it has to summarise."""


def context_of(row: Mapping[str, Any], options: AgentOptions) -> str:
    """The name that a row, or else the run, gives."""
    names = get_args(get_type_hints(AgentOptions)["context"])
    name = row.get(COLUMN)
    if name is not None and name not in names:
        raise UserError(f"a row's {COLUMN} is {name!r}: choose one of {', '.join(names)}")
    return options.manager if name is None else str(name)


def notes_in(messages: Sequence[Message]) -> list[str]:
    """What the policy noted down in these messages."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return [note for text in said for found in _NOTE.findall(text) if (note := " ".join(found.split()))]


def noted(notes: Sequence[str]) -> list[Message]:
    """The notes as the policy reads them."""
    text = "\n".join(["Your notes:", *(f"- {note}" for note in notes)])
    return [{"role": "user", "content": text, "author": "memory"}] if notes else []


def summary_of(text: str) -> list[Message]:
    """A summary as the policy reads it."""
    return [{"role": "user", "content": f"Your summary:\n{text}", "author": "memory"}] if text.strip() else []
