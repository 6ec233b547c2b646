"""Messages to token ids with one role per token.

A role is found by rendering prefixes of the conversation and comparing text, never by looking for token values: a stop
id may stand in a user's message. What the policy wrote starts where the generation prompt ends.

    <|im_start|>user\\n hi <|im_end|>\\n <|im_start|>assistant\\n  hello   <|im_end|>  \\n
    P            P      P  P         P   P            P            C      S          P

Sampled ids are never decoded and encoded again, because that may give other ids. The next turn of a conversation is
appended to them; where a template rewrites the past, that is said once and a new sample starts from the new text.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rolecall.maths.roles import Role
from rolecall.policy.chat_template import (
    AnswerSpan,
    ChatTemplate,
    Message,
    check_unicode,
    common_length,
    stop_ids_of,
)

Train = Literal["sampled", "assistant", "last_assistant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Token ids with their roles."""

    ids: tuple[int, ...]
    """Token ids, special tokens included."""
    roles: tuple[int, ...]
    """One `maths.roles.Role` per token."""
    turns: tuple[tuple[int, int], ...] = ()
    """[start, end) of each turn that trains, its stop token included."""
    new_sample: bool = False
    """True: the template rewrote the past, so these ids do not continue the ones before; start a new trajectory."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.roles):
            raise ValueError(f"rendered text has {len(self.ids)} ids but {len(self.roles)} roles; each id has one role")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixReport:
    """Whether a template only ever appends. True in a condition if it does."""

    preserved: bool
    """True: the text of a conversation is a prefix of the text of any longer one."""
    message: int | None = None
    """Number of the first message that rewrites what was before it."""
    before: str = ""
    """What stood where the texts part, without that message."""
    after: str = ""
    """What stands there with it."""

    def __bool__(self) -> bool:
        return self.preserved


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Sequence[Message],
    *,
    train: Train = "sampled",
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    stop_ids: Collection[int] | None = None,
    observed_from: int | None = None,
) -> Rendered:
    """Render a conversation, or encode a plain prompt.

    train="sampled": everything is PROMPT, for text that is only there to be answered. "assistant": of every assistant
    message what the model would have written is CONTENT and its end of turn STOP. "last_assistant": of the last only.
    `add_generation_prompt` defaults to whether the last message is somebody else's; `stop_ids` to the tokenizer's.
    With "sampled", what the messages from number `observed_from` on say is OBSERVATION.
    """
    if train not in ("sampled", "assistant", "last_assistant"):
        raise ValueError(f"unknown train {train!r}; choose 'sampled', 'assistant' or 'last_assistant'")
    if isinstance(messages, str):
        if system_prompt is not None:
            raise ValueError("a system prompt needs messages: put it into the plain prompt text instead")
        if train != "sampled":
            raise ValueError("a plain text has no assistant messages to train on: use render_pair with a completion")
        ids = _encode_prompt(tokenizer, messages)
        return Rendered(ids=ids, roles=(int(Role.PROMPT),) * len(ids))
    messages = _with_system_prompt(messages, system_prompt)
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = {"sampled": [], "assistant": assistants, "last_assistant": assistants[-1:]}[train]
    template = ChatTemplate(tokenizer, chat_template_kwargs, stop_ids)
    if observed_from is not None:
        return _render_observed(template, messages, observed_from)
    return _render_messages(template, messages, wanted, add_generation_prompt)


def render_pair(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    *,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    stop_ids: Collection[int] | None = None,
) -> Rendered:
    """Render a demonstration {"prompt", "completion"}: the prompt is PROMPT, what the model would have written CONTENT,
    its end STOP.

    Two texts are joined as they are and closed with the first stop id. If either is a list of messages, a text beside
    it counts as one message: a user's prompt, an assistant's completion.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if system_prompt is not None:
            raise ValueError("a system prompt needs messages: put it into the plain prompt text instead")
        return _render_texts(tokenizer, prompt, completion, stop_ids_of(tokenizer, stop_ids))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    before = _with_system_prompt(before, system_prompt)
    wanted = [len(before) + i for i, message in enumerate(answer) if message["role"] == "assistant"]
    if not wanted:
        raise ValueError("the completion holds no assistant message, so there is nothing to train on")
    template = ChatTemplate(tokenizer, chat_template_kwargs, stop_ids)
    return _render_messages(template, [*before, *answer], wanted, False)


def continue_conversation(
    tokenizer: PreTrainedTokenizerBase,
    ids_so_far: Sequence[int],
    roles_so_far: Sequence[int],
    new_messages: Sequence[Message],
    *,
    history: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    stop_ids: Collection[int] | None = None,
) -> Rendered:
    """The ids so far, then the template text of the new messages and the prompt for the next answer.

    `history` is the conversation the ids stand for; its last message is the sampled answer. The ids so far come back
    untouched. What the new messages say is OBSERVATION, the template around it PROMPT. An answer that was cut off is
    closed with the template's end of turn, as PROMPT because the policy did not choose it.

    If the template changes earlier text when messages are added, the result is a full rendering flagged `new_sample`:
    the first prompt stays PROMPT, all that follows is OBSERVATION.
    """
    if not history or history[-1]["role"] != "assistant":
        raise ValueError("the history must end with the assistant message that was sampled last")
    if len(ids_so_far) != len(roles_so_far):
        raise ValueError(f"there are {len(ids_so_far)} ids so far but {len(roles_so_far)} roles; each id has one role")
    template = ChatTemplate(tokenizer, chat_template_kwargs, stop_ids)
    answer = template.answer(history, len(history) - 1)
    after = template.text([*history, *new_messages], True)
    if not (answer.follows_prompt and after.startswith(answer.text[: answer.end])):
        _warn_rewritten(stacklevel=3)
        return _new_sample(template, after, ids_so_far, roles_so_far)
    stopped = roles_so_far[-1] == Role.STOP
    tail_start = answer.end if stopped else answer.stop
    # Encoded from the end of turn on, so that the text is split as it would be after that token.
    ids, spans = template.encode(after[answer.stop :])
    roles = [int(Role.PROMPT)] * len(after)
    for first, last in template.contents(history, new_messages, after=after, offset=answer.end):
        roles[first:last] = [int(Role.OBSERVATION)] * (last - first)
    places = [answer.stop + start for start, _ in spans]
    new = [(i, roles[place]) for i, place in zip(ids, places, strict=True) if place >= tail_start]
    if stopped and new and new[0][0] == ids_so_far[-1]:
        new = new[1:]  # a model that ends its turn by opening the next one has written this header already
    return Rendered(
        ids=(*ids_so_far, *(i for i, _ in new)),
        roles=(*roles_so_far, *(role for _, role in new)),
        turns=_runs(roles_so_far),
    )


def prefix_preserving(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message] | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    stop_ids: Collection[int] | None = None,
) -> PrefixReport:
    """Whether a conversation can go on after its sampled answers, which is what `continue_conversation` needs.

    Each answer must follow its generation prompt, and stay as it is, to the end of its turn, when messages are added.
    The default conversation has two answers that think aloud, which some templates strip from the past.
    """
    messages = _PROBE if messages is None else messages
    template = ChatTemplate(tokenizer, chat_template_kwargs, stop_ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant" or k == 0:
            continue
        answer = template.answer(messages, k)
        if not answer.follows_prompt:
            return _parting(k, answer.prompt, answer.text)
        for longer in range(k + 2, len(messages) + 1):
            text = template.text(messages[:longer], messages[longer - 1]["role"] != "assistant")
            if not text.startswith(answer.text[: answer.end]):
                return _parting(longer - 1, answer.text, text)
    return PrefixReport(preserved=True)


def _parting(message: int, before: str, after: str) -> PrefixReport:
    at = common_length(before, after)
    return PrefixReport(preserved=False, message=message, before=before[at : at + 60], after=after[at : at + 60])


_PROBE = (
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "<think>\nFirst thought.\n</think>\n\nFirst answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "<think>\nSecond thought.\n</think>\n\nSecond answer."},
    {"role": "user", "content": "Third question?"},
)


def _render_messages(
    template: ChatTemplate, messages: Sequence[Message], wanted: Sequence[int], add_generation_prompt: bool | None
) -> Rendered:
    if not messages:
        raise ValueError("there are no messages to render; give at least one")
    if add_generation_prompt is None:
        add_generation_prompt = messages[-1]["role"] != "assistant"
    text = template.text(messages, add_generation_prompt)
    roles = [int(Role.PROMPT)] * len(text)
    rewritten = False
    for k in wanted:
        answer = _trainable_answer(template, messages, k)
        if answer is None or not text.startswith(answer.text[: answer.end]):
            rewritten = True  # the text does not hold what the model would have written
            continue
        roles[answer.start : answer.stop] = [int(Role.CONTENT)] * (answer.stop - answer.start)
        roles[answer.stop : answer.end] = [int(Role.STOP)] * (answer.end - answer.stop)
    if rewritten:
        _warn_rewritten(stacklevel=4)
    return _with_roles(template, text, roles)


def _render_observed(template: ChatTemplate, messages: Sequence[Message], first: int) -> Rendered:
    """A prompt of which the messages from `first` on were heard, not given by the task."""
    text, before = template.text(messages, True), template.text(messages[:first], False)
    # Where the template does not keep the first messages apart, all that differs counts as heard.
    offset = common_length(text, before)
    roles = [int(Role.PROMPT)] * len(text)
    for start, end in template.contents(messages[:first], messages[first:], after=text, offset=offset):
        roles[start:end] = [int(Role.OBSERVATION)] * (end - start)
    return _with_roles(template, text, roles)


def _with_roles(template: ChatTemplate, text: str, roles: Sequence[int]) -> Rendered:
    """The text encoded, each token with the role of its first character: a token that begins in the template and reaches
    into an answer was not the model's to choose."""
    ids, spans = template.encode(text)
    by_token = tuple(roles[start] if start < len(roles) else int(Role.PROMPT) for start, _ in spans)
    return Rendered(ids=tuple(ids), roles=by_token, turns=_runs(by_token))


def _trainable_answer(template: ChatTemplate, messages: Sequence[Message], k: int) -> AnswerSpan | None:
    """Where messages[k] stands, or None if with it already the messages before read differently.

    A generation prompt that opens what the finished message lacks counts as far as the two agree, with a warning.
    """
    if k == 0:
        raise ValueError("the conversation begins with the assistant message to train on; it has to answer something")
    answer = template.answer(messages, k)
    if not answer.follows_prompt:
        if answer.start < common_length(template.text(messages[:k], False), answer.prompt):
            return None
        warnings.warn(
            f"the chat template's generation prompt ends in {answer.prompt[answer.start :]!r}, which the finished "
            "message lacks: put it into the message, else the model trains on an answer that does not follow its prompt",
            stacklevel=4,
        )
    return answer


def _render_texts(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, stop_ids: Sequence[int]
) -> Rendered:
    if not stop_ids:
        raise ValueError("the tokenizer has no end-of-text token to close a completion with: pass stop_ids")
    given = _encode_prompt(tokenizer, prompt)
    whole = _encode_prompt(tokenizer, prompt + completion)
    if whole[: len(given)] == given:
        chosen = whole[len(given) :]
    else:  # a token would span the seam; when sampling, the prompt's ids are given
        chosen = tuple(tokenizer(completion, add_special_tokens=False)["input_ids"])
    roles = (Role.PROMPT,) * len(given) + (Role.CONTENT,) * len(chosen) + (Role.STOP,)
    ids = (*given, *chosen, stop_ids[0])
    return Rendered(ids=ids, roles=tuple(map(int, roles)), turns=((len(given), len(ids)),))


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids of a plain text with the tokenizer's own start token, but without an end token: the text goes on."""
    check_unicode(text)
    # Callers that need the ids to fit say so themselves; the tokenizer's warning would come before that.
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id:
        bare = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        while ids and ids[-1] == tokenizer.eos_token_id and ids[-len(bare) :] != bare:
            ids.pop()
    return tuple(ids)


def _new_sample(template: ChatTemplate, text: str, ids_so_far: Sequence[int], roles_so_far: Sequence[int]) -> Rendered:
    ids, _ = template.encode(text)
    prompt = next((i for i, role in enumerate(roles_so_far) if role != Role.PROMPT), len(roles_so_far))
    same = common_length(ids_so_far[:prompt], ids)
    roles = (int(Role.PROMPT),) * same + (int(Role.OBSERVATION),) * (len(ids) - same)
    return Rendered(ids=tuple(ids), roles=roles, new_sample=True)


def _warn_rewritten(*, stacklevel: int) -> None:
    warnings.warn(
        "the chat template rewrites earlier turns when messages are added (as templates that strip past thinking do): "
        "turns whose text it changed are not trained, and a conversation goes on as a new sample with its past only read",
        stacklevel=stacklevel,
    )


def _with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages with the system prompt in front, unless they bring their own."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def _runs(roles: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[start, end) of each unbroken run of content and stop; a stop ends its run."""
    runs, start = [], None
    for t, role in enumerate([*roles, int(Role.PROMPT)]):
        chosen = role in (Role.CONTENT, Role.STOP)
        if chosen and start is None:
            start = t
        if start is not None and (not chosen or role == Role.STOP):
            runs.append((start, t + 1 if chosen else t))
            start = None
    return tuple(runs)
