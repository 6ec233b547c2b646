"""The dialect of SGLang: token ids in and out by `/generate`, weights by `/update_weights_from_disk`.

Written from the documentation of SGLang 0.5 and tested against a server that answers as that says. It has not been run against a
real SGLang: that is said at every start, and the rehearsal and the probe decide whether a server can be used.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from rolecall.errors import UserError
from rolecall.remote.dialect import About, Call, Dialect, Published, ServerRefusedError, lacks
from rolecall.remote.vllm import seed_of
from rolecall.types import Completion, Finish, Request, Sampling

_log = logging.getLogger("rolecall.rollout")

_DOCUMENTED = "0.5"
"""The version whose documentation this file follows."""
_START = "start it with `python -m sglang.launch_server`, version 0.5 or later"
_DTYPES = {"bfloat16": "bfloat16", "float": "float32", "float32": "float32"}
_NO_VERSION = -1
"""Of weights that were never given a version: those of a server that was just started."""
_TAIL = 8
"""Tokens of a sequence that are scored once more, after a prefix that may come from the cache."""


class SglangDialect(Dialect):
    """A request for each prompt, any number of them in flight: SGLang puts them into batches itself."""

    name = "sglang"
    at_once = 256
    unit_prompts = 1
    uploads = False
    sign_of_life = "/model_info"  # its /health draws a token, which it cannot while it is paused

    async def recognises(self, call: Call) -> bool:
        """Whether it says that it owns its model."""
        try:
            said = await call("GET", "/v1/models")
        except ServerRefusedError as error:
            if error.status == 404:
                return False
            raise
        return isinstance(said, Mapping) and any(m.get("owned_by") == "sglang" for m in said.get("data", ()))

    async def about(self, call: Call) -> About:
        """What it says, after its endpoints were tried."""
        info = await _endpoint(call, "GET", "/server_info")
        version, dtype = str(info.get("version", "?")), _DTYPES.get(str(info.get("dtype")))
        _log.warning(
            "SGLang %s: rolecall follows the documentation of %s and has not been run against a real server of this kind; it "
            "is probed and used",
            *(version, _DOCUMENTED),
        )
        if dtype is None:
            raise UserError(
                f"it says that it computes in {info.get('dtype')}; start it with --dtype bfloat16 or --dtype float32, so that it can be "
                "compared with the trainer"
            )
        if not info.get("enable_deterministic_inference"):
            _log.warning(
                "SGLang draws without the seeds of its requests, so a run cannot be repeated: start it with "
                "--enable-deterministic-inference"
            )
        await _endpoint(call, "POST", "/continue_generation", {})  # a run may have been killed while it gave weights
        model = await _endpoint(call, "GET", "/model_info")
        await _endpoint(call, "POST", "/generate", _body([(0,)], [{"max_new_tokens": 1}], uuid4().hex))
        await self.pause(call)
        await self.resume(call)
        try:
            await call("GET", "/update_weights_from_disk")
        except ServerRefusedError as error:
            if error.status != 405:  # it is there, for POST
                raise lacks("/update_weights_from_disk", _START) from error
        (card,) = [m for m in (await call("GET", "/v1/models"))["data"] if m.get("max_model_len") is not None]
        return About(
            software=f"sglang {version}",
            engine="sglang",
            model=str(model["model_path"]),
            dtype=dtype,
            context_length=int(card["max_model_len"]),
            policy_version=_version(model["weight_version"]) if str(model["weight_version"]).isdigit() else None,
        )

    def unable(self, sampling: Sampling) -> str | None:
        """Cuts: its log-probs are those before them."""
        if sampling.records_support:
            return (
                f"gives log-probs at the temperature, over the whole vocabulary: leave out {sampling.cuts}, or set "
                "sampling.logprobs full, which biases the gradient"
            )
        return None

    async def generate(self, call: Call, requests: Sequence[Request], *, seconds: float | None) -> list[Completion]:
        """A call for each request; its answers have seeds of their own."""
        found = await asyncio.gather(*(self._answer(call, request, seconds) for request in requests))
        return [completion for completions in found for completion in completions]

    async def _answer(self, call: Call, request: Request, seconds: float | None) -> list[Completion]:
        name, params = uuid4().hex, _params(request.sampling)
        each = [params | {"sampling_seed": seed_of(request) + i} for i in range(request.n)]
        body = _body([request.prompt_ids] * request.n, each, name)
        task = asyncio.ensure_future(call("POST", "/generate", body))
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done:
                await asyncio.gather(*(call("POST", "/abort_request", {"rid": rid}) for rid in body["rid"]))
            said = await task
        finally:
            task.cancel()
        if len(said) != request.n:
            raise ValueError(f"{len(said)} answers instead of {request.n}")
        return [_completion(request, i, answer, late=not done) for i, answer in enumerate(said)]

    async def score(self, call: Call, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As prompts, and the last tokens of each once more. SGLang computes a prompt anew from where its log-probs begin, and
        takes what is before that from its cache: only the second way notices one that is stale."""
        whole = await asyncio.gather(*(_prompt_logprobs(call, ids, 0) for ids in sequences))
        starts = [max(0, len(ids) - 1 - _TAIL) for ids in sequences]
        pairs = zip(sequences, starts, strict=True)
        tails = await asyncio.gather(*(_prompt_logprobs(call, ids, start) for ids, start in pairs))
        return [[*a[: len(a) - len(b)], *b] for a, b in zip(whole, tails, strict=True)]

    async def pause(self, call: Call) -> None:
        """Break off what is in flight, which nobody waits for by now, and take on nothing new."""
        await _endpoint(call, "POST", "/pause_generation", {"mode": "abort"})

    async def load(self, call: Call, published: Published) -> str | None:
        """From the directory. SGLang scores nothing while it is paused, so it goes on before the probe; each answer says by
        which version it was drawn."""
        if not published.shared:
            raise UserError(
                "SGLang reads weights from a directory that it sees: set engine.weights_directory to one that this machine "
                "and the server share"
            )
        where = {"model_path": str(published.directory), "weight_version": str(published.version), "flush_cache": True}
        said = await _endpoint(call, "POST", "/update_weights_from_disk", where)
        if not said["success"]:
            raise ServerRefusedError(200, str(said.get("message")))
        await self.resume(call)
        return None

    async def resume(self, call: Call) -> None:
        await _endpoint(call, "POST", "/continue_generation", {})


async def _endpoint(call: Call, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    try:
        return await call(method, path, body)
    except ServerRefusedError as error:
        if error.status not in (404, 405):
            raise
        raise lacks(path, _START) from error


def _params(sampling: Sampling) -> dict[str, Any]:
    """All of them: what is left out would be taken from the model's generation_config.json."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": sampling.max_new_tokens,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "ignore_eos": sampling.stop_ids == (),
    }
    if sampling.stop_ids:
        params["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.stop_strings:
        params["stop"] = list(sampling.stop_strings)
    return params


def _body(prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {
        "rid": [f"{name}-{i}" for i in range(len(prompts))],
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": list(params),
        "return_logprob": True,
    }


async def _prompt_logprobs(call: Call, ids: Sequence[int], start: int) -> list[float]:
    """log p of the tokens after the one at `start`."""
    params = _params(Sampling(max_new_tokens=1))
    body = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
    found = (await call("POST", "/generate", body))["meta_info"]["input_token_logprobs"]
    if [at[1] for at in found] != list(ids[start:]):
        raise ValueError("log-probs of other tokens than those that were sent")
    return [float(at[0]) for at in found[1:]]


def _completion(request: Request, index: int, answer: Mapping[str, Any], *, late: bool) -> Completion:
    ids, meta = answer["output_ids"], answer["meta_info"]
    content = meta["output_token_logprobs"]
    if [at[1] for at in content] != ids:
        raise ValueError("log-probs of other tokens than those that were drawn")
    return Completion(
        ids=tuple(ids),
        behaviour_logprobs=tuple(float(at[0]) for at in content),
        finish=_finish(meta["finish_reason"], request.sampling, late=late),
        policy_version=_version(meta["weight_version"]),
        prompt=request.prompt,
        sample=request.first_sample + index,
        seed=request.seed,
    )


def _finish(reason: Mapping[str, Any], sampling: Sampling, *, late: bool) -> Finish:
    if reason["type"] == "stop":
        matched = reason["matched"]
        if isinstance(matched, str):
            return Finish.STOP_STRING
        if sampling.stop_ids is not None and matched not in sampling.stop_ids:
            raise UserError(
                f"SGLang ends answers at token {matched}, an end of the model that it serves, though sampling.stop_ids do not "
                "have it; add it, or leave them out"
            )
        return Finish.STOP
    if reason["type"] == "abort" and late:
        return Finish.TIMEOUT
    return {"length": Finish.LENGTH, "abort": Finish.ABORT}[reason["type"]]


def _version(said: Any) -> int:
    return int(said) if str(said).isdigit() else _NO_VERSION
