"""OpenAI's completions and chat completions, for clients that evaluate: text in and out, no streaming."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field, TypeAdapter

from rolecall.policy.load import LoadedModel
from rolecall.policy.render import render
from rolecall.serving.dialect import FINISH, STRICT, Count, Ids, Number, SamplingParams
from rolecall.serving.http import HttpError
from rolecall.types import Completion, Finish, Request

_Nothing = Annotated[float, Field(ge=0, le=0)]
"""What other servers know and this one does not; clients send its neutral value."""


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What both endpoints take."""

    __pydantic_config__ = STRICT
    model: str
    n: Count = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: float = 0.0
    seed: Number | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    stream: Literal[False] = False
    frequency_penalty: _Nothing = 0.0
    presence_penalty: _Nothing = 0.0
    user: str | None = None

    def request(self, ids: Sequence[int], number: int, *, max_tokens: int, stop_ids: Sequence[int]) -> Request:
        """For an engine: prompts are numbered, so that those of one call draw their own random numbers."""
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )
        return Request(
            prompt_ids=tuple(ids),
            sampling=params.sampling(stop_ids=stop_ids),
            n=self.n,
            seed=randbits(60) if self.seed is None else self.seed,
            prompt=number,
        )


@dataclass(frozen=True, kw_only=True)
class CompletionBody(_Common):
    """The body of `/v1/completions`."""

    prompt: (
        str | Ids | Annotated[tuple[str, ...], Field(min_length=1)] | Annotated[tuple[Ids, ...], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] = False

    def requests(self, loaded: LoadedModel) -> list[Request]:
        """One for each prompt."""
        given: Any = self.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        encoded = [loaded.tokenizer(p, verbose=False)["input_ids"] if isinstance(p, str) else p for p in prompts]
        return [
            self.request(ids, i, max_tokens=self.max_tokens, stop_ids=loaded.stop_ids) for i, ids in enumerate(encoded)
        ]


@dataclass(frozen=True, kw_only=True)
class ChatBody(_Common):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def requests(self, loaded: LoadedModel) -> list[Request]:
        """The one for the conversation; without a limit the answer may fill the context."""
        if not loaded.has_chat_template:
            raise HttpError(400, f"model {loaded.name!r} has no chat template: use /v1/completions")
        try:
            ids = render(
                loaded.tokenizer,
                self.messages,
                chat_template_kwargs=self.chat_template_kwargs,
                add_generation_prompt=True,
                stop_ids=loaded.stop_ids,
            ).ids
        except Exception as error:  # a template is a program of the model's and raises what it likes
            raise HttpError(400, f"the chat template refuses the messages: {' '.join(str(error).split())}") from error
        limit = self.max_completion_tokens or self.max_tokens or loaded.context_length
        return [self.request(ids, 0, max_tokens=limit, stop_ids=loaded.stop_ids)]


COMPLETION: TypeAdapter[CompletionBody] = TypeAdapter(CompletionBody)
CHAT: TypeAdapter[ChatBody] = TypeAdapter(ChatBody)


def answer(
    body: CompletionBody | ChatBody, loaded: LoadedModel, requests: Sequence[Request], completions: Sequence[Completion]
) -> dict[str, Any]:
    """What OpenAI's server would send."""
    chat = isinstance(body, ChatBody)
    choices = []
    for index, completion in enumerate(completions):
        text = _text(loaded, completion, requests[0].sampling.stop_strings)
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        wanted = body.logprobs if chat else body.logprobs is not None
        logprobs = (_chat_logprobs if chat else _logprobs)(loaded, completion) if wanted else None
        finish = FINISH.get(completion.finish, "length")
        choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": finish})
    given, new = sum(len(r.prompt_ids) for r in requests), sum(len(c.ids) for c in completions)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new},
    }


def _text(loaded: LoadedModel, completion: Completion, stop_strings: Sequence[str]) -> str:
    """The answer without what ended it."""
    ids = completion.ids[:-1] if completion.finish is Finish.STOP else completion.ids
    text = str(loaded.tokenizer.decode(list(ids), skip_special_tokens=True))
    ends = [text.index(s) for s in stop_strings if s in text]
    return text[: min(ends)] if ends and completion.finish is Finish.STOP_STRING else text


def _pieces(loaded: LoadedModel, completion: Completion) -> list[str]:
    return [str(loaded.tokenizer.decode([i])) for i in completion.ids]


def _logprobs(loaded: LoadedModel, completion: Completion) -> dict[str, Any]:
    return {
        "tokens": _pieces(loaded, completion),
        "token_logprobs": list(completion.behaviour_logprobs),
        "top_logprobs": None,
        "text_offset": None,
    }


def _chat_logprobs(loaded: LoadedModel, completion: Completion) -> dict[str, Any]:
    pairs = zip(_pieces(loaded, completion), completion.behaviour_logprobs, strict=True)
    return {"content": [{"token": t, "logprob": x, "bytes": list(t.encode()), "top_logprobs": []} for t, x in pairs]}
