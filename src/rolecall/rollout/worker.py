"""An engine in a worker process: it answers a unit of requests with the weights that the unit names."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rolecall.policy.load import load
from rolecall.rollout.engine import Engine
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.open import open_engine
from rolecall.types import Completion, Finish, Request
from rolecall.workers.child import Answer, Send


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a worker makes its engine of."""

    model: str
    """A directory with the model and its tokenizer."""
    how: Mapping[str, Any]
    """Keywords of `load`."""
    engine: Mapping[str, Any]
    """Keywords of `open_engine`."""
    merge: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(base, adapter) -> weights, if units name these two."""
    threads: int
    beat: float
    """Seconds between signs of life while it samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Requests that are answered together, and by which weights."""

    requests: tuple[Request, ...]
    weights: list[Any]
    """Where they are, as the `Sampler` reads it (a safetensors file): of the whole, or of a base and the adapter to merge into it."""
    version: int
    hash: str
    """`weights_hash` of the weights as the engine must hold them."""
    newest: str | None = None
    """A file that names newer weights when there are any, with which the answers go on; None: they end with these."""


def open_worker(setup: Setup) -> tuple[dict[str, Any], Answer]:
    """(which process it is, what answers units)."""
    torch.set_num_threads(setup.threads)
    sampler = Sampler(setup)

    def answer(unit: Unit, send: Send) -> None:
        lock = threading.Lock()

        def say(message: dict[str, Any]) -> None:
            with lock:
                send(message)

        with _beating(say, setup.beat):
            for message in sampler.answer(unit):
                say(message)

    return {"pid": os.getpid()}, answer


class _MergedOtherwise(RuntimeError):
    """A base and an adapter gave other bits here, as they may on another kind of processor."""


class Sampler:
    """An engine that takes the weights a unit asks for."""

    def __init__(self, setup: Setup, *, read: Callable[[Any], Mapping[str, Tensor]] = load_file) -> None:
        """`read` gets the weights that a unit names."""
        self._read, self._merge = read, setup.merge
        self._base: Mapping[str, Tensor] | None = None
        self.engine: Engine = open_engine(load(setup.model, **setup.how), version=-1, **setup.engine)

    def answer(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """What is said of a unit: each answer, and that it is `done`."""
        try:
            yield from ({"answer": pack(completion)} for completion in self.stream(unit))
            yield {"done": True}
        except _MergedOtherwise as error:
            yield {"error": str(error), "whole": True, "done": True}

    def stream(self, unit: Unit) -> Iterator[Completion]:
        """The unit's answers as they end, after a check that the weights are those that were published."""
        self._take(unit.weights, unit.version, unit.hash)
        return self.engine.stream(unit.requests) if unit.newest is None else self._following(unit, unit.newest)

    def _take(self, weights: Sequence[Any], version: int, fingerprint: str) -> None:
        if self.engine.version != version:
            self.engine.load(self._found(weights), version)
            if (found := self.engine.hash()) != fingerprint:
                self.engine.version = -1
                why = f"the weights of version {version} arrived changed: {found} for {fingerprint}"
                raise (_MergedOtherwise if len(weights) > 1 else RuntimeError)(why)

    def _found(self, weights: Sequence[Any]) -> Mapping[str, Tensor]:
        own = self._read(weights[-1])
        if len(weights) == 1:
            return own
        assert self._merge is not None
        self._base = self._base or self._read(weights[0])
        return self._merge(self._base, own)

    def _following(self, unit: Unit, newest: str) -> Iterator[Completion]:
        """The unit's answers, by the newest weights at every token."""
        if not isinstance(self.engine, NativeEngine):
            raise RuntimeError("only the native engine can change weights while answers grow")
        self.engine.inflight, flight = True, self.engine.open()
        for request in unit.requests:
            flight.add(request)
        while flight:
            with suppress(FileNotFoundError):  # two have been published since the first was named
                self._take(*json.loads(Path(newest).read_text()))
            yield from (completion for _, completion in flight.step())


@contextmanager
def _beating(say: Send, seconds: float) -> Iterator[None]:
    """Signs of life from a thread while the block runs."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(seconds):
            say({"beat": True})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def pack(c: Completion) -> dict[str, Any]:
    """A completion as JSON can say it, every number bit for bit."""
    return {
        "ids": c.ids,
        "logprobs": [logprob.hex() for logprob in c.behaviour_logprobs],
        "finish": str(c.finish),
        "version": c.policy_version,
        "prompt": c.prompt,
        "sample": c.sample,
        "seed": c.seed,
        "supports": None if c.supports is None else [ids.hex() for ids in c.supports],
        "versions": c.versions,
    }


def unpack(said: Mapping[str, Any]) -> Completion:
    """The completion again."""
    supports, versions = said["supports"], said["versions"]
    return Completion(
        ids=tuple(map(int, said["ids"])),
        behaviour_logprobs=tuple(map(float.fromhex, said["logprobs"])),
        finish=Finish(said["finish"]),
        policy_version=int(said["version"]),
        prompt=int(said["prompt"]),
        sample=int(said["sample"]),
        seed=int(said["seed"]),
        supports=None if supports is None else tuple(map(bytes.fromhex, supports)),
        versions=None if versions is None else tuple((int(a), int(b), int(v)) for a, b, v in versions),
    )
