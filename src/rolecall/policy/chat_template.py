"""A tokenizer's chat template: conversations as text, and where an answer stands in it."""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message with "role" and "content", and whatever else the template knows (tool calls, a name)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSpan:
    """Where an assistant message stands in the text that ends with it, in characters."""

    prompt: str
    """What the model is given: the messages before, and the generation prompt."""
    text: str
    """The messages before and the answer."""
    start: int
    """Where the model would have begun to write: after the generation prompt, as far as the text contains it."""
    stop: int
    """Start of the end-of-turn token."""
    end: int
    """End of it. Equal to `stop` if the template has none."""

    @property
    def follows_prompt(self) -> bool:
        """False if the generation prompt holds something that the finished message lacks, such as a bare `<think>`."""
        return self.start == len(self.prompt)


class ChatTemplate:
    """A tokenizer's chat template with the options it is rendered with."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None,
        stop_ids: Collection[int] | None,
    ) -> None:
        if not tokenizer.chat_template and "chat_template" not in (kwargs or {}):
            raise ValueError(
                "the tokenizer has no chat template, so messages cannot be rendered: give prompts as plain text, "
                "or set tokenizer.chat_template"
            )
        if not tokenizer.is_fast:
            raise ValueError("roles need the character span of each token, which only fast tokenizers know: use one")
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        if self.kwargs.get("tools") and _ignores_tools(
            tokenizer, self.kwargs.get("chat_template"), str(tokenizer.chat_template)
        ):
            warnings.warn(
                "the rows or the environment bring tools, but the model's chat template does not show them: the model is "
                "not told which tools it has; use a model whose template does, or put them into the system message",
                stacklevel=4,
            )
        self.stop_ids = frozenset(stop_ids_of(tokenizer, stop_ids))

    def text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as text. No messages and no generation prompt is no text; some templates fail on it."""
        if not messages and not add_generation_prompt:
            return ""
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.kwargs,
        )

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a rendered text and the span of characters each stands for."""
        check_unicode(text)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def answer(self, messages: Sequence[Message], k: int) -> AnswerSpan:
        """Where messages[k] stands. Its turn ends with the first stop id after what it says."""
        prompt, text = self.text(messages[:k], True), self.text(messages[: k + 1], False)
        start = common_length(prompt, text)
        content = messages[k].get("content")
        content = content.strip() if isinstance(content, str) else ""
        found = text.find(content, start)
        after = start if found < 0 else found + len(content)
        ids, spans = self.encode(text[after:])
        stops = (span for i, span in zip(ids, spans, strict=True) if i in self.stop_ids)
        # Without a stop id the turn ends with the content, or with the text where the template rewrote the content.
        none = (0, 0) if found >= 0 else (len(text) - after,) * 2
        first, last = next(stops, none)
        return AnswerSpan(prompt=prompt, text=text, start=start, stop=after + first, end=after + last)

    def contents(
        self, history: Sequence[Message], new_messages: Sequence[Message], *, after: str, offset: int
    ) -> list[tuple[int, int]]:
        """[start, end) in characters of what each new message says.

        Found by rendering once more with a marker in the place of each content. Where that does not line up (a template
        that looks into the content), all of the new text counts as said.
        """
        markers = [f"\ue000{i}\ue001" for i in range(len(new_messages))]
        marked = [{**message, "content": marker} for message, marker in zip(new_messages, markers, strict=True)]
        shape = self.text([*history, *marked], True)
        if not shape.startswith(after[:offset]):
            return [(offset, len(after))]
        spans, cursor, position = [], offset, offset
        for message, marker in zip(new_messages, markers, strict=True):
            at, content = shape.find(marker, cursor), message.get("content")
            frame = shape[cursor:at]
            if at < 0 or not isinstance(content, str) or not after.startswith(frame, position):
                return [(offset, len(after))]
            position += len(frame)
            said = content if after.startswith(content, position) else content.strip()
            if not after.startswith(said, position):
                return [(offset, len(after))]
            spans.append((position, position + len(said)))
            position, cursor = position + len(said), at + len(marker)
        return spans if after[position:] == shape[cursor:] else [(offset, len(after))]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading elements agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] | None) -> tuple[int, ...]:
    if stop_ids is not None:
        return tuple(stop_ids)
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def check_unicode(text: str) -> None:
    """Raise ValueError for what JSON and Python can hold and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"it holds {half}, half of a surrogate pair, which is not valid Unicode") from error


@lru_cache(maxsize=64)
def _ignores_tools(tokenizer: PreTrainedTokenizerBase, template: str | None, own: str) -> bool:
    """Whether a question reads the same with a tool and without. `template` takes the place of the tokenizer's own."""
    tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
    question = [{"role": "user", "content": "?"}]
    texts = []
    for tools in (None, [tool]):
        try:
            texts.append(tokenizer.apply_chat_template(question, tokenize=False, tools=tools, chat_template=template))
        except Exception:  # a template is a program of the model's author and may raise anything
            return False
    return texts[0] == texts[1]


def template_kwargs(
    row: Mapping[str, Any], base: Mapping[str, Any] | None = None, *, plain: bool = False
) -> dict[str, Any]:
    """The run's template settings, over them the row's own, and its tools.

    `plain`: the row is plain text, which no template sees; tools or settings of its own are then an error.
    """
    own, tools = _settings(row.get("chat_template_kwargs")), tools_of(row)
    if plain and (own or tools):
        name = "tools" if tools else "chat_template_kwargs"
        raise ValueError(
            f"it has `{name}`, which only a chat template can use, but its prompt is plain text: give the prompt as "
            f"messages, or drop the column `{name}`"
        )
    return {**(base or {}), **own, **({"tools": tools} if tools else {})}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's tools: JSON schemas, as a list or as JSON text; none if there is no such column or it is empty.

    Entries that are None are left out: tables fill in every key that any tool has.
    """
    found = _parsed(row.get("tools"), "tools", "a list of JSON schemas")
    if not found:
        return []
    if not isinstance(found, list | tuple) or not all(isinstance(tool, Mapping) for tool in found):
        raise ValueError(f"`tools` must be a list of JSON schemas (or its JSON text), it is {_shown(found)}")
    kept: list[dict[str, Any]] = _without_none(found)
    return kept


def _settings(value: Any) -> dict[str, Any]:
    found = _parsed(value, "chat_template_kwargs", "an object")
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"`chat_template_kwargs` must be an object (or its JSON text), it is {_shown(found)}")
    return {str(name): entry for name, entry in found.items() if entry is not None}


def _parsed(value: Any, name: str, what: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{name}` must be {what} or its JSON text, it is {_shown(value)}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
