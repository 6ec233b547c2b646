"""Checks of the model, its tokenizer and its chat template: stop ids, padding, vocabulary, template, history, start token."""

from collections import Counter
from collections.abc import Mapping
from math import log
from typing import Any

from rolecall.policy.render import prefix_preserving
from rolecall.recipes.audit.records import (
    Finding,
    Rolled,
    Subject,
    error,
    is_text,
    named,
    named_all,
    ok,
    quoted,
    share,
    skipped,
    special_ids,
    warning,
)
from rolecall.types import Finish

_MEANT = log(0.1)
"""A token drawn at this log-prob or more is what the model wants to write, not an accident of sampling."""
_OFTEN = 0.1
"""Of all answers."""
_MARK = "\ue000answer\ue001"
_TINY_ROW = 1e-3
"""Of the median norm: the embedding of a token that was never trained."""


def check_stops(subject: Subject, rolled: Rolled) -> Finding:
    """Whether answers end where the model and its template end them."""
    check, tokenizer = "stop-ids", subject.policy.tokenizer
    stops, own = subject.stop_ids, subject.options.sampling.stop_ids
    ending = f"answers end at {named_all(tokenizer, stops)}"
    if not stops and not subject.options.sampling.stop_strings:
        return error(
            check,
            "nothing ends an answer: there is no stop id and no stop string, so every answer runs to its limit",
            advice="set eos_token of the tokenizer or eos_token_id of the generation config, or give sampling.stop_ids",
        )
    head = subject.policy.model.get_output_embeddings().weight.shape[0]
    if odd := [i for i in stops if not 0 <= i < head or tokenizer.convert_ids_to_tokens(i) is None]:
        return error(
            check,
            f"stop id {odd[0]} is not a token of this model, so it can never be drawn",
            f"{ending}; the head has {head} rows, the tokenizer {len(tokenizer)} tokens",
            advice=_where_stops_come_from(own),
        )
    if own is None and (text := [i for i in stops if is_text(tokenizer, i)]):
        return error(
            check,
            f"the model's files declare {named(tokenizer, text[0])} a stop id, which is ordinary text: answers end "
            "wherever it stands",
            f"{ending}; tokenizer's eos: {tokenizer.eos_token!r}; generation config's: {_declared(subject)}",
            advice=_where_stops_come_from(own),
        )
    return (
        _template_end(subject, ending)
        or _goes_on(subject, rolled, ending)
        or _disagreement(subject, ending)
        or ok(check, f"{ending}, as the model{' and its template' if subject.conversational else ''} would have it")
    )


def _template_end(subject: Subject, ending: str) -> Finding | None:
    """The template's end of turn is a stop id, where prompts go through the template."""
    tokenizer = subject.policy.tokenizer
    tail = _after_answer(subject) if subject.conversational else None
    if tail is None:
        return None
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    if set(ids) & set(subject.stop_ids) or any(s in tail for s in subject.options.sampling.stop_strings):
        return None
    special = [i for i in ids if i in special_ids(tokenizer)]
    wrote = named(tokenizer, special[0]) if special else quoted(tail)
    return error(
        "stop-ids",
        f"the chat template ends a turn with {wrote}, which does not end an answer",
        f"{ending}; after an answer the template writes {quoted(tail)}",
        advice=f"add it to eos_token_id in generation_config.json, or give --sampling.stop_ids {special[0]}"
        if special
        else "give the template an end-of-turn token that is a stop id, or name a text with sampling.stop_strings",
    )


def _goes_on(subject: Subject, rolled: Rolled, ending: str) -> Finding | None:
    """No answer holds a special token that the model is sure of, and goes on after it."""
    tokenizer = subject.policy.tokenizer
    # A pad token that is sampled is judged by `check_padding`, unless the model's files call it an end as well.
    pad = {tokenizer.pad_token_id} - set(subject.policy.stop_ids)
    special = special_ids(tokenizer) - set(subject.stop_ids) - pad
    held: Counter[int] = Counter()
    for c in rolled.completions:
        drawn = zip(c.ids, c.behaviour_logprobs, strict=True)
        held.update({i for i, logprob in drawn if i in special and logprob >= _MEANT})
    if not held:
        return None
    token = max(held, key=lambda i: held[i])
    if held[token] < _OFTEN * len(rolled.completions):
        return None
    cut = sum(c.finish is Finish.LENGTH for c in rolled.completions)
    return error(
        "stop-ids",
        f"the model writes {named(tokenizer, token)} and goes on: it is probably its end of turn, but not a stop id",
        f"it occurs in {share(held[token], len(rolled.completions))} answers, of which {cut} ran to the length limit",
        ending,
        advice=f"add {token} to eos_token_id in generation_config.json, or give --sampling.stop_ids {token}",
    )


def _disagreement(subject: Subject, ending: str) -> Finding | None:
    tokenizer, own = subject.policy.tokenizer, subject.options.sampling.stop_ids
    left = [i for i in subject.policy.stop_ids if own is not None and i not in own]
    if left:
        return warning(
            "stop-ids",
            f"sampling.stop_ids leaves out {named_all(tokenizer, left)}, at which the model ends its answers",
            ending,
            advice="leave sampling.stop_ids out to use the model's own, or add them to it",
        )
    declared = _declared(subject)
    if own is None and declared and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in declared:
        return warning(
            "stop-ids",
            f"tokenizer and generation config disagree: {named(tokenizer, tokenizer.eos_token_id)} against "
            f"{named_all(tokenizer, declared)}",
            f"{ending}; other software may honour only one of them",
            advice="make eos_token_id in generation_config.json a list of both, or put right the one that is wrong",
        )
    return None


def _declared(subject: Subject) -> list[int]:
    """What the generation config says."""
    found = getattr(subject.policy.model.generation_config, "eos_token_id", None)
    return [int(i) for i in (found if isinstance(found, list | tuple) else [found]) if i is not None]


def _where_stops_come_from(own: tuple[int, ...] | None) -> str:
    if own is not None:
        return "put sampling.stop_ids right, or leave it out to use the model's own"
    return "put right eos_token in tokenizer_config.json and eos_token_id in generation_config.json"


def _after_answer(subject: Subject) -> str | None:
    """What the template writes after an answer; None if there is no template or it does not say."""
    conversation = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = _text(subject, conversation, add_generation_prompt=False)
    except Exception:  # a template is a program of the model's author and may raise anything
        return None
    return text.partition(_MARK)[2] if _MARK in text else None


def _text(subject: Subject, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    return str(
        subject.policy.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **subject.options.chat.chat_template_kwargs,
        )
    )


def check_padding(subject: Subject, rolled: Rolled) -> Finding:
    """Whether the pad token is really nothing: neither text nor sampled."""
    check, tokenizer = "padding", subject.policy.tokenizer
    pad = tokenizer.pad_token_id
    if pad is None:
        return ok(check, "there is no pad token, and none is needed: padding is a role")
    if pad in subject.stop_ids:
        return ok(
            check,
            f"pad and stop are the same token, {named(tokenizer, pad)}; roles tell them apart, so the stop trains",
            "software that masks by id would hide every stop",
        )
    if is_text(tokenizer, pad):
        return error(
            check,
            f"the pad token is {named(tokenizer, pad)}, which is ordinary text: it vanishes from the answers that "
            "rewards read",
            f"of {quoted(tokenizer.pad_token * 3)} a reward reads "
            f"{quoted(tokenizer.decode([pad] * 3, skip_special_tokens=True))}",
            advice="set pad_token in tokenizer_config.json to a token of its own, or to the eos token",
        )
    held = [c for c in rolled.completions if pad in c.ids]
    if held:
        tokens = sum(c.ids.count(pad) for c in held)
        return warning(
            check,
            f"the model writes the pad token {named(tokenizer, pad)}, which rewards do not see",
            f"{tokens} times, in {share(len(held), len(rolled.completions))} answers; it trains as content",
            advice="train the model so that it does not (a fresh one does by chance), or name the token it means to end with",
        )
    return ok(check, f"the pad token {named(tokenizer, pad)} is neither text nor written by the model")


def check_vocabulary(subject: Subject, rolled: Rolled) -> Finding:
    """Whether tokenizer, embeddings and head have the same tokens, and the stop ids have learned rows."""
    check, tokenizer, model = "vocabulary", subject.policy.tokenizer, subject.policy.model
    weights = model.get_input_embeddings().weight.detach()
    rows, head = weights.shape[0], model.get_output_embeddings().weight.shape[0]
    tokens = 1 + max(tokenizer.get_vocab().values())
    counts = f"{rows} embeddings, {head} rows in the head, {tokens} tokens"
    if tokens > min(rows, head):
        return error(
            check,
            f"the tokenizer has ids up to {tokens - 1} but the model only {min(rows, head)} rows",
            counts,
            advice="use the tokenizer that belongs to the model, or resize the embeddings and save it again",
        )
    norms = weights.float().norm(dim=1)
    if empty := [i for i in subject.stop_ids if i < rows and norms[i] < _TINY_ROW * norms.median()]:
        return warning(
            check,
            f"the embedding of the stop id {named(tokenizer, empty[0])} was never trained",
            f"its norm is {norms[empty[0]]:.2g}, the median is {norms.median():.2g}",
            advice="a base model often lacks chat tokens: use its instruct version, or train it with SFT first",
        )
    unknown = Counter(i for c in rolled.completions for i in c.ids if i >= tokens)
    if unknown:
        return warning(
            check,
            "the model writes ids that the tokenizer does not have, which decode to nothing",
            f"{unknown.total()} times, {max(unknown, key=lambda i: unknown[i])} most of all; {counts}",
            advice="use the tokenizer that belongs to the model",
        )
    return ok(check, "every token has a row, and every row that is drawn a token", counts)


def check_template(subject: Subject, rolled: Rolled) -> Finding:
    """Whether prompts go through the chat template they need, with options that it knows."""
    check, chat, template = "template", subject.options.chat, subject.template
    if not subject.conversational:
        given = {"chat.system_prompt": chat.system_prompt, "chat.chat_template_kwargs": chat.chat_template_kwargs}
        if ignored := [name for name, value in given.items() if value]:
            return warning(
                check,
                f"prompts are plain text, so {' and '.join(ignored)} {'have' if len(ignored) > 1 else 'has'} no effect",
                advice="make prompts lists of messages, or put what you want to say into their text",
            )
        return ok(check, "prompts are plain text and reach the model as they are", *_unused(subject))
    if not template:
        return error(
            check,
            "prompts are messages, but the model has no chat template to write them with",
            f"the first row's prompt: {quoted(subject.rows[0].get('prompt'))}",
            advice="use a chat model, set chat_template in its tokenizer, or give prompts as plain text",
        )
    if unknown := [key for key in chat.chat_template_kwargs if key != "chat_template" and key not in str(template)]:
        return warning(
            check,
            f"the chat template does not know `{unknown[0]}`, so it has no effect",
            f"chat.chat_template_kwargs: {dict(chat.chat_template_kwargs)}",
            advice="check how the template names it, or leave it out",
        )
    try:
        question = [{"role": "user", "content": "Question?"}]
        with_prompt = _text(subject, question, add_generation_prompt=True)
        silent = with_prompt == _text(subject, question, add_generation_prompt=False)
    except Exception as problem:  # a template is a program of the model's author and may raise anything
        return error(
            check,
            "the chat template cannot render a single question",
            f"it says: {quoted(' '.join(str(problem).split()))}",
            advice="put the template right, or pass what it needs in chat.chat_template_kwargs",
        )
    if silent:
        return warning(
            check,
            "the chat template opens no answer (it ignores add_generation_prompt): the model has to write the "
            "assistant's header itself",
            f"a question is written as {quoted(with_prompt)}",
            advice="let the template write the assistant's header if add_generation_prompt is true",
        )
    return ok(check, "prompts go through the chat template", f"a question is written as {quoted(with_prompt)}")


def _unused(subject: Subject) -> list[str]:
    if not subject.policy.has_chat_template:
        return []
    return ["the model has a chat template, which plain text does not go through"]


def check_history(subject: Subject, rolled: Rolled) -> Finding:
    """Whether the template leaves earlier turns as they were when messages are added."""
    check = "history"
    if not subject.conversational:
        return skipped(check, "prompts are plain text, so no template writes a history")
    if not subject.template:
        return skipped(check, "the model has no chat template")
    try:
        report = prefix_preserving(
            subject.policy.tokenizer,
            chat_template_kwargs=subject.options.chat.chat_template_kwargs or None,
            stop_ids=subject.stop_ids,
        )
    except Exception as problem:  # a template is a program of the model's author and may raise anything
        return warning(
            check,
            "the chat template cannot render a conversation of several turns",
            f"it says: {quoted(' '.join(str(problem).split()))}",
            advice="put the template right before training on conversations",
        )
    if report:
        return ok(check, "the chat template only appends: earlier turns stay as they were")
    return warning(
        check,
        f"the chat template rewrites history: with message {report.message} what stood before it changes",
        f"before: {quoted(report.before)}",
        f"after: {quoted(report.after)}",
        advice="use a template that only appends (one that keeps past thinking); else turns whose text it changes are "
        "not trained, and a conversation goes on as a new sample",
    )


def check_start(subject: Subject, rolled: Rolled, prompts: Mapping[int, tuple[int, ...]]) -> Finding:
    """Whether prompts begin with one start token, not two. `prompts` are ids by row."""
    check, tokenizer = "bos", subject.policy.tokenizer
    bos = tokenizer.bos_token_id
    if bos is None:
        return ok(check, "the model has no start token")
    twice = [row for row, ids in prompts.items() if ids[:2] == (bos, bos)]
    if twice:
        by = (
            "the chat template writes it twice"
            if subject.conversational
            else "the tokenizer adds it to text that has it"
        )
        return error(
            check,
            f"prompts begin with two start tokens {named(tokenizer, bos)}: {by}",
            f"{share(len(twice), len(prompts))} prompts looked at, row {twice[0]} among them: "
            f"{named_all(tokenizer, prompts[twice[0]][:4])} …",
            advice="take it out of the template" if subject.conversational else "take it out of the prompts' text",
        )
    once = sum(ids[:1] == (bos,) for ids in prompts.values())
    return ok(
        check, f"{share(once, len(prompts))} prompts begin with the start token {named(tokenizer, bos)}, none twice"
    )


def model_checks(subject: Subject, rolled: Rolled, prompts: Mapping[int, tuple[int, ...]]) -> list[Finding]:
    """All of the above, in order."""
    checks: list[Any] = [
        check_template,
        check_history,
        check_stops,
        check_padding,
        check_vocabulary,
    ]
    return [*(check(subject, rolled) for check in checks), check_start(subject, rolled, prompts)]
