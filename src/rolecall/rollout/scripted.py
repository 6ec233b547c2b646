"""An engine that answers from a script: for tests, and for trying a recipe without a model's surprises."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rolecall.rollout.engine import Engine, Flight, weights_hash
from rolecall.rollout.stops import Ticket
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

    def open(self) -> Flight:
        """A flight that answers one request a step."""
        return _ScriptedFlight(self)

    def answers(self, request: Request) -> Iterator[Completion]:
        """The scripted answers to a request, cut to max_new_tokens."""
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


class _ScriptedFlight(Flight):
    """Answers the requests one after the other."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._waiting: deque[Ticket] = deque()

    def __len__(self) -> int:
        return sum(ticket.request.n for ticket in self._waiting)

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        self._waiting.append(ticket := Ticket(request=request, deadline=deadline))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a request, which are empty so far."""
        ticket.cancelled = True

    def step(self) -> list[tuple[Ticket, Completion]]:
        """The answers to the next request."""
        if not self._waiting:
            return []
        ticket = self._waiting.popleft()
        finish, answers = ticket.cut(), self._engine.answers(ticket.request)
        if finish is not None:
            answers = (replace(c, ids=(), behaviour_logprobs=(), finish=finish) for c in answers)
        return [(ticket, completion) for completion in answers]
