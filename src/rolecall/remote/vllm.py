"""The dialect of vLLM: token ids in and out by `/inference/v1/generate`, weights by our worker extension.

Its endpoints move between releases, so everything that depends on them is in this file. `TESTED` is the range that `make test-vllm`
has run against; another version is warned about, probed at the start and used.
"""

import asyncio
import hashlib
import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, isfinite
from typing import Any
from uuid import uuid4

from rolecall.errors import UserError
from rolecall.remote.dialect import (
    About,
    Call,
    Dialect,
    Published,
    ServerLostError,
    ServerRefusedError,
    lacks,
    one_version,
)
from rolecall.types import Completion, Finish, Request, Sampling

_log = logging.getLogger("rolecall.rollout")

TESTED = ((0, 32), (0, 33))
"""From the first of these versions to before the second."""
_START = "start it with `rolecall serve MODEL --vllm`"
_LOWEST_TEMPERATURE = 0.01
"""vLLM draws at this one where a lower one is requested."""
_MOST_TOKENS = 1000
"""Of which it gives the log-probs, at one position, as `rolecall serve --vllm` starts it."""
_MOST_SAMPLES = 64
"""Answers to one request. It takes no more than its --max-num-seqs, which is 128 or more unless it is set lower."""
_EXTENSION = 2
"""What `rolecall_vllm` says that it is."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_NO_VERSION = -1
"""Of weights that were never given a version: those of a server that was just started."""
_TAIL = 8
"""Tokens of a sequence that are scored as answers. What is before them must fill a block of the prefix cache (16 tokens on GPUs,
32 on a CPU as we start it)."""


class VllmDialect(Dialect):
    """A request for each prompt, any number of them in flight: vLLM puts them into batches itself."""

    name = "vllm"
    at_once = 256
    unit_prompts = 1
    uploads = False
    merges = True

    def beside(self, slot: int) -> Dialect:
        """Each is an adapter of its own, which requests name."""
        from rolecall.remote.vllm_adapters import VllmAdapterDialect  # which is made of this one

        return VllmAdapterDialect(slot)

    async def recognises(self, call: Call) -> bool:
        """Whether it says that it owns its model."""
        try:
            said = await call("GET", "/v1/models")
        except ServerRefusedError as error:
            if error.status == 404:
                return False
            raise
        return isinstance(said, Mapping) and any(m.get("owned_by") == "vllm" for m in said.get("data", ()))

    async def about(self, call: Call) -> About:
        """What it says, after a token was drawn from it to see that it answers as this file expects."""
        version = str((await call("GET", "/version"))["version"])
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not TESTED[0] <= found < TESTED[1]:
            _log.warning(
                "vLLM %s is outside the tested range (%d.%d up to before %d.%d): it is probed and used",
                *(version, *TESTED[0], *TESTED[1]),
            )
        config = (await _endpoint(call, "GET", "/server_info", query={"config_format": "json"}))["vllm_config"]
        model = config["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"its log-probs are {model['logprobs_mode']}, not those of the distribution it draws from; {_START}, or add "
                "--logprobs-mode processed_logprobs"
            )
        split = config["scheduler_config"]["enable_chunked_prefill"]
        if config["device_config"]["device"] == "cpu" and split:
            raise UserError(
                "it splits long prompts, and the CPU build of vLLM dies when a prompt with a seed is split; "
                f"{_START}, or add --no-enable-chunked-prefill"
            )
        if (await _endpoint(call, "GET", "/is_paused"))["is_paused"]:  # by a run that was killed while it gave weights
            await _endpoint(call, "POST", "/resume")
        processes = await self._inside(call)
        inside = processes[0]
        adapters = config.get("lora_config")
        if adapters is not None:
            await _check_adapters(call)
        await _endpoint(call, "POST", "/inference/v1/generate", _body(_PROBE, uuid4().hex))
        said = (await _endpoint(call, "GET", "/weight_info"))["weight_version"]
        return About(
            software=f"vllm {version}",
            engine="vllm",
            model=str(model["served_model_name"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            context_length=int(model["max_model_len"]),
            vocabulary=int(inside["vocabulary"]),
            tokenizer=inside["tokenizer"],
            policy_version=int(said) if said.isdigit() else None,
            processes=len(processes),
            cuda=bool(inside["cuda"]),
            versions=1 if adapters is None else int(adapters["max_loras"]),
            highest_rank=None if adapters is None else int(adapters["max_lora_rank"]),
        )

    async def _inside(self, call: Call) -> Sequence[Mapping[str, Any]]:
        try:
            said = await _endpoint(call, "POST", "/collective_rpc", {"method": "rolecall_about"})
            found: Sequence[Mapping[str, Any]] = said["results"]
            if found[0]["extension"] != _EXTENSION:
                raise UserError(
                    f"its worker extension is of another version of rolecall; {_START}, or see docs/vllm.md"
                )
            return found
        except ServerLostError as error:
            raise UserError(
                f"it was started without rolecall's worker extension, so it cannot take weights; {_START}, or see docs/vllm.md"
                f" ({error})"
            ) from error

    def unable(self, sampling: Sampling) -> str | None:
        """Cuts whose tokens it does not name."""
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            return (
                f"draw at temperature {_LOWEST_TEMPERATURE} or above, or greedily: {sampling.temperature:g} is neither"
            )
        if not sampling.cuts_support or sampling.temperature == 0:
            return None
        if sampling.logprobs != "drawn":
            return "gives log-probs of the tokens that could be drawn only: set sampling.logprobs drawn, or leave the cuts out"
        if sampling.top_k is None or sampling.top_k > _MOST_TOKENS:
            return (
                f"does not say which tokens could be drawn with {sampling.cuts}: set sampling.top_k, to at most {_MOST_TOKENS}, "
                "or leave the cuts out"
            )
        return None

    async def generate(self, call: Call, requests: Sequence[Request], *, seconds: float | None) -> list[Completion]:
        """Each by a request of its own, or by several: answers have the seeds of their numbers either way."""
        parts = [part for request in requests for part in _in_parts(request)]
        found = await asyncio.gather(*(self._answer(call, part, seconds) for part in parts))
        return [completion for completions in found for completion in completions]

    async def _answer(self, call: Call, request: Request, seconds: float | None) -> list[Completion]:
        name = uuid4().hex
        task = asyncio.ensure_future(call("POST", "/inference/v1/generate", _body(request, name)))
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done:
                await call("POST", "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{name}"]})
            said = await task
        finally:
            task.cancel()
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        if request.sampling.temperature == 0:  # then all answers are the same, and vLLM gives one
            choices *= request.n
        if len(choices) != request.n:
            raise ValueError(f"{len(choices)} answers instead of {request.n}")
        return [_completion(request, i, choice, late=not done) for i, choice in enumerate(choices)]

    async def score(self, call: Call, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As prompts, and the last tokens of each once more as answers, each after all that is before it. vLLM computes
        a prompt's log-probs without its prefix cache: only the second way notices one that is stale."""
        whole, tails = await asyncio.gather(
            asyncio.gather(*(_prompt_logprobs(call, ids) for ids in sequences)),
            asyncio.gather(*(last_logprobs(call, ids, _TAIL) for ids in sequences)),
        )
        return [[*a[: len(a) - len(b)], *b] for a, b in zip(whole, tails, strict=True)]

    async def pause(self, call: Call) -> None:
        """Wait for what is in flight, and forget what was cached."""
        await _endpoint(call, "POST", "/pause", query={"mode": "wait", "clear_cache": "true"})

    async def load(self, call: Call, published: Published) -> str | None:
        """From the directory or a broadcast, by the worker extension. vLLM scores nothing while it is paused, so it goes on
        before the probe; each answer says by which version it was drawn."""
        told: dict[str, Any] = dict(published.names)
        if published.broadcast is not None:
            told["broadcast"] = published.broadcast
        elif published.shared:
            told["directory"] = str(published.directory)
        else:
            raise UserError(
                "vLLM cannot be sent weights: set engine.weights_directory to a directory that this machine and the server "
                "share, or engine.sync broadcast"
            )
        await self.pause(call)
        await _endpoint(call, "POST", "/collective_rpc", {"method": "rolecall_load", "kwargs": told})
        if not published.keep:
            await _endpoint(call, "POST", "/update_weight_version", {"new_version": str(published.version)})
        await self.resume(call)
        return None

    async def resume(self, call: Call) -> None:
        await _endpoint(call, "POST", "/resume")


async def _endpoint(call: Call, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> Any:
    """Call an endpoint that only a server with the right flags has."""
    try:
        return await call(method, path, body, **how)
    except ServerRefusedError as error:
        if error.status not in (404, 405):
            raise
        raise lacks(path, _START) from error


async def _check_adapters(call: Call) -> None:
    """Refuse a server that does not load adapters while it runs; one without a name is refused in any case."""
    try:
        await _endpoint(call, "POST", LOAD_ADAPTER, {"lora_name": "", "lora_path": ""}, read=False)
    except ServerRefusedError:
        return


def seed_of(request: Request) -> int:
    """The seed of the first answer; vLLM gives the others the numbers after it.

    A function of (seed, step, prompt, sample, position), as every random number: whoever asks again for an answer gets the
    same seed, and the next turn of a conversation another one.
    """
    parts = repr((request.seed, request.step, request.prompt, len(request.prompt_ids)))
    return (int.from_bytes(hashlib.sha256(parts.encode()).digest()[:8], "big") >> 2) + request.first_sample


def _in_parts(request: Request) -> list[Request]:
    starts = range(0, request.n, _MOST_SAMPLES)
    return [
        replace(request, n=min(_MOST_SAMPLES, request.n - i), first_sample=request.first_sample + i) for i in starts
    ]


def _body(request: Request, name: str) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "n": request.n if sampling.temperature > 0 else 1,
        "seed": seed_of(request),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "logprobs": sampling.top_k if sampling.records_support else 0,
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,
    }
    if sampling.temperature > 0:
        params |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0, "min_p": sampling.min_p or 0.0}
    if sampling.stop_strings:
        params["stop"] = list(sampling.stop_strings)
    if sampling.stop_ids is not None:
        params |= {"ignore_eos": True, "stop_token_ids": list(sampling.stop_ids)}
    return {"request_id": name, "token_ids": list(request.prompt_ids), "sampling_params": params}


_PROBE = Request(prompt_ids=(0,), sampling=Sampling(max_new_tokens=1))


async def _prompt_logprobs(call: Call, ids: Sequence[int]) -> list[float]:
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    said = await call("POST", "/inference/v1/generate", {"token_ids": list(ids), "sampling_params": params})
    return [float(at[str(i)]["logprob"]) for i, at in zip(ids[1:], said["prompt_logprobs"][1:], strict=True)]


async def last_logprobs(call: Call, ids: Sequence[int], count: int) -> list[float]:
    """log p of the last tokens of a sequence, each drawn for."""
    ends = range(max(1, len(ids) - count), len(ids))
    return list(await asyncio.gather(*(_next_logprob(call, ids[:end], ids[end]) for end in ends)))


async def _next_logprob(call: Call, before: Sequence[int], token: int) -> float:
    """log p of a token, whichever one is drawn. It is named twice: the drawn one counts as one of `logprobs`."""
    params = {"max_tokens": 1, "seed": 0, "detokenize": False, "logprobs": 2, "logprob_token_ids": [token, token]}
    said = await call("POST", "/inference/v1/generate", {"token_ids": list(before), "sampling_params": params})
    found = {at["token_id"]: at["logprob"] for at in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    return float(found[token])


def _completion(request: Request, index: int, choice: Mapping[str, Any], *, late: bool) -> Completion:
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    if [at["token_id"] for at in content] != ids:
        raise ValueError("log-probs of other tokens than those that were drawn")
    spans = choice["weight_versions"]
    versions = [int(span["version"]) if span["version"].isdigit() else _NO_VERSION for span in spans]
    sampling = request.sampling
    return Completion(
        ids=tuple(ids),
        behaviour_logprobs=tuple(float(at["logprob"]) for at in content),
        finish=_finish(choice, late=late),
        policy_version=one_version(versions or [_NO_VERSION]),
        prompt=request.prompt,
        sample=request.first_sample + index,
        seed=request.seed,
        supports=tuple(_support(at["top_logprobs"]) for at in content) if sampling.records_support else None,
    )


def _finish(choice: Mapping[str, Any], *, late: bool) -> Finish:
    reason = choice["finish_reason"]
    if reason == "stop":
        return Finish.STOP_STRING if isinstance(choice["stop_reason"], str) else Finish.STOP
    if reason == "abort" and late:
        return Finish.TIMEOUT
    return {"length": Finish.LENGTH, "abort": Finish.ABORT}[reason]


def _support(candidates: Sequence[Mapping[str, Any]]) -> bytes:
    """The tokens that could be drawn: those with a probability, which together have all of it."""
    held = {at["token_id"]: at["logprob"] for at in candidates if isfinite(at["logprob"]) and at["logprob"] > -1000.0}
    if abs(sum(map(exp, held.values())) - 1) > 1e-3:
        raise ValueError("the tokens that could be drawn have not all of the probability")
    return array("i", sorted(held)).tobytes()
