"""How a run put prompts to its model, kept in run.json, so that eval, generate and play put them in the same way."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rolecall.config.parts import ChatOptions
from rolecall.config.resume import saved_settings
from rolecall.tasks.rows import Row, Rows, place_of

Style = Literal["chat", "text"]
_LOOKED_AT = 200
"""Rows that decide what all are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompting:
    """How a run's prompts became tokens; nothing is known of a model that no run made, or an older version."""

    style: Style | None = None
    """chat: messages through the chat template. text: plain. None: unknown, or both."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """Its system prompt and what its template was told."""
    env: str | None = None
    """The environment it played in, by name."""
    env_prompt: str | None = None
    """What took the place of that environment's description."""

    def filled(self, chat: ChatOptions) -> ChatOptions:
        """The options of a call; what they leave out is as in the run."""
        return replace(
            chat,
            system_prompt=self.chat.system_prompt if chat.system_prompt is None else chat.system_prompt,
            chat_template_kwargs={**self.chat.chat_template_kwargs, **chat.chat_template_kwargs},
        )

    def prompt_in(self, env: object) -> str | None:
        """What the run read first in an environment; None in another one, which says itself what is to be read."""
        return self.env_prompt if env == self.env else None


def style_of(rows: Rows) -> Style | None:
    """How the prompts of these rows are put to a model."""
    found = {_style(row) for row in islice(rows, _LOOKED_AT)}
    return found.pop() if len(found) == 1 else None


def _style(row: Mapping[str, Any]) -> Style:
    value = next((row[name] for name in ("messages", "prompt", "chosen", "text") if row.get(name) is not None), "")
    return "text" if isinstance(value, str) else "chat"


def prompting_of(model: str) -> Prompting:
    """How the run that `model` lies in, or is, was trained."""
    path = Path(model).expanduser()
    inside = {"model": path.parent, "checkpoints": path.parent.parent}
    for run in (path, inside.get(path.name), inside.get(path.parent.name)):
        if run is not None and (run / "run.json").is_file():
            style = json.loads((run / "run.json").read_text()).get("prompts")
            if style not in ("chat", "text"):
                return Prompting()
            saved = saved_settings(str(run)) if style == "chat" else {}
            prompt = (saved.get("agent") or {}).get("prompt")
            return Prompting(
                style=style, chat=ChatOptions(**saved.get("chat", {})), env=saved.get("env"), env_prompt=prompt
            )
    return Prompting()


class AsMessages:
    """Rows whose plain prompts are what a user says."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self.columns = rows, rows.columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return _asked(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(_asked, self._rows)

    def place(self, index: int) -> str:
        return place_of(self._rows, index)


def _asked(row: Row) -> Row:
    prompt = row.get("prompt")
    return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else row
