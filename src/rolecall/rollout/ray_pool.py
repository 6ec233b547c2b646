"""A pool whose workers are Ray actors, on any machine of a cluster (needs `rolecall[ray]`).

Ray places actors and carries weights and answers. Whether a worker lives is found out here: Ray takes a minute to notice a
machine that is cut off. `engine.workers` actors are asked for; one that Ray cannot place waits until there is room, and the
others go on without it.
"""

import importlib.metadata
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel, save
from rolecall.rollout.published import Adapter
from rolecall.rollout.units import CLOSING_S, Asked, Heard, UnitPool
from rolecall.rollout.worker import Sampler, Setup, Unit
from rolecall.workers.pool import Broken
from rolecall.workers.ray_cluster import check_resources, connected, in_words, refuse_missing

_log = logging.getLogger("rolecall.rollout")

_PLACE_S = 120.0
"""How long there may be no worker that is ready before the pool gives up."""
_SLOWEST = 50e6
"""Bytes per second below which the object store is too slow."""


class EngineActor:
    """An engine in an actor. Two of its methods may run at a time, so that it gives signs of life while it samples."""

    def __init__(self, files: Mapping[str, bytes], setup: Setup) -> None:
        """`files` are those of the model, by name."""
        torch.set_num_threads(setup.threads)
        self._place = tempfile.TemporaryDirectory(prefix="rolecall-")
        for name, content in files.items():
            Path(self._place.name, name).write_bytes(content)
        self._sampler = Sampler(replace(setup, model=self._place.name), read=_fetched)

    def about(self) -> dict[str, str]:
        """What it runs."""
        return _versions()

    def beat(self) -> int:
        """A sign of life: its process."""
        return os.getpid()

    def answer(self, unit: Unit) -> list[dict[str, Any]]:
        """All that is said of a unit."""
        return list(self._sampler.answer(unit))


@dataclass(eq=False, slots=True)
class _Place:
    """An actor and what it was asked."""

    actor: Any
    about: Any
    """Comes when it is ready; None after it came."""
    begun: float = field(default_factory=monotonic)
    beat: Any = None
    asked_beat: float = 0.0
    heard: float = 0.0
    """When it gave its last sign of life."""
    job: Asked | None = None
    holds: int | None = None
    """The version it was given last."""
    answers: Any = None

    @property
    def waits(self) -> list[Any]:
        return [ref for ref in (self.about, self.beat, self.answers) if ref is not None]


class RayPool(UnitPool):
    """Samples in Ray actors. Weights travel through Ray's object store, and every worker checks their hash."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        *,
        how: Mapping[str, Any],
        reads: Mapping[str, Any],
        add: Callable[[str, float], None] = lambda name, value: None,
        adapter: Adapter | None = None,
    ) -> None:
        """As `EnginePool`. Connects to the cluster that the environment variable RAY_ADDRESS names, or starts one here."""
        super().__init__(loaded, options, dtype=how["dtype"] or loaded.model.dtype, add=add, adapter=adapter)
        self._ray, self._own = connected(cpus=options.workers * options.worker_threads)
        self._places: list[_Place] = []
        try:
            needs = {"CPU": float(options.worker_threads)}
            check_resources(self._ray, options.workers, needs, what="rollout workers", option="engine.workers")
            merge = None if adapter is None else adapter.merge
            setup = Setup(model="", how=reads, engine=how, merge=merge, threads=options.worker_threads, beat=0.0)
            with tempfile.TemporaryDirectory() as place:
                save(loaded, Path(place))
                files = {path.name: path.read_bytes() for path in Path(place).iterdir()}
                self._files = self._put(files, size=sum(map(len, files.values())))
            self._actor = self._ray.remote(EngineActor).options(
                num_cpus=options.worker_threads, max_concurrency=2, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._setup = setup
            self.load(dict(loaded.model.named_parameters()), 0)
            self._places = [self._placed() for _ in range(options.workers)]
            while not any(place.about is None for place in self._places):
                self._take_in(_ignore, 1.0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        self._closing = True
        there = self._lock.acquire(timeout=CLOSING_S)
        for place in self._places:
            self._kill(place)
        self._places = []
        if self._own:
            self._ray.shutdown()
            self._own = False
        if there:
            self._lock.release()

    @property
    def pids(self) -> list[int]:
        """The processes of the workers that are ready, wherever they are."""
        return [self._ray.get(place.actor.beat.remote()) for place in self._places if place.about is None]

    def _publish(self, name: str, held: Mapping[str, Tensor]) -> Any:
        return self._put(
            {name: (_bytes_of(w), w.dtype, w.shape) for name, w in held.items()},
            size=sum(w.nbytes for w in held.values()),
        )

    def _put(self, content: Any, *, size: int) -> Any:
        seconds = self.options.worker_silence + size / _SLOWEST
        done: Future[Any] = Future()

        def put() -> None:
            try:
                done.set_result(self._ray.put(content))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=put, daemon=True).start()
        full = self._ray.exceptions
        try:
            return done.result(seconds)
        except (full.ObjectStoreFullError, full.OutOfDiskError) as error:
            why = "has no room for"
            cause: BaseException = error
        except TimeoutError as error:
            why, cause = f"did not within {seconds:.0f} s take", error
        raise UserError(
            f"Ray's object store {why} the model's {size / 1e6:,.0f} MB: start the cluster with a larger --object-store-memory and "
            "room on its disk, then resume",
            exit_code=75,
        ) from cause

    def _placed(self) -> _Place:
        actor = self._actor.remote(self._files, self._setup)
        return _Place(actor=actor, about=actor.about.remote())

    def _withdraw(self, weights: list[Any]) -> None:
        weights.clear()  # Ray removes what nobody refers to

    def _hand_out(self, heard: Heard) -> None:
        for place in self._places:
            if self._queue and place.about is None and place.job is None:
                place.job, now = self._next(place.holds), monotonic()
                place.holds = place.job.unit.version
                place.job.since = place.heard = place.asked_beat = now
                place.answers = place.actor.answer.remote(place.job.unit)

    def _take_in(self, heard: Heard, patience: float) -> None:
        waits = [ref for place in self._places for ref in place.waits]
        patience = min(patience, self.options.worker_silence / 5)
        done, _ = self._ray.wait(waits, num_returns=1, timeout=patience) if waits else ([], [])
        more, _ = self._ray.wait(waits, num_returns=len(waits), timeout=0) if done else ([], [])
        for place in list(self._places):
            try:
                self._look_at(place, {*done, *more}, heard)
            except UserError:
                raise
            except self._ray.exceptions.RayError as error:
                refuse_missing(error)
                self._broke(place, Broken(how="crash", why=in_words(error)), heard)
            except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
                self._broke(place, Broken(how="crash", why="it sent something unreadable"), heard)
        last = max((place.begun for place in self._places), default=0.0)
        if all(place.about is not None for place in self._places) and monotonic() - last > _PLACE_S:
            raise UserError(
                f"Ray has placed no rollout worker within {_PLACE_S:g} s: each needs {self.options.worker_threads} CPUs; look "
                "at `ray status`, then resume",
                exit_code=75,
            )

    def _look_at(self, place: _Place, done: set[Any], heard: Heard) -> None:
        """Take what an actor has said, and ask it for a sign of life. What it raised is raised here."""
        now = monotonic()
        if place.about in done:
            self._check_alike(self._ray.get(place.about))
            place.about, place.heard = None, now
        if place.beat in done:
            self._ray.get(place.beat)
            place.beat, place.heard = None, now
        if place.job is None:
            return
        if place.answers in done:
            job, said = place.job, self._ray.get(place.answers)
            for message in said:
                heard(job, message)
            place.job = place.answers = None
        elif late := self._late(place.job):
            self._broke(place, late, heard)
        elif now - place.heard > self.options.worker_silence:
            why = f"no sign of life within {self.options.worker_silence:g} s; it was killed"
            self._broke(place, Broken(how="deadline", why=why), heard)
        elif place.beat is None and now - place.asked_beat > self.options.worker_silence / 5:
            place.beat, place.asked_beat = place.actor.beat.remote(), now

    def _check_alike(self, said: Mapping[str, str]) -> None:
        for name, own in _versions().items():
            if said.get(name) != own:
                raise UserError(
                    f"a Ray worker has {name} {said.get(name)} and this process {own}: install the same on all machines"
                )

    def _broke(self, place: _Place, why: Broken, heard: Heard) -> None:
        """Replace an actor; its unit is asked again."""
        starting, job = place.about is not None, place.job
        self._kill(place)
        if starting and "Error" in why.why and not any(other.about is None for other in self._places):
            raise UserError(f"a Ray worker cannot make its engine: {why.why}", exit_code=1)
        self._pause()
        self._places[self._places.index(place)] = self._placed()
        if job is not None:
            heard(job, why)
        else:
            self._lose(why.why)

    def _kill(self, place: _Place) -> None:
        with suppress(Exception):  # it may be dead, and so may be the cluster
            self._ray.kill(place.actor, no_restart=True)

    def _abandon(self, by: Any) -> None:
        for i, place in enumerate(self._places):
            if place.job is not None and place.job.by is by:
                self._kill(place)
                self._places[i] = self._placed()


def _bytes_of(weight: Tensor) -> Any:
    """What Ray copies once into its store, and shares with every process of a machine."""
    return weight.reshape(-1).view(torch.uint8).numpy()


def _fetched(where: Any) -> dict[str, Tensor]:
    """The weights that a unit names, on the actor's side. They are not to be written to."""
    import ray

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        said = ray.get(where).items()
        return {name: torch.from_numpy(part).view(dtype).view(shape) for name, (part, dtype, shape) in said}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("rolecall", "torch")}


def _ignore(asked: Asked, said: Any) -> None:
    """Before there are units, there is nothing to hear of one."""
