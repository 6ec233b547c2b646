"""OpenAI's chat completions and completions as the gateway speaks them: bodies, messages and answers.

Tool calls are text to the policy (`rolecall.tasks.tools`) and objects to the program.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from rolecall.agents.transcript import ApiMessage
from rolecall.serving.dialect import STRICT
from rolecall.serving.http import HttpError
from rolecall.tasks.tools import ToolCall, split_calls
from rolecall.types import Completion, Finish, Request, Sampling

_Zero = Annotated[float, Field(ge=0, le=0)] | None
_Tokens = Annotated[int, Field(ge=1, lt=2**31)] | None


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What both endpoints take. Fields that change nothing here are taken with any value, others only where they say what
    holds anyway."""

    __pydantic_config__ = STRICT
    model: str = ""
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: _Tokens = None
    frequency_penalty: _Zero = None
    presence_penalty: _Zero = None
    user: str | None = None

    def check(self, sampling: Sampling) -> None:
        """Refuse what is drawn otherwise than the run draws."""
        if self.n not in (None, 1):
            raise HttpError(
                400, f"n is {self.n}, and a call has one answer here: leave n out and call again for another"
            )
        if "" in self.stops:
            raise HttpError(400, "stop has an empty text, which would end every answer: leave it out")
        neutral: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, off in neutral.items():
            given, own = getattr(self, name), getattr(sampling, name)
            run = off if own is None else own
            greedy = sampling.temperature == 0  # an evaluation, which asks for the best answer whatever is sent
            if given is not None and given != run and not greedy:
                raise HttpError(400, f"{name} is {given}, but this run samples with {run:g}: leave it out")

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


@dataclass(frozen=True, kw_only=True)
class ChatBody(_Common):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: _Tokens = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


@dataclass(frozen=True, kw_only=True)
class CompletionBody(_Common):
    """The body of `/v1/completions`."""

    prompt: str
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer."""
        return self.max_tokens


CHAT: TypeAdapter[ChatBody] = TypeAdapter(ChatBody)
COMPLETION: TypeAdapter[CompletionBody] = TypeAdapter(CompletionBody)


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a call, as chat templates read them."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise HttpError(
                400, f'tools.{i} needs {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            )
        if not isinstance(function.get("parameters", {}), Mapping):
            raise HttpError(400, f"tools.{i}.function.parameters must be a JSON schema, an object")
    return [dict(tool) for tool in tools]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[ApiMessage]:
    """The messages of a call."""
    if messages[-1].get("role") == "assistant":
        raise HttpError(400, "the last message is the assistant's: an answer cannot be begun for the policy")
    return [_checked(message, f"messages.{i}") for i, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], where: str) -> ApiMessage:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise HttpError(400, f"{where}.role is {role!r}; it may be system, developer, user, assistant or tool")
    text, calls = _text(message.get("content"), where), message.get("tool_calls") or []
    if role != "assistant":
        name = message.get("name")
        named = {"name": str(name)} if name else {}
        return ApiMessage(key=(role, text), message={"role": role, "content": text, **named})
    if not isinstance(calls, list):
        raise HttpError(400, f"{where}.tool_calls must be a list")
    found = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    written = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': json.loads(given)})}</tool_call>" for name, given in found
    )
    return ApiMessage(key=(role, text, *found), message={"role": role, "content": text + written})


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise HttpError(400, f"{where}.content must be a text, or parts of type text")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise HttpError(400, f"{where}.content has a part of type {kind!r}; the policy reads text only")
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> tuple[str, str]:
    """(name, arguments as JSON in one order)."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise HttpError(400, f"{where} needs a function with a name and arguments")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise HttpError(400, f"{where}.function.arguments are not JSON") from error
    return function["name"], json.dumps(arguments, sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The policy's answer as the program reads it."""

    id: str
    message: Mapping[str, Any]
    finish: str
    pieces: Sequence[str]
    """The text of each token."""
    completion: Completion
    prompt_tokens: int
    bad_calls: int = 0
    """Tool calls that cannot be read: they stay in the text."""

    @property
    def api(self) -> ApiMessage:
        """The same message as it will come back."""
        return _checked(self.message, "the answer")


def answer_id(request: Request) -> str:
    """The same answer to the same prompt has the same id, whenever it is given."""
    name = f"{request.seed}/{request.prompt}/{request.first_sample}/{len(request.prompt_ids)}"
    return sha256(name.encode()).hexdigest()[:24]


def read_answer(
    text: str,
    completion: Completion,
    *,
    pieces: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    request: Request,
) -> Answer:
    """What the policy said, with its tool calls taken out of the text if there are tools."""
    name = answer_id(request)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    bad, finish = 0, "length" if completion.finish is Finish.LENGTH else "stop"
    if tools:
        short = {f["function"]["name"]: _only_argument(f["function"]) for f in tools}
        rest, calls = split_calls(text, [tool for tool, argument in short.items() if argument is not None])
        bad = sum(call.error is not None for call in calls)
        if calls and not bad:
            message = {"role": "assistant", "content": rest or None}
            message["tool_calls"] = [_api_call(call, short, f"call_{name}_{i}") for i, call in enumerate(calls)]
            finish = "tool_calls" if finish == "stop" else finish
    return Answer(
        id=name,
        message=message,
        finish=finish,
        pieces=pieces,
        completion=completion,
        prompt_tokens=len(request.prompt_ids),
        bad_calls=bad,
    )


def _only_argument(function: Mapping[str, Any]) -> str | None:
    names = list((function.get("parameters") or {}).get("properties") or {})
    return names[0] if len(names) == 1 else None


def _api_call(call: ToolCall, short: Mapping[str, str | None], name: str) -> dict[str, Any]:
    arguments = dict(call.arguments)
    if "" in arguments:
        arguments = {str(short[call.name]): arguments[""]}
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(arguments)}}


def whole(body: ChatBody | CompletionBody, answer: Answer) -> dict[str, Any]:
    """The answer in one piece."""
    chat = isinstance(body, ChatBody)
    said = {"message": answer.message} if chat else {"text": answer.message["content"]}
    choice = {"index": 0, **said, "logprobs": _logprobs(body, answer), "finish_reason": answer.finish}
    kind = "chat.completion" if chat else "text_completion"
    return {**_head(body, answer.id, kind), "choices": [choice], "usage": _usage(answer)}


class Stream:
    """An answer as the lines of a stream, while it is drawn: what can still change is held back.

    That is the bytes of a character that is not complete, what may be the beginning of a text that ends the answer, and, if
    there are tools, everything from where a call may begin.
    """

    def __init__(
        self, body: ChatBody | CompletionBody, id_: str, *, tokenizer: Any, marks: Sequence[str], stops: Sequence[str]
    ):
        """`marks` are the texts that a tool call begins with, `stops` those that end the answer."""
        self._body, self._tokenizer, self._marks, self._stops = body, tokenizer, tuple(marks), tuple(stops)
        self._chat = isinstance(body, ChatBody)
        self._head = _head(body, id_, "chat.completion.chunk" if self._chat else "text_completion")
        self._ids: list[int] = []
        self._sent = ""

    def begin(self) -> Iterator[str]:
        """Before the first token."""
        if self._chat:
            yield self._part({"role": "assistant", "content": ""})

    def add(self, token: int, logprob: float) -> Iterator[str]:
        """A token was drawn."""
        self._ids.append(token)
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            return  # the text before a token may change with it
        text = self._certain(str(self._tokenizer.decode(self._ids, skip_special_tokens=True)))
        if len(text) > len(self._sent) and not self._body.logprobs:
            yield self._part({"content": text[len(self._sent) :]})
            self._sent = text

    def end(self, answer: Answer) -> Iterator[str]:
        """The rest of a complete answer."""
        body, content, logprobs = self._body, answer.message["content"] or "", _logprobs(self._body, answer)
        rest = content.removeprefix(self._sent)
        if rest or logprobs:
            yield self._part({"content": rest}, logprobs=logprobs)
        if calls := answer.message.get("tool_calls"):
            yield self._part({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        yield self._part({}, answer.finish)
        if (body.stream_options or {}).get("include_usage"):
            yield json.dumps({**self._head, "choices": [], "usage": _usage(answer)})
        yield "[DONE]"

    def _certain(self, text: str) -> str:
        """As much of the text as will stay."""
        text = text.rstrip("\ufffd")
        for mark in (*self._stops, *self._marks):
            found = text.find(mark)
            ends = (n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n]))
            text = text[:found] if found >= 0 else text[: len(text) - next(ends, 0)]
        if self._marks:  # around calls, white space is not part of the text
            return "" if text[:1].isspace() else text.rstrip()
        return text

    def _part(self, said: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        change = {"delta": said} if self._chat else {"text": said.get("content") or ""}
        choice = {"index": 0, **change, "logprobs": logprobs, "finish_reason": finish}
        return json.dumps({**self._head, "choices": [choice]})


def call_marks(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that a call of one of these tools begins with."""
    named = [f["function"]["name"] for f in tools if _only_argument(f["function"]) is not None]
    return ["<tool_call>", *(f"<{name}>" for name in named)] if tools else []


def _head(body: ChatBody | CompletionBody, id_: str, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return {"id": f"{prefix}-{id_}", "object": kind, "created": int(time.time()), "model": body.model}


def _usage(answer: Answer) -> dict[str, int]:
    given, new = answer.prompt_tokens, len(answer.completion.ids)
    return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}


def _logprobs(body: ChatBody | CompletionBody, answer: Answer) -> dict[str, Any] | None:
    logprobs = answer.completion.behaviour_logprobs
    if isinstance(body, ChatBody):
        if not body.logprobs:
            return None
        pairs = zip(answer.pieces, logprobs, strict=True)
        entries = [{"token": t, "logprob": x, "bytes": list(t.encode()), "top_logprobs": []} for t, x in pairs]
        return {"content": entries, "refusal": None}
    if body.logprobs is None:
        return None
    return {
        "tokens": list(answer.pieces),
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": None,
    }
