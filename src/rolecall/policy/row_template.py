"""What a row says to the chat template: its `tools` and its `chat_template_kwargs`."""

import json
from collections.abc import Mapping
from typing import Any


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
