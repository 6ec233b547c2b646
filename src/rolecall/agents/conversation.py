"""One player's side of an episode, as tokens.

What the policy samples is kept as it was sampled: it is never decoded and encoded again. Messages of others are
appended after it in the chat template.

    <|im_start|>user\\n 12*34 <|im_end|>\\n<|im_start|>assistant\\n <calc>12*34</calc> <|im_end|> \\n<|im_start|>tool\\n 408 …
    prompt                                                         policy                        template            tool
    P P P                                                          C C C              S          P P P               O

Where the context is cut, or the template rewrites the past, a new sample begins: the first prompt is PROMPT again, what
is kept of the past is OBSERVATION, and the samples of an episode count as one sequence.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise, takewhile
from typing import Any

from rolecall.agents.context import noted, notes_in, summary_of
from rolecall.maths.roles import Role
from rolecall.policy.render import Rendered, continue_conversation, render
from rolecall.tasks.env import Message
from rolecall.types import Completion, Finish

Run = tuple[int, int, str]
"""(start, end, author) of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How messages become tokens."""

    tokenizer: Any
    stop_ids: Sequence[int]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template; its tools among them."""
    system_prompt: str | None = None
    """Put before a conversation without a system message."""

    def prompt(self, messages: Sequence[Message], *, given: int) -> Rendered:
        """A conversation to be answered, of which the first `given` messages are the task's and the others were heard."""
        return render(self.tokenizer, messages, observed_from=given, **self._how)

    def go_on(self, ids: Sequence[int], roles: Sequence[int], heard: Sequence[Message], history: Any) -> Rendered:
        """The ids so far, and after them what was heard."""
        return continue_conversation(self.tokenizer, ids, roles, heard, history=history, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"chat_template_kwargs": self.template_kwargs or None, "stop_ids": self.stop_ids}

    def text(self, completion: Completion) -> str:
        """What the policy said, without its stop token."""
        ids = completion.ids[:-1] if completion.finish is Finish.STOP else completion.ids
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(slots=True)
class TokenSample:
    """Tokens that the policy read and wrote in one piece."""

    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    authors: list[Run] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, version) of what the policy wrote, run by run."""
    plain: "TokenSample | None" = None
    """The prompt without the lessons that the policy read in it; None if it read none."""

    def extend(self, ids: Sequence[int], roles: Sequence[int], authors: Sequence[Run]) -> None:
        """Append what the policy did not write. `authors` count from the first of the new tokens."""
        start = len(self.ids)
        self.ids += ids
        self.roles += roles
        self.logprobs += [float("nan")] * len(ids)
        self.supports += [b""] * len(ids)
        self.authors += [(start + first, start + last, who) for first, last, who in authors]

    def add(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        start, end = len(self.ids), len(self.ids) + len(completion.ids)
        roles = [int(Role.CONTENT)] * len(completion.ids)
        if completion.finish is Finish.STOP:
            roles[-1] = int(Role.STOP)
        self.ids += completion.ids
        self.roles += roles
        self.logprobs += completion.behaviour_logprobs
        self.supports += completion.supports or [b""] * len(completion.ids)
        self.turns.append((start, end))
        spans = completion.versions or [(0, len(completion.ids), completion.policy_version)]
        self.versions += [(start + a, start + b, version) for a, b, version in spans if b > a]
        if end > start:
            self.authors.append((start, end, "policy"))

    def copy(self) -> "TokenSample":
        """As it is now."""
        return replace(self._until(len(self.ids)), turns=list(self.turns))

    def head(self, end: int) -> "TokenSample":
        """The first tokens, without turns: whoever goes on from them does not train them again."""
        return replace(self._until(end), turns=[])

    def observe(self, end: int) -> None:
        """What the policy wrote among the first tokens was written in another sample: here it is only read."""
        chosen = (Role.CONTENT, Role.STOP)
        self.roles[:end] = [int(Role.OBSERVATION) if role in chosen else role for role in self.roles[:end]]
        self.logprobs[:end] = [float("nan")] * end
        self.supports[:end] = [b""] * end
        self.versions = [span for span in self.versions if span[0] >= end]
        self.authors = [(a, b, "history" if who == "policy" and a < end else who) for a, b, who in self.authors]

    def ended(self) -> "TokenSample":
        """The same up to the policy's last token: what it never went on from is of no use."""
        return self._until(self.turns[-1][1])

    def stripped(self) -> "TokenSample":
        """As it trains: with the plain prompt before what the policy wrote and read after the prompt with lessons."""
        if self.plain is None:
            return self
        cut, made = self.turns[0][0], self.plain.copy()
        shift = len(made.ids) - cut
        for name in ("ids", "roles", "logprobs", "supports"):
            getattr(made, name).extend(getattr(self, name)[cut:])
        made.turns = [(start + shift, end + shift) for start, end in self.turns]
        made.versions = [(start + shift, end + shift, version) for start, end, version in self.versions]
        made.authors += [(start + shift, end + shift, who) for start, end, who in self.authors if start >= cut]
        return made

    def _until(self, end: int) -> "TokenSample":
        return replace(
            self,
            ids=self.ids[:end],
            roles=self.roles[:end],
            logprobs=self.logprobs[:end],
            authors=[run for run in self.authors if run[0] < end],
            supports=self.supports[:end],
            versions=[span for span in self.versions if span[0] < end],
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A point in a conversation, after a turn of the policy."""

    given: tuple[Message, ...]
    context: tuple[Message, ...]
    sample: TokenSample
    tokens: int
    """Of the sample, up to the end of the turn."""


class Conversation:
    """What one player has read and said, and the samples it became."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.messages: list[Message] = []
        """The whole of it, whatever was cut from the context."""
        self.cuts = 0
        """How often a new sample was begun."""
        self._given: list[Message] = []
        self._lessons: list[Message] = []
        self._notes: list[str] = []
        self._kept: list[Message] = []
        """What stands for turns that were dropped: a summary, or notes."""
        self._context: list[Message] = []
        self._unread: list[Message] = []
        self._sample = TokenSample()
        self._earlier: list[TokenSample] = []

    @property
    def samples(self) -> list[TokenSample]:
        """Those with a turn of the policy's, in order."""
        return [sample.ended() for sample in (*self._earlier, self._sample) if sample.turns]

    @property
    def spoke(self) -> bool:
        """Whether the policy has had a turn in the sample that it is in."""
        return bool(self._sample.turns)

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy has written."""
        return sum(end - start for sample in (*self._earlier, self._sample) for start, end in sample.turns)

    @property
    def state(self) -> int:
        """What was heard since the policy last spoke, as a number: the same texts give the same one."""
        heard = takewhile(lambda message: message["role"] != "assistant", reversed(self.messages))
        text = json.dumps([(message["role"], message["content"]) for message in heard])
        return int.from_bytes(sha256(text.encode()).digest()[:7])

    def give(self, messages: Sequence[Message]) -> None:
        """The task's own messages, before anything was said."""
        self._given = self._with_system(messages)
        self.messages += self._given

    def remember(self, lessons: Sequence[Message]) -> None:
        """What the policy reads after the task's messages and no training sample holds; nothing: forget it again. Before
        the first turn."""
        self._lessons = list(lessons)
        if self._sample.ids:
            self._sample = TokenSample()
            self._begin(self._context)

    def hear(self, messages: Sequence[Message]) -> None:
        """What others said. The policy reads it when it speaks next."""
        if not self.messages:
            self.give(messages)
            return
        self._unread += messages
        self.messages += messages

    def restart(self, context: Sequence[Message]) -> None:
        """Go on from another context. What it does not have in common with the first prompt was heard."""
        self._close()
        context = self._with_system(context)
        pairs = zip(self._given, context, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if dict(a) != dict(b)), min(len(self._given), len(context)))
        self._given, self._kept, self._context, self._unread = context[:same], [], [], context[same:]
        if not self._given:  # nothing is left of what the lessons were about
            self._lessons = []

    def prompt(self) -> tuple[int, ...]:
        """All that the policy reads before it speaks."""
        if not self._sample.ids:
            self._begin([*self._context, *self._unread])
        elif self._unread or (self._context and self._context[-1]["role"] == "assistant"):
            before = len(self._sample.ids)
            history = [*self._given, *self._lessons, *self._kept, *self._context]
            found = self.dialect.go_on(self._sample.ids, self._sample.roles, self._unread, history)
            self._context += self._unread
            if found.new_sample and self._lessons:
                self._close()
                self._begin(self._context)
            elif found.new_sample:
                self._close()
                self._sample.extend(found.ids, found.roles, _authors(found.roles, [], prompt=True))
            else:
                new = found.roles[before:]
                self._sample.extend(found.ids[before:], new, _authors(new, self._unread))
        self._unread = []
        return tuple(self._sample.ids)

    @classmethod
    def of_text(cls, dialect: Dialect, text: str) -> "Conversation":
        """One of a plain text to go on with, which no template sees."""
        made, found = cls(dialect), render(dialect.tokenizer, text)
        made.messages = [{"role": "user", "content": text}]
        made._context = list(made.messages)
        made._sample.extend(found.ids, found.roles, [(0, len(found.ids), "prompt")])
        return made

    def copy(self) -> "Conversation":
        """As it is now, to come back to."""
        made = Conversation(self.dialect)
        made.messages, made.cuts = list(self.messages), self.cuts
        made._given, made._context, made._unread = list(self._given), list(self._context), list(self._unread)
        made._lessons, made._kept, made._notes = list(self._lessons), list(self._kept), list(self._notes)
        made._sample, made._earlier = self._sample.copy(), list(self._earlier)
        return made

    @property
    def place(self) -> "Place":
        """Where it stands after a turn of the policy, to go on from there in another way."""
        return Place(tuple(self._given), tuple(self._context), self._sample, len(self._sample.ids))

    @classmethod
    def forked(cls, dialect: Dialect, place: "Place", heard: Sequence[Message]) -> "Conversation":
        """Another conversation that goes on from a place: its tokens up to there are only read."""
        made = cls(dialect)
        made._given, made._context, made._unread = list(place.given), list(place.context), list(heard)
        made.messages = list(heard)
        made._sample = place.sample.head(place.tokens)
        made.prompt()
        if not made.cuts:
            made._sample.observe(place.tokens)
        return made

    def shorten(self, *, limit: int, room: int, notes: bool = False) -> bool:
        """Drop the oldest turns so that `room` tokens fit within `limit`; False if even the last message does not.

        Half of what the dropped and kept turns may take is left free, so that not every turn has to be cut again. With
        `notes`, those in the dropped turns stay.
        """
        body = self._context
        starts = [i for i, message in enumerate(body) if message["role"] == "assistant"]
        kept = [body[i:] for i in starts[1:]] + [body[starts[-1] + 1 :] if starts else body]
        held = [self._notes + notes_in(body[: len(body) - len(tail)]) if notes else [] for tail in kept]
        heads = [noted(of_tail) if notes else self._kept for of_tail in held]
        lengths = [
            len(self._rendered([*self._lessons, *head, *tail]).ids) for head, tail in zip(heads, kept, strict=True)
        ]
        spare = limit - room
        if lengths[-1] > spare:
            return False
        half = (spare + lengths[-1]) // 2  # the last one is not longer
        chosen = next(i for i, length in enumerate(lengths) if length <= half)
        self._close()
        self._notes, self._kept = held[chosen], heads[chosen]
        self._begin(kept[chosen])
        return True

    def drop(self, pattern: re.Pattern[str]) -> bool:
        """Leave out of the policy's earlier turns what fits a pattern; False if nothing does."""
        own = [message["role"] == "assistant" and pattern.search(message["content"]) for message in self._context]
        if not any(own):
            return False
        self._close()
        self._context = [
            {**message, "content": pattern.sub("", message["content"])} if found else message
            for message, found in zip(self._context, own, strict=True)
        ]
        return True

    def ask(self, question: Message) -> tuple[int, ...]:
        """What the policy reads when it is asked something about the conversation, before what it has not read yet."""
        unread, self._unread = self._unread, [question]
        self.messages.append(question)
        ids = self.prompt()
        self._unread = unread
        return ids

    def go_on_from(self, completion: Completion) -> None:
        """The answer, which takes the place of all turns before it."""
        summary = self.say(completion)["content"]
        self._close()
        self._context, self._kept = [], summary_of(summary)

    def say(self, completion: Completion) -> Message:
        """Add the policy's turn; the message it is."""
        self._sample.add(completion)
        message = {"role": "assistant", "content": self.dialect.text(completion)}
        self._context.append(message)
        self.messages.append(message)
        return message

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        text = self.dialect.system_prompt
        if text is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": text}, *messages]

    def _begin(self, heard: Sequence[Message]) -> None:
        self._context = list(heard)
        self._put(self._sample, [*self._lessons, *self._kept, *heard])
        if self._lessons:
            self._sample.plain = TokenSample()
            self._put(self._sample.plain, [*self._kept, *heard])

    def _put(self, sample: TokenSample, heard: Sequence[Message]) -> None:
        found = self._rendered(heard)
        sample.extend(found.ids, found.roles, _authors(found.roles, heard, prompt=True))

    def _rendered(self, heard: Sequence[Message]) -> Rendered:
        return self.dialect.prompt([*self._given, *heard], given=len(self._given))

    def _close(self) -> None:
        if self._sample.turns:
            self._earlier.append(self._sample)
        self._sample = TokenSample()
        self.cuts += 1


def _authors(roles: Sequence[int], heard: Sequence[Message], *, prompt: bool = False) -> list[Run]:
    """Who wrote the tokens: each run of OBSERVATION is one message's, all else is the template's (or the prompt's)."""
    names = [_author(message) for message in heard if message["content"].strip()]
    runs, edges = [], [0, *(t for t in range(1, len(roles)) if roles[t] != roles[t - 1]), len(roles)]
    observed = sum(roles[start] == Role.OBSERVATION for start in edges[:-1] if roles)
    if observed != len(names):  # a template that does not keep messages apart
        names = [names[0] if len(set(names)) == 1 else "history"] * observed
    heard_of, seen = iter(names), False
    for start, end in pairwise(edges if roles else []):
        is_heard = roles[start] == Role.OBSERVATION
        seen = seen or is_heard
        runs.append((start, end, next(heard_of) if is_heard else "prompt" if prompt and not seen else "template"))
    return runs


def _author(message: Message) -> str:
    if message["role"] == "assistant":
        return "history"
    return str(message.get("author", message["role"]))
