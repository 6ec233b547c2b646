"""From a row to tokens with roles: the one place where prompts and demonstrations are rendered for a policy."""

from collections.abc import Mapping
from typing import Any

from rolecall.config.parts import ChatOptions
from rolecall.policy.load import LoadedModel
from rolecall.policy.render import Rendered, render, render_pair
from rolecall.policy.row_template import template_kwargs
from rolecall.tasks.kinds import Record


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
