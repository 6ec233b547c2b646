"""A vLLM server that was started with `--enable-lora` holds versions of an adapter side by side: each request names the one it is for.

The server samples from the weights without an adapter and adds what the named one changes. A name is given once, so what vLLM has
cached belongs to it: nothing is paused or cleared when a version comes, and answers of others go on.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file, save_file

from rolecall.errors import UserError
from rolecall.remote.dialect import Call, Published, ServerLostError, ServerRefusedError
from rolecall.remote.vllm import LOAD_ADAPTER, UNLOAD_ADAPTER, VllmDialect, last_logprobs
from rolecall.serving.inside_vllm.rolecall_weights import HALF_A, HALF_B, SCALE
from rolecall.types import Completion, Request


class VllmAdapterDialect(VllmDialect):
    """One of these versions, on one server."""

    def __init__(self, slot: int) -> None:
        self._slot, self._version = slot, -1
        self._name: str | None = None
        """Of the adapter; None: answers are drawn without one."""

    async def generate(self, call: Call, requests: Sequence[Request], *, seconds: float | None) -> list[Completion]:
        return await super().generate(self._named(call), requests, seconds=seconds)

    async def score(self, call: Call, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """By the adapter, every token as an answer: vLLM's CPU build (0.32.0) dies of a prompt's log-probs with --enable-lora."""
        named = self._named(call)
        return list(await asyncio.gather(*(last_logprobs(named, ids, len(ids)) for ids in sequences)))

    async def pause(self, call: Call) -> None:
        """Nothing of this version is in flight when another takes its place."""

    async def resume(self, call: Call) -> None:
        """Nothing was paused."""

    async def load(self, call: Call, published: Published) -> str | None:
        """An adapter under a new name; whole weights and those to keep as without adapters, which stops all versions."""
        if published.base is None:
            if self._version >= 0 and not published.keep:
                raise UserError(
                    f"version {published.version} is there without its adapter, and servers hold adapters side by side: resume with the "
                    "engine that the checkpoint was saved with, or start vLLM without --enable-lora"
                )
            await self.leave(call)
            return await VllmDialect().load(call, published)
        kept = (await call("POST", "/collective_rpc", {"method": "rolecall_base"}))["results"]
        if set(kept) != {published.base.hash}:
            raise ServerRefusedError(409, "the weights that this adapter belongs to are not there")
        old, name = self._name, f"rolecall-{self._slot}-{published.version}-{uuid4().hex[:8]}"
        place = as_peft(published)
        await call("POST", LOAD_ADAPTER, {"lora_name": name, "lora_path": str(place)}, read=False)
        self._name, self._version = name, published.version
        await _unload(call, old)
        return None

    async def leave(self, call: Call) -> None:
        """Have the adapter removed."""
        old, self._name = self._name, None
        await _unload(call, old)

    def _named(self, call: Call) -> Call:
        """Calls for answers, which name the adapter. The version of an answer is that of the adapter which it says it has; what
        vLLM calls the version of its weights is that of the weights below."""
        name, version = self._name, self._version

        async def named(method: str, path: str, body: Any = None, **how: Any) -> Any:
            if name is None or path != "/inference/v1/generate":
                return await call(method, path, body, **how)
            try:
                said = await call(method, path, {**body, "model": name}, **how)
            except ServerRefusedError as error:
                if error.status != 404:
                    raise
                raise ServerLostError(f"it does not have the adapter of version {version}") from error
            found = str(version if said["model"] == name else -1)
            for choice in said["choices"]:
                choice["weight_versions"] = [{"start": 0, "end": len(choice["token_ids"]), "version": found}]
            return said

        return named


async def _unload(call: Call, name: str | None) -> None:
    if name is None:
        return
    try:
        await call("POST", UNLOAD_ADAPTER, {"lora_name": name}, read=False)
    except ServerRefusedError as error:
        if error.status != 404:  # then it was restarted
            raise


def as_peft(published: Published) -> Path:
    """The directory of an adapter as vLLM reads it, beside the one that was published."""
    if not published.shared or published.broadcast is not None:
        raise UserError(
            "vLLM with --enable-lora takes adapters from a directory that both see: set engine.weights_directory, or leave "
            "--enable-lora out"
        )
    place = published.directory / "peft"
    if place.exists():  # another server was given it
        return place
    place.mkdir()
    given = load_file(published.file)
    names = [name.removesuffix(HALF_A) for name in given if name.endswith(HALF_A)]
    tensors = {}
    for name in names:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = given[name + HALF_A]
        tensors[f"{module}.lora_B.weight"] = given[name + HALF_B] * given[name + SCALE].item()
    save_file(tensors, place / "adapter_model.safetensors")
    rank = max(len(given[name + HALF_A]) for name in names)
    modules = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in names})
    config: Mapping[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place
