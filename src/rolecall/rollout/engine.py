"""What the rest of the library requires of an engine, and what every engine requires of its requests."""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from rolecall.policy.sharded import whole
from rolecall.rollout.stops import Answer, Ticket, empty_answers
from rolecall.types import Completion, Finish, Request, Sampling


class Flight(Protocol):
    """Requests in flight. One thread calls `step`, over and over; the others may be called from any thread."""

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        """Take a request on; a `ValueError` if it cannot be answered. What has not ended at the `deadline`, a time of
        `time.monotonic()`, ends as it is, with `Finish.TIMEOUT`."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a request as they are, with `Finish.ABORT`."""
        ...

    def step(self) -> list[tuple[Ticket, Completion]]:
        """Work for a while; the answers that ended. Empty while answers grow, and when there is nothing to do."""
        ...

    def __len__(self) -> int:
        """Answers that have not ended."""
        ...


class Engine(Protocol):
    """Samples answers from one set of weights. Keeps no random state: see `Request`.

    If it also has `release()`, that is called before an update and frees what the `load` after it replaces.
    """

    version: int
    """The policy version of the loaded weights; it is written into every completion."""

    def open(self) -> Flight:
        """Where requests can be added while others are answered. Flights do not know of each other. Weights are loaded
        when nothing is in flight."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests and of their samples."""
        return in_order(requests, self.stream(requests))

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The same answers, each as soon as it ends."""
        check_numbers(requests)
        flight = self.open()
        for request in requests:
            flight.add(request)
        while flight:
            for _, completion in flight.step():
                yield completion

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights (by their Hugging Face names), cast to the engine's dtype. Those that lie in parts on several ranks
        are gathered one at a time: all ranks load."""
        ...

    def hash(self) -> str:
        """`weights_hash` of the weights the engine samples from."""
        ...


class LocalEngine(Engine):
    """What the engines that sample in this process share."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        context_length: int,
        dtype: torch.dtype | None = None,
        version: int = 0,
        max_rows: int = 64,
    ) -> None:
        """`dtype` defaults to the model's; `max_rows` answers grow at a time."""
        self.tokenizer, self.stop_ids, self.context_length = tokenizer, tuple(stop_ids), context_length
        self.dtype = dtype or model.dtype
        self.version, self.max_rows = version, max_rows

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        raise NotImplementedError

    def score(self, ids: Sequence[int]) -> list[float]:
        """log p of every token but the first, at temperature 1 over the whole vocabulary."""
        raise NotImplementedError

    def start(self, ticket: Ticket) -> list[Answer]:
        """The empty answers of a request, after a check of it."""
        check_request(ticket.request, context_length=self.context_length, vocabulary=self.vocabulary)
        return empty_answers(
            ticket, stop_ids=self.stop_ids, tokenizer=self.tokenizer, context_length=self.context_length
        )


class LocalFlight(Flight):
    """What the flights of engines in this process share: new requests wait until the next `step` takes them."""

    def __init__(self, engine: LocalEngine) -> None:
        self._start = engine.start
        self._new: deque[list[Answer]] = deque()
        self._cuts = False  # True if a request may end before its answers do

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        ticket = Ticket(request=request, deadline=deadline)
        self._new.append(self._start(ticket))
        self._cuts |= deadline is not None
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a request as they are."""
        ticket.cancelled = self._cuts = True


class StreamFlight(Flight):
    """A flight of an engine that answers lists: what waits when the list before has ended is the next one."""

    def __init__(self, stream: Callable[[Sequence[Request]], Iterator[Completion]]) -> None:
        self._stream, self._waiting = stream, deque[Ticket]()
        self._flying: dict[tuple[int, int], Ticket] = {}
        self._answers: Iterator[Completion] = iter(())

    def __len__(self) -> int:
        return len(self._flying) + sum(ticket.request.n for ticket in self._waiting)

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        """Take a request on. A deadline holds while it waits; what has begun is answered."""
        self._waiting.append(ticket := Ticket(request=request, deadline=deadline))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Answer a request that still waits with nothing."""
        ticket.cancelled = True

    def step(self) -> list[tuple[Ticket, Completion]]:
        ended = []
        if not self._flying:
            cuts = [(t, t.cut()) for t in (self._waiting.popleft() for _ in range(len(self._waiting)))]
            ended = [(t, unanswered(t.request, i, cut)) for t, cut in cuts if cut for i in range(t.request.n)]
            # In an order that does not depend on when each of them came: it decides which are answered in one batch.
            begun = sorted(
                (t for t, cut in cuts if cut is None), key=lambda t: (t.request.prompt, t.request.first_sample)
            )
            self._flying = {
                (t.request.prompt, t.request.first_sample + i): t for t in begun for i in range(t.request.n)
            }
            self._answers = self._stream([t.request for t in begun])
        for completion in self._answers:
            ended.append((self._flying.pop((completion.prompt, completion.sample)), completion))
            if self._flying:
                break  # else to the stream's end, at which it may have more to do
        return ended


def unanswered(request: Request, sample: int, finish: Finish) -> Completion:
    """An answer that ended before it began; `sample` counts from the request's first."""
    return Completion(
        ids=(),
        behaviour_logprobs=(),
        finish=finish,
        policy_version=0,
        prompt=request.prompt,
        sample=request.first_sample + sample,
        seed=request.seed,
    )


def in_order(requests: Sequence[Request], completions: Iterable[Completion]) -> list[Completion]:
    """What a stream yields, in the order of the requests and of their samples."""
    found = {(c.prompt, c.sample): c for c in completions}
    return [found[r.prompt, r.first_sample + i] for r in requests for i in range(r.n)]


def in_units(requests: Sequence[Request], *, prompts: int) -> list[tuple[Request, ...]]:
    """Requests cut into units of so many prompts, in order; those of one prompt stay together."""
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.prompt)]
    parts = [groups[i : i + prompts] for i in range(0, len(groups), prompts)]
    return [tuple(request for group in part for request in group) for part in parts]


def check_requests(requests: Sequence[Request], *, context_length: int, vocabulary: int) -> None:
    """Refuse what cannot be answered, before any work starts."""
    check_numbers(requests)
    for request in requests:
        check_request(request, context_length=context_length, vocabulary=vocabulary)


def check_request(request: Request, *, context_length: int, vocabulary: int) -> None:
    """Refuse what cannot be answered."""
    where = f"prompt {request.prompt}"
    if len(request.prompt_ids) >= context_length:
        raise ValueError(
            f"{where} has {len(request.prompt_ids)} tokens but the model's context is {context_length}; "
            "shorten the prompt, or leave out rows that are too long"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise ValueError(
            f"{where} holds a token id outside 0..{vocabulary - 1}: the tokenizer does not fit the model's vocabulary"
        )


def check_numbers(requests: Sequence[Request]) -> None:
    """Refuse two answers of the same number: they would be drawn with the same random numbers."""
    seen: set[tuple[int, int]] = set()
    for request in requests:
        keys = {(request.prompt, request.first_sample + i) for i in range(request.n)}
        if seen & keys:
            raise ValueError(
                f"prompt {request.prompt} is requested twice with the same sample numbers; "
                "give each request its own `prompt`, or its own `first_sample`"
            )
        seen |= keys


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not those of the engine's model, before any of them is taken."""
    if odd := sorted(weights.keys() ^ shapes.keys()):
        side = "missing" if odd[0] in shapes else "unknown to the engine's model"
        raise ValueError(
            f"the weights to load do not fit: {odd[0]} is {side}; pass dict(model.named_parameters()) of the same model"
        )
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"the weights to load do not fit: {name} has shape {tuple(tensor.shape)}, "
                f"the engine's model has {tuple(shapes[name])}; make the engine from the model that is trained"
            )


def warn_if_support_is_cut(sampling: Sampling) -> None:
    """Warn that answers drawn with these settings do not come from the policy that is trained."""
    if sampling.cuts_support and not sampling.records_support:
        warnings.warn(
            f"sampling with {sampling.cuts} draws from a part of the vocabulary, but with sampling.logprobs full the whole "
            "of it is scored, so the trained policy is not the one that answers and its gradient is biased; set "
            "sampling.logprobs drawn, or train without top_k, top_p and min_p",
            stacklevel=2,
        )


_HASHED_AT_ONCE = 2**20
"""Weights that are copied together for a hash: a multiple of 1024, and small beside a model."""


def weights_hash(weights: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """A fingerprint of weights as they are in `dtype`, at memory speed: equal weights, equal hash, on every engine.

    It tells stale or missing updates apart; it is not meant to withstand forgery (checkpoints use sha256).
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = whole(weights[name].detach())
        columns = torch.zeros(1024, dtype=torch.int64, device=tensor.device)
        for part in tensor.reshape(-1).split(_HASHED_AT_ONCE):
            part = part.to(dtype)
            words = 8 // part.element_size()  # that are summed as one
            missing = -len(part) % (words * 1024)
            if missing or part.storage_offset() % words:  # a slice of something larger may begin anywhere
                part = torch.nn.functional.pad(part, (0, missing))
            columns += part.view(torch.int64).view(-1, 1024).sum(0)  # may overflow: it is a fingerprint
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(columns.numpy(force=True).tobytes())
    return digest.hexdigest()
