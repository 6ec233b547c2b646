"""Reward functions run in worker processes, so that none of them can stop or slow down the run for ever."""

import logging
import pickle
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import Any, Self

from rolecall.errors import out_of_range
from rolecall.rewards.calling import no_column
from rolecall.rewards.processes import Gone, Worker
from rolecall.rewards.records import RewardError, Sample, Scored, trainer_state
from rolecall.rewards.round import Round
from rolecall.rewards.sources import ANSWER_COLUMNS, BUILT_IN, Named, Source, pack

logger = logging.getLogger("rolecall.rewards")

_LOAD_DEADLINE_S = 120.0
_STARTS_IN_VAIN = 3
"""So many workers in a row, and all there were, may die before they have done anything; then the pool gives up."""
_NAMED_FAILURES = 5
"""So many failures per function and call are named one by one in the log; the rest are counted."""


class RewardPool:
    """The `Reward` of a list of functions and their weights.

    A function of TRL's kind is called once with all samples. If that call fails (an exception, a crash, the deadline,
    the memory limit) its samples are tried one by one to find those that make it fail; the others are then scored
    together again. Functions that take one answer are spread over the workers, and the deadline is per answer.

    A failed sample has no score, is counted and named, and its worker is replaced.
    """

    def __init__(
        self,
        functions: Source | Sequence[Source | Named] | Mapping[str, Source],
        *,
        weights: Sequence[float] | None = None,
        workers: int = 2,
        deadline_s: float = 60.0,
        memory_mb: int | None = 2048,
        say_after_s: float = 30.0,
    ) -> None:
        packed = pack(functions)
        self.names = tuple(p.name for p in packed)
        self.weights = tuple(float(w) for w in weights) if weights is not None else (1.0,) * len(packed)
        self.deadline_s, self.memory_mb, self.say_after_s = deadline_s, memory_mb, say_after_s
        if len(self.weights) != len(packed):
            raise RewardError(f"{len(packed)} reward functions need as many weights, got {len(self.weights)}")
        if workers < 1 or not deadline_s > 0:
            raise RewardError(f"a reward pool needs workers >= 1 and deadline_s > 0, got {workers} and {deadline_s}")
        self._setup = pickle.dumps({"functions": packed, "memory_mb": memory_mb})
        self._lock = threading.Lock()
        self._starts_in_vain = 0
        self._logged: dict[str, list[float]] = defaultdict(list)
        self._failed: dict[str, int] = dict.fromkeys(self.names, 0)
        self._silent: set[str] = set()
        self._columns: tuple[tuple[str, ...], ...] = ()
        self._checked = False
        self.advance: Callable[[int, int, str], None] = lambda done, total, unit: None
        self._verifiers = tuple(p.name for p in packed if p.module in BUILT_IN.values())
        self._workers: list[Worker] = []
        self._end = weakref.finalize(self, _end, self._workers)
        try:
            for _ in range(workers):
                self._workers.append(Worker(self._setup))
            self.styles = self._first_ready()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._end()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes of this moment."""
        return tuple(worker.process.pid for worker in self._workers)

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """One result per sample, in order. `state` is what functions see as `trainer_state`; what it leaves out is 0."""
        if not self._end.alive:
            raise RewardError("this reward pool is closed; make a new one")
        if not samples:
            return []
        if not self._checked:
            self._check_wanted(tuple(dict.fromkeys(name for sample in samples for name in sample.row)))
        with self._lock:
            whole = {**trainer_state(), **(state or {})}
            this = Round(samples, styles=self.styles, workers=len(self._workers), state=whole)
            try:
                while not this.finished:
                    self._hand_out(this)
                    self._listen(this)
                    self.advance(this.known, len(samples) * len(self.names), "rewards")
            except RewardError as error:  # the run was under way: not a mistake of the command line
                error.exit_code = 1
                raise
            finally:  # after an error or Ctrl-C, no worker goes on with what nobody waits for
                for worker in [w for w in self._workers if w.job is not None]:
                    self._replace(worker)
            this.settle()
            return self._collect(this, samples)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Refuse rows of which none has a column that some function cannot do without."""
        self._check_wanted(columns)
        for name, style in zip(self.names, self.styles, strict=True):
            if (style == "verl" or name in self._verifiers) and not set(ANSWER_COLUMNS) & set(columns):
                raise RewardError(
                    f"reward `{name}` compares with the row's answer, but the rows have no column "
                    f"{', '.join(f'`{c}`' for c in ANSWER_COLUMNS[:-1])} or `{ANSWER_COLUMNS[-1]}`"
                )

    def _check_wanted(self, columns: Sequence[str]) -> None:
        there = [column for column in columns if column != "prompt"]
        for name, wanted in zip(self.names, self._columns, strict=True):
            for column in wanted:
                if column not in columns:
                    raise RewardError(no_column(name, column, there))
        self._checked = True

    def lacking(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """By what some function cannot do without, how many of the rows have nothing there; only what is lacking."""
        asked: dict[str, tuple[str, ...]] = {f"`{c}`": (c,) for columns in self._columns for c in columns}
        if any(style == "verl" or name in self._verifiers for name, style in zip(self.names, self.styles, strict=True)):
            asked["answer"] = tuple(ANSWER_COLUMNS)
        counts = dict.fromkeys(asked, 0)
        for row in rows if asked else ():
            for what, columns in asked.items():
                counts[what] += all(row.get(column) is None for column in columns)
        return {what: count for what, count in counts.items() if count}

    def take_metrics(self) -> dict[str, float]:
        """The mean of every metric logged by `log_metric`, and failures per function, since the last call."""
        taken = {name: fsum(values) / len(values) for name, values in self._logged.items()}
        taken |= {f"rewards/{name}/failed": float(count) for name, count in self._failed.items()}
        self._logged.clear()
        self._failed = dict.fromkeys(self.names, 0)
        return taken

    def _first_ready(self) -> tuple[str, ...]:
        """Wait for one worker: a function that cannot be loaded is an error now."""
        styles: tuple[str, ...] | None = None
        while styles is None:
            for worker, message in self._messages(timeout=1.0):  # all that was heard: nobody says it twice
                if message is None:
                    self._lost_in_vain(worker)
                elif "ready" in message:
                    worker.ready, styles = True, tuple(message["ready"])
                    self._columns = tuple(tuple(columns) for columns in message["columns"])
                else:
                    raise RewardError(str(message.get("fatal", f"a reward worker said {message!r:.80} while loading")))
            self._check_loading()
        return styles

    def _hand_out(self, this: Round) -> None:
        for worker in list(self._workers):
            if not this.queue:
                return
            if not worker.ready or worker.job is not None:
                continue
            job = this.queue.popleft()
            try:
                worker.send(this.payload(job), timeout=self.deadline_s)
            except Gone:  # it died while idle: nobody's fault
                this.queue.appendleft(job)
                self._lost_in_vain(worker)
                continue
            worker.job, worker.since, worker.said_at = job, monotonic(), self.say_after_s

    def _listen(self, this: Round) -> None:
        for worker, message in self._messages(timeout=self._patience()):
            if worker not in self._workers:
                continue  # replaced because of an earlier message of the same batch
            if message is None:
                self._lost(this, worker)
            elif "fatal" in message:
                raise RewardError(str(message["fatal"]))
            elif "ready" in message:
                worker.ready = True
            elif worker.job is not None:
                self._heard(this, worker, message)
        for worker in [w for w in self._workers if w.job is not None]:
            self._check_time(this, worker)
        self._check_loading()

    def _heard(self, this: Round, worker: Worker, message: dict[str, Any]) -> None:
        job = worker.job
        self._starts_in_vain = 0
        if message.get("memory"):
            worker.job = None
            self._replace(worker)
            limit = f"more than memory_mb={self.memory_mb}" if self.memory_mb else "more memory than there is"
            this.broke(job, "crash", f"it asked for {limit}: {message['error']}")
            return
        try:
            this.heard(job, message, name=self.names[job.function])
        except RewardError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):  # a worker that was taken over
            worker.job = None
            self._replace(worker)
            this.broke(job, "crash", "its worker process sent something unreadable")
            return
        if message.get("done"):
            worker.job = None
        worker.since, worker.said_at = monotonic(), self.say_after_s

    def _lost(self, this: Round, worker: Worker) -> None:
        job = worker.job
        if job is None:
            self._lost_in_vain(worker)
            return
        worker.job = None
        how = self._replace(worker)
        this.broke(job, "crash", how)

    def _check_time(self, this: Round, worker: Worker) -> None:
        job, waited = worker.job, monotonic() - worker.since
        if waited >= self.deadline_s:
            worker.job = None
            self._replace(worker)
            this.broke(job, "deadline", f"no answer within deadline_s={self.deadline_s:g}; it was killed")
        elif waited >= worker.said_at:
            worker.said_at *= 2
            name = self.names[job.function]
            logger.warning("reward `%s` has been waiting %.0f s on %s", name, waited, this.current(job))

    def _check_loading(self) -> None:
        for worker in self._workers:
            if not worker.ready and monotonic() - worker.since > _LOAD_DEADLINE_S:
                raise RewardError(f"the rewards {', '.join(self.names)} did not load within {_LOAD_DEADLINE_S:g} s")

    def _patience(self) -> float:
        """Seconds until something is due even if no worker says a word."""
        now = monotonic()
        due = [min(self.deadline_s, w.said_at) - (now - w.since) for w in self._workers if w.job is not None]
        return max(0.0, min([1.0, *due]))

    def _messages(self, *, timeout: float) -> list[tuple[Worker, dict[str, Any] | None]]:
        """What has been said, in order of workers; None for a worker that is gone."""
        talking = wait([worker.channel for worker in self._workers], timeout)
        heard: list[tuple[Worker, dict[str, Any] | None]] = []
        for worker in [w for w in self._workers if w.channel in talking]:
            try:
                heard += [(worker, message) for message in worker.receive()]
            except Gone:
                heard.append((worker, None))
        # A grandchild may hold the channel of a dead worker open.
        heard += [(w, None) for w in self._workers if w.channel not in talking and w.process.poll() is not None]
        return heard

    def _replace(self, worker: Worker) -> str:
        how = worker.kill()
        self._workers[self._workers.index(worker)] = Worker(self._setup)
        return how

    def _lost_in_vain(self, worker: Worker) -> None:
        how = self._replace(worker)
        self._starts_in_vain += 1
        if self._starts_in_vain >= _STARTS_IN_VAIN + len(self._workers):
            raise RewardError(
                f"reward workers for {', '.join(self.names)} die before they are called ({how}); import the functions' "
                f"modules in a Python shell to see why"
            )

    def _collect(self, this: Round, samples: Sequence[Sample]) -> list[Scored]:
        for _, metrics in sorted(this.metrics.items()):
            for name, value in metrics:
                self._logged[name].append(value)
        for function, name in enumerate(self.names):
            failures = sorted(this.failures[function].items())
            self._failed[name] += len(failures)
            for index, why in failures[:_NAMED_FAILURES]:
                logger.warning("reward `%s` failed on %s: %s", name, samples[index].place, why)
            if len(failures) > _NAMED_FAILURES:
                logger.warning("reward `%s` failed on %d more samples", name, len(failures) - _NAMED_FAILURES)
            if name not in self._silent and not failures and set(this.values[function].values()) == {None}:
                self._silent.add(name)
                logger.warning(
                    "reward `%s` gave None for all of %d samples: is its answer column there?", name, len(samples)
                )
        return [self._scored(this, index, sample) for index, sample in enumerate(samples)]

    def _scored(self, this: Round, index: int, sample: Sample) -> Scored:
        scores = {name: this.values[function].get(index) for function, name in enumerate(self.names)}
        failed = [
            f"reward `{name}` failed on {sample.place}: {this.failures[function][index]}"
            for function, name in enumerate(self.names)
            if index in this.failures[function]
        ]
        there = [w * s for w, s in zip(self.weights, scores.values(), strict=True) if s is not None]
        if there and not failed and (why := out_of_range(sum(there))):
            failed = [
                f"the weighted rewards {', '.join(self.names)} add up to {sum(there)} on {sample.place}, which {why}"
            ]
        return Scored(
            scores=scores,
            total=sum(there) if there and not failed else None,
            failure="; ".join(failed) or None,
            extras=this.extras[index],
        )


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    patience = monotonic() + 0.5
    while monotonic() < patience and any(w.process.poll() is None and w.ready and w.job is None for w in workers):
        sleep(0.005)
    for worker in workers:
        worker.kill()
