"""The dialect of `rolecall serve`: tokens, log-probs, supports and random numbers travel bit for bit."""

import logging
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import rolecall
from rolecall.errors import UserError
from rolecall.remote.dialect import About, Call, Dialect, Published, ServerRefusedError, one_version
from rolecall.types import Completion, Finish, Request, Sampling

_log = logging.getLogger("rolecall.rollout")


class RolecallDialect(Dialect):
    """One unit at a time, answered in one batch: its shapes, and so its bits, do not depend on what else happens."""

    name = "rolecall"
    at_once = 1
    unit_prompts = None
    uploads = True
    merges = True

    def __init__(self, slot: int = 0) -> None:
        self._at = f"/slot/{slot}" if slot else ""

    def beside(self, slot: int) -> "RolecallDialect":
        """Each but the first has an engine of its own there, under a path of its own."""
        return RolecallDialect(slot)

    async def recognises(self, call: Call) -> bool:
        """Whether `/version` names us."""
        try:
            said = await call("GET", "/version")
        except ServerRefusedError as error:
            if error.status == 404:
                return False
            raise
        return isinstance(said, Mapping) and said.get("server") == self.name

    async def about(self, call: Call) -> About:
        """What `/version` says."""
        said = await call("GET", "/version")
        if said.get("version") != rolecall.__version__:
            theirs, own = said.get("version"), rolecall.__version__
            _log.warning("a server has rolecall %s, and this is %s: it is probed and used", theirs, own)
        try:
            return About(
                software=f"rolecall {said['version']}",
                engine=said["engine"],
                model=said["model"],
                dtype=said["dtype"],
                context_length=said["context_length"],
                vocabulary=said["vocabulary"],
                tokenizer=said["tokenizer"],
                policy_version=said["policy_version"],
                hash=said["hash"],
                cuda=said["cuda"],
                versions=said.get("versions", 1),
            )
        except KeyError as error:
            raise UserError(
                f"its /version does not say {error.args[0]}: serve with the same version of rolecall"
            ) from error

    def unable(self, sampling: Sampling) -> str | None:
        return None

    async def generate(self, call: Call, requests: Sequence[Request], *, seconds: float | None) -> list[Completion]:
        """Requests that are sent together are answered together."""
        said = await call(
            "POST", f"{self._at}/rolecall/v1/generate", {"requests": [_body(r, seconds) for r in requests]}
        )
        pairs = zip(requests, said["responses"], strict=True)
        return [_completion(request, choice) for request, answer in pairs for choice in answer["choices"]]

    async def score(self, call: Call, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """One after the other."""
        path = f"{self._at}/rolecall/v1/score"
        return [(await call("POST", path, {"token_ids": list(ids)}))["logprobs"] for ids in sequences]

    async def pause(self, call: Call) -> None:
        """Wait for what is in flight."""
        await call("POST", f"{self._at}/pause", query={"mode": "wait"})

    async def load(self, call: Call, published: Published) -> str | None:
        """From the directory, a broadcast, or what is sent."""
        told: dict[str, Any] = {"version": published.version, **published.names}
        if published.broadcast is not None:
            told["broadcast"] = published.broadcast
        elif published.shared:
            told["directory"] = str(published.directory)
        else:
            query = {name: str(value) for name, value in told.items()}
            return str((await call("POST", f"{self._at}/update_weights", published.file, query=query))["hash"])
        said = await call("POST", f"{self._at}/update_weights", {"update_info": told})
        return str(said["hash"])

    async def resume(self, call: Call) -> None:
        await call("POST", f"{self._at}/resume")

    async def leave(self, call: Call) -> None:
        """Have the engine removed."""
        if self._at:
            await call("DELETE", self._at)


def _body(request: Request, seconds: float | None) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "n": request.n,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop_strings) or None,
        "logprobs": 0,
    }
    if sampling.stop_ids is not None:
        params |= {"ignore_eos": True, "stop_token_ids": list(sampling.stop_ids)}
    ours = {
        "seed": request.seed,
        "step": request.step,
        "prompt": request.prompt,
        "first_sample": request.first_sample,
        "conversation": request.conversation,
        "logprobs": sampling.logprobs,
        "deadline": seconds,
    }
    return {
        "token_ids": list(request.prompt_ids),
        "sampling_params": {name: value for name, value in params.items() if value is not None},
        "rolecall": {name: value for name, value in ours.items() if value is not None},
    }


def _completion(request: Request, choice: Mapping[str, Any]) -> Completion:
    spans, own = choice["weight_versions"], choice["rolecall"]
    supports = own.get("supports")
    return Completion(
        ids=tuple(choice["token_ids"]),
        behaviour_logprobs=tuple(x["logprob"] for x in choice["logprobs"]["content"]),
        finish=Finish(own["finish"]),
        policy_version=one_version([span["version"] for span in spans]),
        prompt=request.prompt,
        sample=own["sample"],
        seed=request.seed,
        supports=None if supports is None else tuple(map(b64decode, supports)),
    )
