"""An engine over servers: it shares prompts out, gives servers the weights, and asks again what a lost one was asked.

A unit of work is a number of prompts with all their samples. It is sent to one server and counted once, whole; if that server is
killed, stopped, restarted or slow, it is sent again, there or elsewhere, under the same random numbers. Only a server that
has the weights of the moment, and scores as the trainer does, is asked anything.
"""

import asyncio
import logging
import queue
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import merged_weights
from rolecall.policy.model import PolicyModel
from rolecall.remote.adapter import adapter_alone, base_weights, can_be_merged
from rolecall.remote.connection import Background, Connection
from rolecall.remote.dialect import About, Dialect, Published, ServerLostError
from rolecall.remote.fleet import Ended, Fleet, Unit
from rolecall.remote.ours import RolecallDialect
from rolecall.remote.probe import Expected, Scorer, Scores, scored, scores_with, trainer_scores
from rolecall.remote.rehearsal import disturbed, draw_requests, drawn_wrong
from rolecall.remote.server import Server, StaleServerError, Wanted
from rolecall.remote.sglang import SglangDialect
from rolecall.remote.vllm import VllmDialect
from rolecall.rollout.engine import (
    Engine,
    Flight,
    check_numbers,
    check_request,
    check_weights,
    in_units,
    weights_hash,
)
from rolecall.rollout.published import hold_weights, own_directory, write_held
from rolecall.rollout.stops import Ticket
from rolecall.serving.inside_vllm.rolecall_weights import HALF_A
from rolecall.train.manifest import seal_model
from rolecall.types import Completion, Request, Sampling

_log = logging.getLogger("rolecall.rollout")

DIALECTS: tuple[Dialect, ...] = (RolecallDialect(), VllmDialect(), SglangDialect())
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_FILE = "model.safetensors"
_LEAVING_S = 3.0
_NOTED, _ADAPTERS = 64, 8
"""Versions whose probe is kept for a later load, and at least whose adapter."""
Adapter = Mapping[str, Tensor]
"""As in `remote.adapter`."""


class ServerEngine(Engine):
    """Samples on servers."""

    def __init__(
        self,
        policy: LoadedModel,
        options: EngineOptions,
        *,
        tokenizer: str,
        scorer: Scorer,
        plain: Callable[[], LoadedModel],
        sampling: Sampling,
        trainer: torch.dtype,
        urls: Sequence[str],
        key: str | None,
        lora: LoadedModel | None = None,
        add: Callable[[str, float], None] = lambda name, value: None,
        also_close: Callable[[], None] = lambda: None,
        versions: int = 1,
        slot: int = 0,
        base: Published | None = None,
    ) -> None:
        """`policy` is the model that trains, an adapter merged; `tokenizer` its fingerprint; `scorer` as in `probe`, which
        computes in the dtype `trainer`; `plain` makes a plain model of the trainer's to try other weights with; `lora` is the
        model that trains if it carries an adapter and is whole; `add` takes what is measured, by name; `also_close` is called at
        the end. `versions` of an adapter are to stand side by side, if servers can: as many engines, each with a `slot` of its own
        and with the `base` of the first."""
        self.options, self.version, self._tell, self._also_close = options, -1, add, also_close
        self._measured: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._shapes = {name: p.shape for name, p in policy.model.named_parameters()}
        vocabulary = int(policy.model.get_input_embeddings().num_embeddings)
        self._wanted = Wanted(vocabulary=vocabulary, tokenizer=tokenizer, max_new_tokens=sampling.max_new_tokens)
        inside = None if options.weights_directory is None else Path(options.weights_directory).expanduser()
        self._shared = inside is not None or all(urlsplit(url).hostname in LOOPBACK for url in urls)
        self._directory = own_directory(sum(p.numel() * 4 for p in policy.model.parameters()), inside=inside)
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._background, self._scorer, self._plain = Background(), scorer, plain
        self._noted: dict[int, tuple[Scores, Adapter | None]] = {}
        self._lora, self._hash = lora, ""
        self._slot, self.base = slot, base
        self.versions, self._adapters = versions, max(_ADAPTERS, versions + 1)
        try:
            servers = self._background.run(self._open(urls, key))
            self._check(servers, sampling)
            self.context_length = min(policy.context_length, *(server.about.context_length for server in servers))
            self._expected = Expected.of(policy, trainer=trainer, servers=self.dtype)
            self.fleet = Fleet(servers, options, wanted=self._wanted, expected=self._expected, add=self._add)
            self._rehearse(policy, sampling)
        except BaseException:
            self.close()
            raise

    async def _open(self, urls: Sequence[str], key: str | None) -> list[Server]:
        o = self.options
        connections = [Connection(url, key=key, deadline=o.worker_deadline) for url in urls]
        self._background.connections.extend(connections)
        opened = (Server.open(connection, DIALECTS, silence=o.worker_silence) for connection in connections)
        return list(await asyncio.gather(*opened))

    def _check(self, servers: Sequence[Server], sampling: Sampling) -> None:
        """What servers are must fit the model, each other, and what was said of them."""
        for server in servers:
            server.check(self._wanted)
        self.about, self.dialect, o = _alike(servers), servers[0].dialect, self.options
        for what, told, found in (("name", o.name, self.about.engine), ("dtype", o.dtype, self.about.dtype)):
            if told not in (None, "auto", found):
                raise UserError(f"engine.{what} is {told}, but servers have {found}: leave it out, or start them so")
        self.dtype: torch.dtype = getattr(torch, self.about.dtype)
        self._check_sampling(sampling)
        if not self.dialect.merges:
            self._lora = None
            if o.sync == "broadcast":
                raise UserError(f"a server of the kind {self.dialect.name} takes no broadcast: leave engine.sync out")
        self.versions = min(self.versions, *(server.about.versions for server in servers)) if self._lora else 1
        for server in servers:
            self._check_rank(server)
            if self.versions > 1 or server.about.highest_rank is not None:
                server.dialect = server.dialect.beside(self._slot)
                server.kept = None if self.base is None else self.base.hash

    def _check_rank(self, server: Server) -> None:
        """Refuse an adapter that the server has no room for."""
        highest = server.about.highest_rank
        if self._lora is None or highest is None:
            return
        rank = max(len(half) for name, half in adapter_alone(self._lora).items() if name.endswith(HALF_A))
        if rank > highest:
            raise UserError(
                f"engine.servers {server.url} takes adapters up to rank {highest}, but policy.lora_rank is {rank}: start it with a higher "
                "--max-lora-rank, or without --enable-lora"
            )

    def _rehearse(self, policy: LoadedModel, sampling: Sampling) -> None:
        """Load weights that were disturbed, then those of the start, and see that tokens are drawn as they should be."""
        model = policy.model
        weights = dict(model.named_parameters())
        if not self._slot:
            with disturbed(weights):
                how: dict[str, Any] = {"temperature": 1.0, "token_budget": 8192}
                scorer = partial(scored, PolicyModel(model), **how)
                self._load(weights, 0, trainer_scores(scorer, self._expected.sequences), None)
        self._rehearse_adapter()
        for server in self.fleet.servers:
            server.gap = None
        self.load(weights, 0)
        self._expected.forget()
        asked, logprobs = draw_requests(policy, self._expected.sequences, sampling)
        for server in [server for server in self.fleet.servers if server.ready]:
            try:
                drawn = self._background.run(server.answer(asked, version=0, seconds=None))
            except (ServerLostError, StaleServerError) as error:
                raise UserError(f"engine.servers {server.url}: {error}; start it again", exit_code=75) from error
            why = drawn_wrong(drawn, logprobs, band=self._expected.widest)
            if why is not None:
                raise UserError(
                    f"engine.servers {server.url} does not draw at temperature {sampling.scoring_temperature:g}, as it is "
                    f"told: {why}"
                )

    def _rehearse_adapter(self) -> None:
        """The same with an adapter alone. One that cannot be sent so is merged here, always."""
        lora = self._lora
        if lora is None:
            return
        with disturbed({name: p for name, p in lora.model.named_parameters() if p.requires_grad}):
            if self.base is not None or can_be_merged(lora):
                base = self.base or self._publish("base", base_weights(lora), 0, dtype=None, keep=True)
                self.base = base
                self._load(merged_weights(lora), 0, *self._now())
            else:
                self._lora, self.versions = None, 1
                _log.info("the adapter cannot be sent alone: servers get whole weights, with it merged in")

    # -- weights -------------------------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish weights and wait until every server that can be reached has them and scores as the trainer does."""
        scores, adapter = self._noted.get(version) or self._now()
        self._load(weights, version, scores, adapter)

    def expect(
        self, version: int, weights: Mapping[str, Tensor] | None, adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        """Note what servers must say of the probe when this version is loaded later, by weights that the trainer has left
        behind then; without `weights` they are those that it has now. `adapter` is what `carried` gave of them."""
        if weights is None:
            now = self._now()
        else:
            alone = adapter if adapter and self._lora is not None else None
            now = scores_with(self._plain().model, weights, self._expected.sequences), alone
        kept = sorted({**self._noted, version: now}.items())[-_NOTED:]
        self._noted = {v: (said, None if v < kept[-1][0] - self._adapters else a) for v, (said, a) in kept}

    def carried(self, version: int) -> Adapter:
        """What a checkpoint must hold of a version beside its weights: the adapter."""
        return self._noted.get(version, ((), None))[1] or {}

    def _now(self) -> tuple[Scores, Adapter | None]:
        """What the trainer says of the probe, and its adapter, at this moment."""
        scores = trainer_scores(self._scorer, self._expected.sequences)
        return scores, None if self._lora is None else adapter_alone(self._lora)

    def _load(self, weights: Mapping[str, Tensor], version: int, scores: Scores, adapter: Adapter | None) -> None:
        check_weights(weights, self._shapes)
        name = f"v{version:06d}"
        if adapter is None:
            published = self._publish(name, weights, version, dtype=self.dtype)
            self._hash = published.hash
        else:
            published = self._publish(name, adapter, version, dtype=None, base=self.base)
            self._hash = weights_hash(weights, self.dtype)
        self._expected.publish(scores)
        begun = monotonic()
        self._background.run(self.fleet.sync_all(published))
        self.version = version
        self._add("servers/sync", monotonic() - begun)
        self.flush()

    def metrics(self) -> dict[str, float]:
        """How far the servers' log-probs of the probe are from the trainer's, for the server that is furthest."""
        return {"sampling/probe_difference": max((s.last_gap for s in self.fleet.servers if s.ready), default=0.0)}

    def _add(self, name: str, value: float) -> None:
        self._measured.put((name, value))

    def flush(self) -> None:
        """Hand on what was measured, in the thread that asks for answers."""
        while not self._measured.empty():
            self._tell(*self._measured.get())

    def _publish(
        self, name: str, weights: Mapping[str, Tensor], version: int, *, dtype: torch.dtype | None, **kind: Any
    ) -> Published:
        """Weights in a dtype, or as they are, where servers find them: held for a broadcast, or written."""
        place, spread = self._directory / name, self.options.sync == "broadcast"
        held = hold_weights(weights, dtype, copy=spread and name != "base")  # the base stays as it is
        hashed = weights_hash(held, dtype or torch.float32)
        if not spread:
            for old in self._directory.glob("v*"):
                shutil.rmtree(old)
            place.mkdir()
            write_held(place / _FILE, held)
            seal_model(place, version)
        return Published(
            directory=place,
            file=place / _FILE,
            version=version,
            hash=hashed,
            shared=self._shared,
            tensors=held if spread else None,
            **kind,
        )

    def hash(self) -> str:
        """The fingerprint of the weights that servers sample from. Servers that give theirs have been compared with what they
        were sent, and all by the probe."""
        return self._hash

    # -- requests ------------------------------------------------------------------------------------------------

    def open(self) -> Flight:
        """A flight whose requests are sent together when it takes its next step."""
        return _ServerFlight(self)

    def check(self, request: Request) -> None:
        """Refuse what servers cannot answer, or cannot record exactly."""
        check_request(request, context_length=self.context_length, vocabulary=self._wanted.vocabulary)
        self._check_sampling(request.sampling)

    def _check_sampling(self, sampling: Sampling) -> None:
        if why := self.dialect.unable(sampling):
            raise UserError(f"a server of the kind {self.dialect.name} {why}")

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers as they end. What is left when nobody reads on is given up."""
        check_numbers(requests)
        flight = _ServerFlight(self)
        tickets = [flight.add(request) for request in requests]
        try:
            while flight:
                for _, completion in flight.step():
                    yield completion
        finally:
            if flight:
                for ticket in tickets:
                    flight.cancel(ticket)
            self.flush()

    def submit(self, tickets: Sequence[Ticket], out: "queue.SimpleQueue[Ended]") -> None:
        """Have requests answered into a queue. Units do not depend on which servers are there: what is drawn is the same."""
        loop = self._background.loop
        for _, group in groupby(tickets, key=lambda ticket: ticket.deadline):
            together = {id(t.request): t for t in group}
            requests = [t.request for t in together.values()]
            count = len({request.prompt for request in requests})
            size = self.dialect.unit_prompts or ceil(count / len(self.fleet.servers))
            for unit in in_units(requests, prompts=size):
                loop.call_soon_threadsafe(self.fleet.take, Unit([together[id(request)] for request in unit], out))

    def cancelled(self) -> None:
        """Look for units that nobody waits for any more, or whose time is up."""
        self._background.loop.call_soon_threadsafe(self.fleet.drop_cancelled)

    def close(self) -> None:
        """Give up the connections and remove what was published, also what servers hold beside other versions."""
        if self.versions > 1 and hasattr(self, "fleet"):
            with suppress(TimeoutError):
                self._background.run(asyncio.wait_for(self.fleet.leave(), _LEAVING_S))
        self._background.close()
        self._remove()
        self._also_close()


class _ServerFlight(Flight):
    """Requests to servers. What is added between two steps is shared out together."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine, self._new, self._left, self._cuts = engine, deque[Ticket](), 0, False
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self._left

    def add(self, request: Request, *, deadline: float | None = None) -> Ticket:
        self._engine.check(request)
        self._new.append(ticket := Ticket(request=request, deadline=deadline))
        self._left += request.n
        self._cuts |= deadline is not None
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a request, without what was sampled of them."""
        ticket.cancelled = True
        self._engine.cancelled()

    def step(self) -> list[tuple[Ticket, Completion]]:
        """Send what is new, and wait a while for answers."""
        if self._new:
            self._engine.submit([self._new.popleft() for _ in range(len(self._new))], self._ended)
        found: list[tuple[Ticket, Completion]] = []
        while self._left:
            try:
                ended = self._ended.get(timeout=0.0 if found else 0.2)
            except queue.Empty:
                if self._cuts:
                    self._engine.cancelled()
                break
            if isinstance(ended, Exception):
                raise ended
            found.append(ended)
            self._left -= 1
        return found


def _alike(servers: Sequence[Server]) -> About:
    """What all servers are; a `UserError` if they differ in what changes the numbers."""
    first = servers[0]
    for other in servers[1:]:
        for what, a, b in (
            ("samples with", first.about.engine, other.about.engine),
            ("computes in", first.about.dtype, other.about.dtype),
        ):
            if a != b:
                raise UserError(
                    f"engine.servers differ: {first.url} {what} {a}, {other.url} {what} {b}; start them alike"
                )
    return first.about
