"""An engine that answers from a script: for tests, and for trying a recipe without a model's surprises."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rolecall.rollout.engine import Engine, check_numbers, weights_hash
from rolecall.types import Completion, Finish, Request

Script = Callable[[Request, int], Sequence[int]]
"""(request, sample number) -> the ids of the answer, its stop token included."""


class ScriptedEngine(Engine):
    """Replays given answers. An answer that ends with a stop id finished by itself, any other was cut off."""

    def __init__(
        self,
        script: Script,
        *,
        stop_ids: Sequence[int],
        logprobs: Callable[[Request, Sequence[int]], Sequence[float]] | None = None,
        version: int = 0,
    ) -> None:
        """`logprobs` gives the behaviour log-probs of an answer; without it every token has log-prob -1."""
        self._script, self._logprobs = script, logprobs
        self.stop_ids = tuple(stop_ids)
        self.version = version
        self._hash = ""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Note the version; a script does not depend on weights."""
        self._hash = weights_hash(weights, torch.float32)
        self.version = version

    def hash(self) -> str:
        """The fingerprint of the weights that were last loaded."""
        return self._hash

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The scripted answers, cut to max_new_tokens."""
        check_numbers(requests)
        for request in requests:
            for sample in range(request.first_sample, request.first_sample + request.n):
                ids = tuple(self._script(request, sample))[: request.sampling.max_new_tokens]
                logprobs = (-1.0,) * len(ids) if self._logprobs is None else tuple(self._logprobs(request, ids))
                stops = self.stop_ids if request.sampling.stop_ids is None else request.sampling.stop_ids
                yield Completion(
                    ids=ids,
                    behaviour_logprobs=logprobs,
                    finish=Finish.STOP if ids and ids[-1] in stops else Finish.LENGTH,
                    policy_version=self.version,
                    prompt=request.prompt,
                    sample=sample,
                    seed=request.seed,
                )
