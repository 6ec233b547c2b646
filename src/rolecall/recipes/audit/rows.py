"""Checks of the rows: prompts that cannot be given to the model, lengths, duplicates, held-out rows, what a tokenizer loses."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.recipes.audit.records import (
    Finding,
    Setup,
    encoded,
    error,
    named_all,
    ok,
    quoted,
    share,
    skipped,
    special_ids,
    warning,
)
from rolecall.recipes.collect import prompt_request
from rolecall.tasks.kinds import record
from rolecall.tasks.rows import Rows, place_of
from rolecall.types import Sampling

LOOKED_AT = 20_000
"""Rows whose prompts are looked at; of a longer table the first of them, as when training starts."""
ENCODED = 64
"""Rows whose text is encoded and decoded again."""
_MANY_DUPLICATES = 0.01
_MANY_SEAMS = 0.5
_MANY_BROKEN = 0.2
_SPACES = re.compile(r"(\s|\\[nrt])+")  # in JSON, where a line break is a backslash and a letter


@dataclass(kw_only=True)
class Prompts:
    """What the prompts are like, by row number."""

    rows: int
    """How many were looked at."""
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The tokens of the first ones that can be rendered."""
    broken: dict[int, str] = field(default_factory=dict)
    """Prompts that cannot be given to the model, and why."""
    too_long: dict[int, int] = field(default_factory=dict)
    """Prompts that fill the context, and how many tokens they have."""
    tight: dict[int, int] = field(default_factory=dict)
    """Prompts that leave an answer less room than max_new_tokens, and how many tokens they have."""
    longest: int = 0
    """Tokens of the longest that was encoded."""

    def usable(self, row: int) -> bool:
        """True if it can be answered."""
        return row not in self.broken and row not in self.too_long


def look_at_prompts(setup: Setup) -> Prompts:
    """Render the prompts, apart from plain texts that are certainly short enough."""
    found = Prompts(rows=min(len(setup.rows), LOOKED_AT))
    context, room = setup.policy.context_length, setup.options.sampling.max_new_tokens
    for index in range(found.rows):
        row = setup.rows[index]
        prompt = row.get("prompt")
        # No tokenizer makes more tokens of a text than it has bytes, a few of its own around it apart.
        short = isinstance(prompt, str) and prompt and len(prompt.encode(errors="replace")) + 16 + room <= context
        if short and len(found.ids) >= ENCODED and not (row.get("tools") or row.get("chat_template_kwargs")):
            continue
        try:
            record(row, "prompt", number=place_of(setup.rows, index))
            if prompt == "":
                raise ValueError("the prompt is empty")
            request = prompt_request(
                setup.policy, row, setup.options.chat, Sampling(), n=1, seed=0, step=0, prompt=index
            )
        except Exception as problem:  # a chat template is a program of the model's author and may raise anything
            found.broken[index] = " ".join(str(problem).split())
            continue
        tokens = len(request.prompt_ids)
        found.longest = max(found.longest, tokens)
        if tokens >= context:
            found.too_long[index] = tokens
        elif tokens + room > context:
            found.tight[index] = tokens
        if len(found.ids) < ENCODED:
            found.ids[index] = request.prompt_ids
    return found


def check_prompts(setup: Setup, prompts: Prompts) -> Finding:
    """Whether every prompt can be given to the model."""
    check, rows = "prompts", setup.rows
    if not setup.template and setup.conversational:
        return skipped(check, "prompts are messages and the model has no chat template")
    if prompts.broken:
        index, why = next(iter(prompts.broken.items()))
        return error(
            check,
            f"{share(len(prompts.broken), prompts.rows)} prompts cannot be given to the model",
            f"{place_of(rows, index)}: {why}",
            advice="put these rows right, or leave them out",
        )
    return ok(check, f"all {prompts.rows:,} prompts looked at can be given to the model")


def check_lengths(setup: Setup, prompts: Prompts) -> Finding:
    """Whether prompts, and answers of full length after them, fit into the context."""
    check, rows, context = "context", setup.rows, setup.policy.context_length
    room = setup.options.sampling.max_new_tokens
    if prompts.too_long:
        index = max(prompts.too_long, key=lambda i: prompts.too_long[i])
        return error(
            check,
            f"{share(len(prompts.too_long), prompts.rows)} prompts fill the model's context of {context} tokens",
            f"{place_of(rows, index)}: {prompts.too_long[index]} tokens",
            advice="shorten these prompts, leave the rows out, or use a model with a longer context",
        )
    if prompts.tight:
        index = max(prompts.tight, key=lambda i: prompts.tight[i])
        return warning(
            check,
            f"{share(len(prompts.tight), prompts.rows)} prompts leave an answer less room than max_new_tokens={room}",
            f"{place_of(rows, index)}: {prompts.tight[index]} tokens of {context}, which leaves "
            f"{context - prompts.tight[index]}",
            advice=f"lower sampling.max_new_tokens, or shorten prompts to {context - room} tokens",
        )
    if not prompts.ids:
        return skipped(check, "no prompt could be encoded")
    return ok(
        check,
        f"prompts and {room} new tokens fit into the context of {context}",
        f"the longest prompt that was encoded has {prompts.longest} tokens",
    )


def check_duplicates(setup: Setup, prompts: Prompts) -> Finding:
    """Whether prompts are different, and have one answer each."""
    check = "duplicates"
    count, same = repeated(setup.rows, prompts.rows, lambda row: row.get("prompt"))
    other = [(a, b) for a, b in same if gold_of(setup, setup.rows[a]) != gold_of(setup, setup.rows[b])]
    if other:
        a, b = other[0]
        return warning(
            check,
            f"{len(other)} prompts occur twice with different answers",
            f"{place_of(setup.rows, a)} and {place_of(setup.rows, b)}: {quoted(setup.rows[a].get('prompt'))} has "
            f"{quoted(gold_of(setup, setup.rows[a]))} and {quoted(gold_of(setup, setup.rows[b]))}",
            advice="keep one of the answers, or let the prompt say what tells them apart",
        )
    if len(same) > _MANY_DUPLICATES * prompts.rows:
        a, b = same[0]
        return warning(
            check,
            f"{share(len(same), prompts.rows)} rows repeat the prompt of an earlier one",
            f"{place_of(setup.rows, b)} repeats {place_of(setup.rows, a)}: {quoted(setup.rows[a].get('prompt'))}",
            advice="remove them, unless these prompts are meant to count more",
        )
    return ok(check, f"{count:,} different prompts in {prompts.rows:,} rows")


def repeated(rows: Rows, count: int, part: Callable[[Mapping[str, Any]], Any]) -> tuple[int, list[tuple[int, int]]]:
    """How many of the first rows differ in that part, and (earlier row, row that repeats it) of the others."""
    first: dict[str, int] = {}
    same = []
    for index in range(count):
        before = first.setdefault(_key(part(rows[index])), index)
        if before != index:
            same.append((before, index))
    return len(first), same


def check_held_out(setup: Setup, prompts: Prompts) -> Finding:
    """Whether training and held-out prompts differ in more than case and spaces."""
    check = "held-out"
    if setup.held_out is None:
        return skipped(check, "nothing is held out: eval.every is 0")
    train = {_key(setup.rows[i].get("prompt"), loose=True): i for i in range(prompts.rows)}
    both = [(train[key], row) for row in setup.held_out if (key := _key(row.get("prompt"), loose=True)) in train]
    if both:
        index, row = both[0]
        return warning(
            check,
            f"{share(len(both), len(setup.held_out))} held-out prompts are also trained on, but for case and spaces",
            f"{place_of(setup.rows, index)}: {quoted(setup.rows[index].get('prompt'))}, held out: "
            f"{quoted(row.get('prompt'))}",
            advice="write the same prompt the same way, or remove one of them; numbers on these rows say too much",
        )
    return ok(check, f"none of the {len(setup.held_out)} held-out prompts is trained on")


def _key(prompt: Any, *, loose: bool = False) -> str:
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)
    return _SPACES.sub(" ", text.casefold()).replace(' "', '"').replace('" ', '"') if loose else text


def gold_of(setup: Setup, row: Mapping[str, Any]) -> str | None:
    """The row's right answer; None if there is none."""
    try:
        return setup.gold(row)
    except Exception:  # a task without answers
        return None


def texts_of(rows: Rows, gold: Callable[[Mapping[str, Any]], str | None]) -> list[tuple[int, str, str]]:
    """(row, what it is, text) of what the first rows say and should be answered."""
    found: list[tuple[int, str, str]] = []
    for index in range(min(len(rows), ENCODED)):
        row = rows[index]
        for name in ("prompt", "completion", "messages", "text"):
            value = row.get(name)
            if isinstance(value, str):
                found.append((index, name, value))
            elif isinstance(value, list | tuple):
                said = (m.get("content") for m in value if isinstance(m, Mapping))
                found += [(index, name, text) for text in said if isinstance(text, str)]
        try:
            answer = gold(row)
        except Exception:  # a task without answers
            answer = None
        if answer is not None:
            found.append((index, "answer", answer))
    return found


def check_round_trip(
    tokenizer: Any, rows: Rows, texts: list[tuple[int, str, str]], answers: list[tuple[int, ...]]
) -> Finding:
    """Whether the tokenizer gives back what it is given: the rows' texts, and sampled answers as text."""
    check = "round-trip"
    lost = [(index, name, text, back) for index, name, text in texts if (back := _back(tokenizer, text)) is not None]
    if lost:
        index, name, text, back = lost[0]
        wrong = sorted({name for _, name, _, _ in lost})
        find = error if "answer" in wrong or "completion" in wrong else warning
        return find(
            check,
            f"the tokenizer does not give back what it reads: {share(len(lost), len(texts))} texts of the rows change",
            f"{place_of(rows, index)}, {name}: {quoted(text)} comes back as {quoted(back)}",
            *(["a right answer is among them, so the model cannot write it"] if find is error else []),
            advice="use a tokenizer without normalisation and with every character in its vocabulary, or write the rows "
            "as it does",
        )
    changed = [ids for ids in answers if _back(tokenizer, _decoded(tokenizer, ids)) is not None]
    if changed:
        text = _decoded(tokenizer, changed[0])
        return warning(
            check,
            f"{share(len(changed), len(answers))} sampled answers change when they are encoded again",
            f"{quoted(text)} comes back as {quoted(_back(tokenizer, text))}",
            advice="answers train as they were sampled, but other software that encodes their text sees another answer",
        )
    broken = [ids for ids in answers if "\ufffd" in _decoded(tokenizer, ids)]
    if len(broken) > _MANY_BROKEN * len(answers):
        return warning(
            check,
            f"{share(len(broken), len(answers))} sampled answers hold bytes that are not a character: rewards read � there",
            quoted(_decoded(tokenizer, broken[0])),
            advice="start from a model that writes text (a fresh one does not), or check that the tokenizer is the model's",
        )
    other = sum(encoded(tokenizer, _decoded(tokenizer, ids)) != ids for ids in answers) - len(broken)
    return ok(
        check,
        f"{len(texts)} texts of the rows come back as they are",
        f"{share(other, len(answers))} sampled answers would be cut into other tokens if they were encoded again, which "
        "never happens here",
    )


def _decoded(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _back(tokenizer: Any, text: str) -> str | None:
    """What becomes of a text; None if it stays as it is, but for a space that some tokenizers put or drop in front."""
    if "\ufffd" in text:  # bytes that are no character have no text to compare
        return None
    ids = encoded(tokenizer, text)
    if ids is None:
        return "nothing: it is not valid Unicode"
    back = _decoded(tokenizer, ids)
    return None if back.removeprefix(" ") == text.removeprefix(" ") else back


def check_seam(setup: Setup, prompts: Prompts) -> Finding:
    """Whether an answer can begin where the prompt ends, or the tokenizer would merge the two."""
    check, tokenizer = "seam", setup.policy.tokenizer
    if setup.conversational:
        return skipped(check, "the chat template stands between prompt and answer")
    looked, merged = 0, []
    for index, ids in prompts.ids.items():
        row = setup.rows[index]
        gold = gold_of(setup, row)
        if gold is None or not isinstance(row["prompt"], str) or ids[-1] in special_ids(tokenizer):
            continue
        looked += 1
        bare, whole = (encoded(tokenizer, text) or () for text in (row["prompt"], row["prompt"] + gold))
        if whole[: len(bare)] != bare:
            merged.append((index, bare, whole))
    if not looked:
        return skipped(check, "the rows have no answers to put after their prompts")
    if len(merged) <= _MANY_SEAMS * looked:
        return ok(check, f"answers begin after their prompts in {share(looked - len(merged), looked)} rows")
    index, ids, whole = merged[0]
    return warning(
        check,
        f"{share(len(merged), looked)} prompts end in a token that would merge with the answer's first one, so the model "
        "has to begin in a way it never saw",
        f"{place_of(setup.rows, index)}: {quoted(setup.rows[index]['prompt'])} ends in "
        f"{named_all(tokenizer, ids[-1:])}; with its answer there stands "
        f"{named_all(tokenizer, whole[len(ids) - 1 : len(ids) + 1])}",
        advice="end prompts without a space, and let the answer begin with it",
    )
