"""The endpoints of `rolecall serve`."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor

from rolecall.policy.load import LoadedModel
from rolecall.rollout.engine import LocalEngine, check_numbers, check_request, weights_hash
from rolecall.rollout.service import Service, ServiceClosedError
from rolecall.serving import openai
from rolecall.serving.dialect import STRICT, Count, GenerateBody, Ids, Number, choice, read
from rolecall.serving.http import UPLOAD, HttpError, HttpRequest
from rolecall.serving.inside_vllm.rolecall_weights import merged, receive
from rolecall.train.manifest import MANIFEST, DamagedCheckpointError, check_model
from rolecall.types import Completion, Request

_GENERATE = TypeAdapter(GenerateBody)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Several:
    __pydantic_config__ = STRICT
    requests: Annotated[tuple[GenerateBody, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Broadcast:
    """Where tensors are sent from, and which: as in `rolecall_weights`."""

    __pydantic_config__ = STRICT
    host: str
    port: Annotated[int, Field(ge=1, lt=2**16)]
    rank: Count
    size: Count
    backend: Literal["gloo", "nccl"]
    seconds: Annotated[float, Field(gt=0)]
    tensors: tuple[
        tuple[str, Literal["float64", "float32", "bfloat16", "float16"], tuple[Annotated[int, Field(ge=0)], ...]], ...
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    __pydantic_config__ = STRICT
    version: Number
    directory: str | None = None
    broadcast: _Broadcast | None = None
    """Without both, the weights are the body of the request."""
    base: str | None = None
    """The name of the weights to which these are an adapter."""
    keep: str | None = None
    """Keep the weights aside under this name, for adapters; answers are not drawn from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    __pydantic_config__ = STRICT
    update_info: _Published


@dataclass(frozen=True, kw_only=True, slots=True)
class _Score:
    __pydantic_config__ = STRICT
    token_ids: Ids


_SEVERAL, _UPDATE, _SCORE = TypeAdapter(_Several), TypeAdapter(_Update), TypeAdapter(_Score)
_AS_SENT = torch.float32
"""What tensors that are kept, and adapters, are hashed in: it holds the values of all smaller dtypes."""
_VERSIONS = 8
"""That may stand side by side: each is a copy of the weights."""
_SLOT = re.compile(r"/slot/([1-9][0-9]?)(/.*)?")


class App:
    """Answers HTTP requests by an engine's service. Below `/slot/N/` are the same paths for another engine, which holds another
    version: it is made when it is first paused or given weights, and removed by DELETE. All share the kept weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: LocalEngine,
        *,
        about: Mapping[str, Any],
        another: Callable[[], LocalEngine] | None = None,
        kept: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """`about` is what `/version` says beside what it knows itself; `another` makes an engine for a slot, and `kept` are the
        weights for adapters, by name, of the app whose slot this is."""
        self.loaded, self.engine, self.about = loaded, engine, about
        self.service = Service(engine)
        self._another, self._is_slot = another, kept is not None
        self._kept: dict[str, dict[str, Tensor]] = {} if kept is None else kept
        self._slots: dict[int, App] = {}
        self._making = asyncio.Lock()
        self._routes: dict[tuple[str, str], Callable[[HttpRequest], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/rolecall/v1/generate"): self._generate_several,
            ("POST", "/rolecall/v1/score"): self._score,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/update_weights"): self._update_weights,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
        }

    async def __call__(self, request: HttpRequest) -> Any:
        """What to answer."""
        if self._another is not None and (found := _SLOT.fullmatch(request.path)):
            return await self._in_slot(int(found[1]), replace(request, path=found[2] or "/"))
        route = self._routes.get((request.method, request.path))
        if route is not None:
            with _said():
                return await route(request)
        methods = [method for method, path in self._routes if path == request.path]
        if methods:
            raise HttpError(405, f"{request.path} takes {' or '.join(methods)}, not {request.method}")
        raise HttpError(404, f"there is no {request.path} here")

    def close(self) -> None:
        """End the engines' threads."""
        for app in (self, *self._slots.values()):
            app.service.close()

    async def _in_slot(self, number: int, request: HttpRequest) -> Any:
        """What the engine of a slot answers."""
        if number >= _VERSIONS:
            raise HttpError(400, f"there is no slot {number}: {_VERSIONS} versions stand side by side at most")
        async with self._making:
            if request.method == "DELETE":
                if (gone := self._slots.pop(number, None)) is not None:
                    await asyncio.to_thread(gone.close)
                return {}
            if number not in self._slots:
                if request.path not in ("/pause", "/update_weights"):
                    raise HttpError(503, f"slot {number} holds nothing: give it weights first")
                assert self._another is not None
                engine = await asyncio.to_thread(self._another)
                engine.version = -1  # of nobody's weights
                self._slots[number] = type(self)(self.loaded, engine, about=self.about, kept=self._kept)
        return await self._slots[number](request)

    async def _health(self, request: HttpRequest) -> Any:
        return {}

    async def _version(self, request: HttpRequest) -> Any:
        engine = self.engine
        return {
            "server": "rolecall",
            **self.about,
            "model": self.loaded.name,
            "policy_version": engine.version,
            "hash": await self._on_engine(engine.hash, idle=False),
            "dtype": str(engine.dtype).removeprefix("torch."),
            "vocabulary": engine.vocabulary,
            "context_length": engine.context_length,
            "stop_ids": list(engine.stop_ids),
            "paused": self.service.paused,
            "in_flight": len(self.service),
            "cuda": self.loaded.model.device.type == "cuda",
            "versions": 1 if self._another is None else _VERSIONS,
        }

    async def _models(self, request: HttpRequest) -> Any:
        model = {"id": self.loaded.name, "object": "model", "max_model_len": self.engine.context_length}
        return {"object": "list", "data": [model | {"created": 0, "owned_by": "rolecall"}]}

    async def _is_paused(self, request: HttpRequest) -> Any:
        return {"is_paused": self.service.paused}

    async def _generate(self, request: HttpRequest) -> Any:
        (answer,) = await self._answers([read(_GENERATE, request.body)])
        return answer

    async def _generate_several(self, request: HttpRequest) -> Any:
        return {"responses": await self._answers(read(_SEVERAL, request.body).requests)}

    async def _answers(self, bodies: Sequence[GenerateBody]) -> list[dict[str, Any]]:
        """The answers to requests that are taken on together."""
        for body in bodies:
            self._check_model(body.model)
        deadlines = {None if body.rolecall is None else body.rolecall.deadline for body in bodies}
        if len(deadlines) > 1:
            raise HttpError(400, "requests that are sent together have one deadline: give all of them the same")
        requests = [body.request(stop_ids=self.engine.stop_ids) for body in bodies]
        (seconds,) = deadlines
        completions = iter(await self._sampled(requests, seconds))
        answers = []
        for body in bodies:
            given = body.sampling_params
            own = [next(completions) for _ in range(given.n)]
            scored = None if given.prompt_logprobs is None else await self._scores(body.token_ids)
            answer: dict[str, Any] = {"request_id": body.request_id or uuid4().hex, "prompt_logprobs": None}
            answer["choices"] = [choice(i, c, logprobs=given.logprobs is not None) for i, c in enumerate(own)]
            if scored is not None:
                pairs = zip(body.token_ids[1:], scored, strict=True)
                answer["prompt_logprobs"] = [None, *({str(i): {"logprob": x}} for i, x in pairs)]
            answers.append(answer)
        return answers

    async def _sampled(self, requests: Sequence[Request], seconds: float | None = None) -> list[Completion]:
        for request in requests:
            check_request(request, context_length=self.engine.context_length, vocabulary=self.engine.vocabulary)
        check_numbers(requests)
        deadline = None if seconds is None else time.monotonic() + seconds
        return await asyncio.wrap_future(self.service.submit(requests, deadline=deadline))

    async def _score(self, request: HttpRequest) -> Any:
        return {"logprobs": await self._scores(read(_SCORE, request.body).token_ids)}

    async def _scores(self, ids: tuple[int, ...]) -> list[float]:
        if len(ids) > self.engine.context_length or max(ids) >= self.engine.vocabulary:
            raise HttpError(400, "token_ids are more than the model's context, or hold one outside its vocabulary")
        return await self._on_engine(lambda: self.engine.score(ids), idle=False) if len(ids) > 1 else []

    async def _on_engine(self, function: Callable[[], Any], *, idle: bool) -> Any:
        return await asyncio.wrap_future(self.service.call(function, idle=idle))

    async def _pause(self, request: HttpRequest) -> Any:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait"):
            raise HttpError(400, f"mode={mode} is not known here: give wait or abort")
        await asyncio.wrap_future(self.service.pause(abort=mode == "abort"))
        return {"status": "paused"}

    async def _resume(self, request: HttpRequest) -> Any:
        self.service.resume()
        return {"status": "resumed"}

    async def _update_weights(self, request: HttpRequest) -> Any:
        """From a published directory, a broadcast, or a body that is a safetensors file; whole, or an adapter."""
        sent = request.headers.get("content-type") == UPLOAD
        told = _in_query(request.query) if sent else read(_UPDATE, request.body).update_info
        if not sent and (told.directory is None) == (told.broadcast is None):
            raise HttpError(400, "give the directory that holds the weights, or the broadcast that brings them")
        if told.base is not None and told.base not in self._kept:
            raise HttpError(409, "the weights that this adapter belongs to are not here: send them first")
        weights = await asyncio.to_thread(_received, request.body) if sent else await asyncio.to_thread(_fetched, told)
        if told.keep is not None:
            self._kept.clear()
            self._kept[told.keep] = weights
            return {"version": told.version, "hash": await asyncio.to_thread(weights_hash, weights, _AS_SENT)}
        hashed = None
        if told.base is not None:
            hashed = weights_hash(weights, _AS_SENT)
            weights = await asyncio.to_thread(merged, self._kept[told.base], weights)
        elif not (self._is_slot or self._slots):
            self._kept.clear()
        # A load that has begun is finished, whether or not the client stays to hear of it.
        await asyncio.shield(self._on_engine(lambda: self.engine.load(weights, told.version), idle=True))
        return {"version": told.version, "hash": hashed or await self._on_engine(self.engine.hash, idle=False)}

    async def _completions(self, request: HttpRequest) -> Any:
        return await self._openai(read(openai.COMPLETION, request.body))

    async def _chat(self, request: HttpRequest) -> Any:
        return await self._openai(read(openai.CHAT, request.body))

    async def _openai(self, body: openai.CompletionBody | openai.ChatBody) -> Any:
        self._check_model(body.model)
        requests = body.requests(self.loaded)
        return openai.answer(body, self.loaded, requests, await self._sampled(requests))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.loaded.name):
            raise HttpError(404, f"model {name!r} is not served here, but {self.loaded.name!r}")


def read_published(directory: Path) -> dict[str, Tensor]:
    """The weights of a directory that was sealed with a manifest, checked against it."""
    if not (directory / MANIFEST).is_file():
        raise HttpError(400, f"{directory} has no {MANIFEST}: publish weights with one")
    try:
        check_model(directory)
    except DamagedCheckpointError as error:
        raise HttpError(400, str(error)) from error
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def _in_query(query: Mapping[str, str]) -> _Published:
    """What is said of weights that are the body of a request."""
    version = query.get("version", "")
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise HttpError(400, "weights that are sent need ?version=NUMBER")
    return _Published(version=int(version), base=query.get("base"), keep=query.get("keep"))


def _fetched(told: _Published) -> dict[str, Tensor]:
    if told.broadcast is None:
        return read_published(Path(str(told.directory)))
    try:
        return dict(receive(asdict(told.broadcast), rank=told.broadcast.rank))
    except (RuntimeError, OSError) as error:
        raise HttpError(424, f"the broadcast did not arrive: {' '.join(str(error).split())[:200]}") from error


def _received(body: bytes) -> dict[str, Tensor]:
    try:
        return load_bytes(body)
    except SafetensorError as error:
        raise HttpError(400, f"the body is not a safetensors file: {error}") from error


@contextmanager
def _said() -> Iterator[None]:
    """What an engine refuses, as a status with its sentence."""
    try:
        yield
    except ServiceClosedError as error:
        raise HttpError(503, str(error)) from error
    except ValueError as error:
        raise HttpError(400, str(error)) from error
