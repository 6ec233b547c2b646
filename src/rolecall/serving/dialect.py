"""What goes over the wire for tokens in and out: the fields of vLLM's `/inference/v1/generate`, and ours beside them.

Numbers are JSON's: a float64 written by Python is read back as the same bits.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rolecall.serving.http import HttpError
from rolecall.types import Completion, Finish, Request, Sampling

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Unknown fields and values of another type are refused."""

Number = Annotated[int, Field(ge=0, lt=2**62)]
Count = Annotated[int, Field(ge=1, le=2**16)]
Ids = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw, in vLLM's words."""

    __pydantic_config__ = STRICT
    n: Count = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: float = 0.0
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    stop_token_ids: tuple[int, ...] | None = None
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool = False
    seed: Number | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    def sampling(self, *, stop_ids: Sequence[int], logprobs: Literal["drawn", "full"] = "drawn") -> Sampling:
        """The same for an engine whose model has these stop ids."""
        own = () if self.ignore_eos else tuple(stop_ids)
        extra = tuple(i for i in self.stop_token_ids or () if i not in own)
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k > 0 else None,
            top_p=self.top_p if self.top_p < 1 else None,
            min_p=self.min_p or None,
            logprobs=logprobs,
            max_new_tokens=self.max_tokens,
            stop_ids=(*own, *extra),
            stop_strings=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OurParams:
    """What only our engine understands."""

    __pydantic_config__ = STRICT
    seed: Number = 0
    step: Number = 0
    prompt: Number = 0
    first_sample: Number = 0
    """These four are the answer's random numbers, as in `Request`; they replace `sampling_params.seed`."""
    conversation: str | None = None
    logprobs: Literal["drawn", "full"] = "drawn"
    deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds from now after which answers end as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateBody:
    """The body of a request for answers."""

    __pydantic_config__ = STRICT
    token_ids: Ids
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    model: str | None = None
    request_id: str | None = None
    stream: Literal[False] = False
    rolecall: OurParams | None = None

    def request(self, *, stop_ids: Sequence[int]) -> Request:
        """The same for an engine. Without a seed, random numbers of its own."""
        given, ours = self.sampling_params, self.rolecall
        if ours is None:
            ours = OurParams(seed=randbits(60) if given.seed is None else given.seed)
        elif given.seed is not None:
            raise HttpError(400, "sampling_params.seed and rolecall.seed are both given: leave one out")
        return Request(
            prompt_ids=self.token_ids,
            sampling=given.sampling(stop_ids=stop_ids, logprobs=ours.logprobs),
            n=given.n,
            seed=ours.seed,
            step=ours.step,
            prompt=ours.prompt,
            first_sample=ours.first_sample,
            conversation=ours.conversation,
        )


def read(kind: TypeAdapter[T], body: bytes) -> T:
    """A JSON body as a record."""
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "unexpected_keyword_argument":
            raise HttpError(400, f"{where} is not a field of this request: leave it out") from error
        raise HttpError(400, f"{where or 'the body'}: {first['msg']}") from error


FINISH = {Finish.STOP: "stop", Finish.STOP_STRING: "stop", Finish.ABORT: "abort"}
"""vLLM's words for how an answer ended; everything else is "length"."""


def choice(index: int, completion: Completion, *, logprobs: bool) -> dict[str, Any]:
    """An answer on the wire."""
    ours: dict[str, Any] = {"finish": str(completion.finish), "sample": completion.sample}
    if completion.supports is not None:
        ours["supports"] = [b64encode(ids).decode() for ids in completion.supports]
    pairs = zip(completion.ids, completion.behaviour_logprobs, strict=True)
    return {
        "index": index,
        "token_ids": list(completion.ids),
        "finish_reason": FINISH.get(completion.finish, "length"),
        "logprobs": {"content": [{"token": f"token_id:{i}", "logprob": x} for i, x in pairs]} if logprobs else None,
        "weight_versions": [{"start": 0, "end": len(completion.ids), "version": completion.policy_version}],
        "rolecall": ours,
    }
