"""An answer in the making, and when it ends."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rolecall.rollout.sampler import row_keys
from rolecall.types import Completion, Finish, Request, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """The ends of one request's answers."""

    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    max_new_tokens: int
    tokenizer: Any
    tail: int
    """How many of the last tokens can hold a stop string: every token but a partial character has at least one byte."""

    @classmethod
    def of(cls, sampling: Sampling, stop_ids: tuple[int, ...], tokenizer: Any) -> "StopRule":
        """The rule for these settings on a model with these stop ids."""
        if sampling.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to read the text with; give the engine one")
        return cls(
            stop_ids=frozenset(stop_ids if sampling.stop_ids is None else sampling.stop_ids),
            stop_strings=sampling.stop_strings,
            max_new_tokens=sampling.max_new_tokens,
            tokenizer=tokenizer,
            tail=8 + max((len(s.encode()) for s in sampling.stop_strings), default=0),
        )

    def finish(self, ids: list[int], *, full: bool) -> Finish | None:
        """Why the answer ends with its last token, or None. `full`: the context has no room for another."""
        if ids[-1] in self.stop_ids:
            return Finish.STOP
        if self.stop_strings and self._holds_stop_string(ids):
            return Finish.STOP_STRING
        return Finish.LENGTH if full or len(ids) >= self.max_new_tokens else None

    def _holds_stop_string(self, ids: list[int]) -> bool:
        # Anywhere in the tail, because the last token can bring more than the end of the stop string. The tokens before
        # it hold none: the answer would have ended there.
        text = self.tokenizer.decode(ids[-self.tail :], clean_up_tokenization_spaces=False)
        return any(s in text for s in self.stop_strings)


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """A request that an engine has taken on."""

    request: Request
    deadline: float | None = None
    """When its answers end at the latest, by `time.monotonic()`."""
    cancelled: bool = False
    heard: Callable[[int, float], None] | None = None
    """Told each token and its log-prob as it is drawn, but for the one that ends the answer. Engines that draw elsewhere, and
    hand on whole answers, do not call it."""

    def cut(self) -> Finish | None:
        """Why its answers end now, whatever they hold; None: they go on."""
        if self.cancelled:
            return Finish.ABORT
        return Finish.TIMEOUT if self.deadline is not None and time.monotonic() >= self.deadline else None


@dataclass(kw_only=True, slots=True)
class Answer:
    """An answer in the making."""

    ticket: Ticket
    request: Request
    sample: int
    key: int
    """Its key of random numbers."""
    stops: StopRule
    context_length: int
    length: int
    """Tokens so far, the prompt included: the position of the next one."""
    supports: list[bytes] | None
    """None unless the request's sampling records them."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    """Why it ended; None while it grows."""
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """(tokens so far, version) whenever the weights were replaced by others while it grew."""

    def add(self, token: int, logprob: float, support: bytes | None) -> None:
        """Append a token, which may end the answer."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.supports is not None:
            assert support is not None
            self.supports.append(support)
        self.length += 1
        self.finish = self.stops.finish(self.ids, full=self.length >= self.context_length)
        if self.ticket.heard is not None and self.finish is None:
            self.ticket.heard(token, logprob)

    def completion(self, version: int) -> Completion:
        """The finished answer, whose last tokens are of weights of this version."""
        assert self.finish is not None
        ends = [*self.earlier, (len(self.ids), version)]
        starts = [0, *(end for end, _ in self.earlier)]
        spans = tuple((a, b, v) for a, (b, v) in zip(starts, ends, strict=True) if b > a)
        return Completion(
            ids=tuple(self.ids),
            behaviour_logprobs=tuple(self.logprobs),
            finish=self.finish,
            policy_version=spans[0][2] if spans else version,
            prompt=self.request.prompt,
            sample=self.sample,
            seed=self.request.seed,
            supports=None if self.supports is None else tuple(self.supports),
            versions=spans if len(spans) > 1 else None,
        )


def empty_answers(ticket: Ticket, *, stop_ids: tuple[int, ...], tokenizer: Any, context_length: int) -> list[Answer]:
    """The answers of a request, before their first tokens."""
    request = ticket.request
    stops = StopRule.of(request.sampling, stop_ids, tokenizer)
    samples = range(request.first_sample, request.first_sample + request.n)
    return [
        Answer(
            ticket=ticket,
            request=request,
            sample=sample,
            key=key,
            stops=stops,
            context_length=context_length,
            length=len(request.prompt_ids),
            supports=[] if request.sampling.records_support else None,
        )
        for sample, key in zip(
            samples, row_keys(request.seed, request.step, request.prompt, samples).tolist(), strict=True
        )
    ]
