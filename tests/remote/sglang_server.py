"""A server that answers as SGLang's documentation says (docs/servers.md), with tokens and log-probs of our own engine."""

import asyncio
import json
from pathlib import Path

from rolecall.rollout.engine import LocalEngine
from rolecall.serving.app import App, read_published
from rolecall.serving.http import HttpError
from rolecall.types import Finish, Request, Sampling

VERSION = "0.5.9"


class SglangApp(App):
    """SGLang's endpoints."""

    weight_version = "default"
    dtype = "float32"
    seeded = True
    engine: LocalEngine

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self.running = {}
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("POST", "/generate"): self._sglang_generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause_generation,
            ("POST", "/continue_generation"): self._continue_generation,
            ("POST", "/update_weights_from_disk"): self._update_from_disk,
        }

    async def _models(self, request):
        card = {"id": self.loaded.name, "object": "model", "created": 0, "owned_by": "sglang"}
        return {
            "object": "list",
            "data": [card | {"root": self.loaded.name, "parent": None, "max_model_len": self.engine.context_length}],
        }

    async def _server_info(self, request):
        return {
            "model_path": self.loaded.name,
            "dtype": self.dtype,
            "context_length": None,
            "enable_deterministic_inference": self.seeded,
            "disable_radix_cache": False,
            "internal_states": [{}],
            "version": VERSION,
        }

    async def _model_info(self, request):
        return {
            "model_path": self.loaded.name,
            "tokenizer_path": self.loaded.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
        }

    async def _sglang_generate(self, request):
        body = json.loads(request.body)
        if not isinstance(body["input_ids"][0], list):
            return await self._one(body, body["input_ids"], body["sampling_params"], body.get("rid"))
        each = zip(body["input_ids"], body["sampling_params"], body["rid"], strict=True)
        return await asyncio.gather(*(self._one(body, *one) for one in each))

    async def _one(self, body, ids, params, rid):
        while self.service.paused:
            await asyncio.sleep(0.01)
        own = () if params.get("ignore_eos") else (*self.engine.stop_ids, *params.get("stop_token_ids", ()))
        sampling = Sampling(
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=None if params.get("top_k", -1) == -1 else params["top_k"],
            min_p=params.get("min_p", 0.0),
            logprobs="full",
            max_new_tokens=params.get("max_new_tokens", 128),
            stop_ids=own,
            stop_strings=tuple(params.get("stop", ())),
        )
        seed = params.get("sampling_seed", 42) if self.seeded else 0
        (found,) = await self._drawn(Request(prompt_ids=tuple(ids), sampling=sampling, seed=seed))
        return {
            "text": self.loaded.tokenizer.decode(found.ids),
            "output_ids": list(found.ids),
            "meta_info": {
                "id": rid or "given",
                "finish_reason": self._reason(found, sampling),
                "prompt_tokens": len(ids),
                "weight_version": self.weight_version,
                "completion_tokens": len(found.ids),
                "cached_tokens": 0,
                "input_token_logprobs": await self._prompt(ids, body.get("logprob_start_len", -1)),
                "output_token_logprobs": [
                    [x, i, None] for x, i in zip(found.behaviour_logprobs, found.ids, strict=True)
                ],
            },
        }

    async def _drawn(self, request):
        return await self._sampled([request])

    async def _prompt(self, ids, start):
        if start < 0:
            return []
        scores = [None, *await self._scores(tuple(ids))]
        return [[None if i == start else scores[i], ids[i], None] for i in range(start, len(ids))]

    def _reason(self, found, sampling):
        if found.finish is Finish.STOP:
            return {"type": "stop", "matched": found.ids[-1]}
        if found.finish is Finish.STOP_STRING:
            text = self.loaded.tokenizer.decode(found.ids)
            return {"type": "stop", "matched": next(s for s in sampling.stop_strings if s in text)}
        if found.finish is Finish.ABORT:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return {"type": "length", "length": len(found.ids)}

    async def _abort(self, request):
        return None

    async def _pause_generation(self, request):
        assert json.loads(request.body)["mode"] in ("abort", "retract", "in_place")
        await asyncio.wrap_future(self.service.pause(abort=True))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, request):
        self.service.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _update_from_disk(self, request):
        body = json.loads(request.body)
        try:
            weights = read_published(Path(body["model_path"]))
        except (HttpError, OSError) as error:
            raise HttpError(400, f"Failed to get weights iterator: {error}.") from error
        await self._take(weights, int(body["weight_version"]))
        self.weight_version = body["weight_version"]
        said = f"Succeeded to update model weights. Weight version updated to {self.weight_version}."
        return {"success": True, "message": said, "num_paused_requests": 0}

    async def _take(self, weights, version):
        await self._on_engine(lambda: self.engine.load(weights, version), idle=True)
