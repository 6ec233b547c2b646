"""An engine as a service: requests from any thread, answered by one thread that decodes."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rolecall.rollout.engine import Engine, in_order
from rolecall.rollout.stops import Ticket
from rolecall.types import Completion, Request


class ServiceClosedError(RuntimeError):
    """The service takes nothing more on."""


@dataclass(eq=False, slots=True)
class _Submitted:
    """Requests whose answers go into one future."""

    requests: Sequence[Request]
    deadline: float | None
    heard: Callable[[int, float], None] | None
    future: "Future[list[Completion]]" = field(default_factory=Future)
    tickets: dict[Ticket, list[Completion]] = field(default_factory=dict)
    """Those that were taken on, with the answers so far."""
    left: int = 0
    """Answers that have not ended."""


@dataclass(eq=False, slots=True)
class _Call:
    """Something to do on the engine's thread."""

    function: Callable[[], Any]
    idle: bool
    """True: only while nothing is in flight."""
    future: "Future[Any]" = field(default_factory=Future)


class Service:
    """Owns an engine. New requests are taken on between its steps, so what is in flight never waits for what comes.

    The answers' random numbers do not depend on what else is in flight. Their arithmetic may, where the engine's depends on
    the shape of a batch; requests that are submitted together are taken on together.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._flight = engine.open()
        self._changed = threading.Condition()
        self._inbox: deque[_Submitted] = deque()
        self._calls: deque[_Call] = deque()
        self._owners: dict[Ticket, _Submitted] = {}
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._run, name="rolecall-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        requests: Sequence[Request],
        *,
        deadline: float | None = None,
        heard: Callable[[int, float], None] | None = None,
    ) -> "Future[list[Completion]]":
        """The answers to all, in order. `Future.cancel` gives them up; what cannot be answered is a `ValueError` of the
        future. What has not ended at the `deadline`, of `time.monotonic()`, ends as it is. `heard` is told the tokens of an
        only answer as they are drawn, on the engine's thread (see `Ticket.heard`)."""
        submitted = _Submitted(requests, deadline, heard, left=sum(request.n for request in requests))
        submitted.future.add_done_callback(lambda future: self._give_up(submitted) if future.cancelled() else None)
        with self._changed:
            self._check_open()
            self._inbox.append(submitted)
            self._changed.notify()
        return submitted.future

    def call(self, function: Callable[[], Any], *, idle: bool = True) -> "Future[Any]":
        """Call a function on the engine's thread, between two steps; with `idle`, when nothing is in flight, until which
        no request is taken on."""
        call = _Call(function, idle)
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify()
        return call.future

    def load(self, weights: Mapping[str, Tensor], version: int) -> "Future[None]":
        """Load weights when what is in flight has ended."""
        return self.call(lambda: self.engine.load(weights, version))

    def pause(self, *, abort: bool = False) -> "Future[None]":
        """Take on no more requests until `resume`; done when nothing is in flight. With `abort`, what is in flight ends as
        it is, with `Finish.ABORT`."""
        with self._changed:
            self._paused = True
        if abort:
            for ticket in list(self._owners):
                self._flight.cancel(ticket)
        return self.call(lambda: None)

    def resume(self) -> None:
        """Take on requests again."""
        with self._changed:
            self._paused = False
            self._changed.notify()

    @property
    def paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self._paused

    def __len__(self) -> int:
        """Answers that are in flight or wait."""
        with self._changed:
            return len(self._flight) + sum(submitted.left for submitted in self._inbox)

    def close(self) -> None:
        """Give up what is in flight and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for ticket in list(self._owners):
            self._flight.cancel(ticket)
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceClosedError("the service is shutting down")

    def _give_up(self, submitted: _Submitted) -> None:
        for ticket in list(submitted.tickets):
            self._flight.cancel(ticket)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    break
                calls, new = self._next()
            for call in calls:
                _settle(call.future, call.function)
            for submitted in new:
                self._take_on(submitted)
            if self._flight:
                self._step()
        self._fail(ServiceClosedError("the service was shut down"))

    def _has_work(self) -> bool:
        return bool(self._closed or self._flight or self._calls or (self._inbox and not self._paused))

    def _next(self) -> tuple[list[_Call], list[_Submitted]]:
        """What is to be done before the next step."""
        calls: list[_Call] = []
        while self._calls and not (self._calls[0].idle and self._flight):
            calls.append(self._calls.popleft())
        new = [] if self._paused or self._calls else list(self._inbox)
        if new:
            self._inbox.clear()
        return calls, new

    def _take_on(self, submitted: _Submitted) -> None:
        try:
            for request in submitted.requests:
                ticket = self._flight.add(request, deadline=submitted.deadline)
                ticket.heard = submitted.heard
                submitted.tickets[ticket] = []
                self._owners[ticket] = submitted
        except Exception as error:  # the engine refuses it, or it is not for any engine
            self._give_up(submitted)
            with suppress(InvalidStateError):
                submitted.future.set_exception(error)
        if submitted.future.cancelled():
            self._give_up(submitted)

    def _step(self) -> None:
        try:
            ended = self._flight.step()
        except Exception as error:  # broken weights, no memory: those in flight are told, the service goes on
            self._fail(error)
            return
        for ticket, completion in ended:
            submitted = self._owners[ticket]
            submitted.tickets[ticket].append(completion)
            submitted.left -= 1
            if len(submitted.tickets[ticket]) == ticket.request.n:
                del self._owners[ticket]
            if not submitted.left:
                _settle(submitted.future, partial(_ordered, submitted))

    def _fail(self, error: Exception) -> None:
        owners, self._owners = set(self._owners.values()), {}
        self._flight = self.engine.open()
        if self._closed:
            owners.update(self._inbox)
        for submitted in owners:
            with suppress(InvalidStateError):
                submitted.future.set_exception(error)
        for call in self._calls if self._closed else ():
            with suppress(InvalidStateError):
                call.future.set_exception(error)


def _ordered(submitted: _Submitted) -> list[Completion]:
    """The answers to each request, in the order of their samples."""
    return [c for ticket, answers in submitted.tickets.items() for c in in_order([ticket.request], answers)]


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Put what a function returns or raises into a future that may have been cancelled."""
    try:
        result = function()
    except Exception as error:
        with suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
