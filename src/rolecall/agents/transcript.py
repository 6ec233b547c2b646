"""What a program and the policy said to each other in an episode, call by call, as samples.

A program sends the whole conversation with every call. Its messages are compared with those that are held: where they go on
after the policy's last answer, the new ones are appended as OBSERVATION. Where they do not, a new sample begins, and why is
counted. What the policy wrote in an earlier sample is only read in the new one, so that every answer trains once.

    call 1    S U            ->  A1                     one sample
    call 2    S U A1 T       ->  A2                     the same sample goes on
    call 3    S U A1 T'      ->  A3                     `forks`: from A1 on, another way
    call 4    S U            ->  A4                     `repeats`: the same messages again
    call 5    S' U'          ->  A5                     `openings`: another beginning (a sub-agent)
    call 6    S U "so far …" ->  A6                     `rewrites`: a history with answers that were not given
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from typing import Any, Literal

from rolecall.agents.conversation import Conversation, Dialect, Place, TokenSample
from rolecall.tasks.env import Message
from rolecall.types import Completion

Why = Literal["forks", "repeats", "openings", "rewrites", "other_tools", "template_rewrites"]
"""Why a new sample began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiMessage:
    """A message of a chat API."""

    key: tuple[Any, ...]
    """Messages with the same key are the same message."""
    message: Message
    """As the chat template reads it."""

    @property
    def answer(self) -> bool:
        """Whether it is said to be the policy's."""
        return self.message["role"] == "assistant"


@dataclass(slots=True, eq=False)
class _Line:
    """Messages one after the other, and the conversation they became."""

    conversation: Conversation
    tools: str
    """What the template was told of tools."""
    held: list[tuple[Any, ...]] = field(default_factory=list)
    """The keys of all messages up to the last answer."""
    places: dict[int, Place] = field(default_factory=dict)
    """Where an answer ended, by the number of messages up to it."""
    asked: Sequence[tuple[Any, ...]] | None = None
    """The keys of the call that is being answered."""
    offset: int = 0
    """Of its random numbers."""
    why: Why | None = None
    """Why it began; None: it is the episode's first."""


@dataclass(slots=True, eq=False)
class Call:
    """A call that is being answered."""

    line: _Line
    messages: Sequence[ApiMessage]
    ids: tuple[int, ...]
    """All that the policy reads."""
    number: int
    """Which sample of its episode it belongs to, for random numbers and caches; 0 is the first."""
    why: Why | None
    """Why a new sample began; None: it did not, or it is the first."""
    undo: _Line | None = None
    """What the line was before, if the answer comes to nothing."""


class Transcript:
    """All calls of one episode."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._drawn: dict[tuple[int, ...], int] = {}

    @property
    def samples(self) -> list[TokenSample]:
        """Those with an answer, in the order they began."""
        return [sample for line in self._lines for sample in line.conversation.samples]

    @property
    def whys(self) -> list[Why | None]:
        """Of each of the samples, why it began."""
        return [
            line.why if first else "template_rewrites"
            for line in self._lines
            for first in (True, *[False] * (len(line.conversation.samples) - 1))
            if line.conversation.samples
        ]

    @property
    def messages(self) -> list[Message]:
        """All that was said; of lines that begin like others, what is their own."""
        return [message for line in self._lines for message in line.conversation.messages]

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy has written."""
        return sum(line.conversation.policy_tokens for line in self._lines)

    def ask(self, messages: Sequence[ApiMessage], dialect: Dialect, *, tools: str) -> Call:
        """What the policy reads before it answers these messages. Nothing changes but that a line is busy, until the
        answer comes (`answer`) or does not (`give_up`)."""
        keys = [message.key for message in messages]
        line, place = self._find(keys, tools)
        if line is not None and place == len(line.held) and line.asked is None:
            return self._go_on(line, messages)
        if line is not None:
            why: Why = "repeats" if self._asked_before(keys) else "forks"
            heard = [m.message for m in messages[place:]]
            made = _Line(Conversation.forked(dialect, line.places[place], heard), tools)
        else:
            why = self._why_new(keys, tools, any(m.answer for m in messages))
            first = next((i for i, m in enumerate(messages) if m.answer), len(messages))
            made = _Line(Conversation(dialect), tools)
            made.conversation.give([m.message for m in messages[:first]])
            made.conversation.hear([m.message for m in messages[first:]])
        return self._begin(made, messages, why)

    def ask_text(self, text: str, dialect: Dialect) -> Call:
        """The same of a plain text, which is a sample of its own."""
        message = ApiMessage(key=("text", text), message={"role": "user", "content": text})
        why: Why = "repeats" if self._asked_before([message.key]) else "openings"
        return self._begin(_Line(Conversation.of_text(dialect, text), ""), [message], why)

    def _begin(self, made: _Line, messages: Sequence[ApiMessage], why: Why) -> Call:
        """A new sample."""
        ids = made.conversation.prompt()
        first = not self._lines
        made.offset, made.why = (0, None) if first else (self._offset(ids), why)
        made.asked = [message.key for message in messages]
        self._lines.append(made)
        return Call(made, messages, ids, self._number(made), made.why)

    def answer(self, call: Call, completion: Completion, said: ApiMessage) -> None:
        """The policy's answer to a call, and how it was given to the program."""
        line = call.line
        line.conversation.say(completion)
        line.held = [*(message.key for message in call.messages), said.key]
        line.places[len(line.held)] = line.conversation.place
        line.asked = None

    def give_up(self, call: Call) -> None:
        """The call is not answered: what was held before stays."""
        index = self._lines.index(call.line)
        if call.undo is not None:
            self._lines[index] = call.undo
        elif not call.line.places:
            del self._lines[index]

    def _find(self, keys: Sequence[tuple[Any, ...]], tools: str) -> tuple[_Line | None, int]:
        """The line with the longest history in common, and where: after an answer, with messages to follow."""
        best: tuple[_Line | None, int] = None, 0
        for line in self._lines:
            if line.tools != tools:
                continue
            same = _common(keys, line.held)
            place = max((n for n in line.places if n <= same and n < len(keys)), default=0)
            tip = place == len(line.held) and line.asked is None
            if place > best[1] or (place and place == best[1] and tip):
                best = line, place
        return best

    def _go_on(self, line: _Line, messages: Sequence[ApiMessage]) -> Call:
        undo = _Line(
            line.conversation.copy(), line.tools, list(line.held), dict(line.places), offset=line.offset, why=line.why
        )
        cuts = line.conversation.cuts
        try:
            line.conversation.hear([m.message for m in messages[len(line.held) :]])
            ids = line.conversation.prompt()
        except Exception:  # a template that refuses the messages
            self._lines[self._lines.index(line)] = undo
            raise
        line.asked = [message.key for message in messages]
        why: Why | None = "template_rewrites" if line.conversation.cuts > cuts else None
        return Call(line, messages, ids, self._number(line), why, undo)

    def _asked_before(self, keys: Sequence[tuple[Any, ...]], tools: str | None = None) -> bool:
        """Whether exactly these messages were sent before."""
        return any(
            line.asked == keys or (line.held[: len(keys)] == keys and len(keys) + 1 in line.places)
            for line in self._lines
            if tools in (None, line.tools)
        )

    def _why_new(self, keys: Sequence[tuple[Any, ...]], tools: str, answers: bool) -> Why:
        if self._asked_before(keys, tools):
            return "repeats"
        if self._asked_before(keys) or any(_common(keys, line.held) in line.places for line in self._lines):
            return "other_tools"
        return "rewrites" if answers else "openings"

    def _offset(self, ids: tuple[int, ...]) -> int:
        """Of a line's random numbers: a function of what is asked and how often it was, not of which call came first."""
        times = self._drawn[ids] = self._drawn.get(ids, 0) + 1
        return 1 + int.from_bytes(sha256(f"{times}/{ids}".encode()).digest()[:4])

    def _number(self, line: _Line) -> int:
        return (line.offset << 16) + line.conversation.cuts


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
