"""Reward functions run in worker processes, so that none of them can stop or slow down the run for ever."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum
from typing import Any

from rolecall.errors import out_of_range
from rolecall.rewards.calling import no_column
from rolecall.rewards.records import RewardError, Sample, Scored, trainer_state
from rolecall.rewards.round import Job, Round
from rolecall.rewards.sources import ANSWER_COLUMNS, BUILT_IN, Named, Source, pack
from rolecall.workers.hosts import Host
from rolecall.workers.pool import Broken, WorkerPool
from rolecall.workers.process import Worker
from rolecall.workers.walls import Walls

logger = logging.getLogger("rolecall.rewards")

_NAMED_FAILURES = 5
"""So many failures per function and call are named one by one in the log; the rest are counted."""


class RewardPool(WorkerPool):
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
        network: bool = False,
        variables: Sequence[str] = (),
        say_after_s: float = 30.0,
        hosts: Sequence[Host] = (),
    ) -> None:
        packed = pack(functions)
        self.names = tuple(p.name for p in packed)
        self.weights = tuple(float(w) for w in weights) if weights is not None else (1.0,) * len(packed)
        self.say_after_s = say_after_s
        if len(self.weights) != len(packed):
            raise RewardError(f"{len(packed)} reward functions need as many weights, got {len(self.weights)}")
        if workers < 1 or not deadline_s > 0:
            raise RewardError(f"a reward pool needs workers >= 1 and deadline_s > 0, got {workers} and {deadline_s}")
        super().__init__(
            "rolecall.rewards.worker",
            [packed] * workers,
            what=f"reward{'s' if len(packed) > 1 else ''} {', '.join(f'`{name}`' for name in self.names)}",
            error=RewardError,
            deadline_s=deadline_s,
            walls=Walls(
                memory_mb=memory_mb,
                network=network,
                variables=tuple(variables),
                options=("reward_network", "reward_variables"),
            ),
            hosts=hosts,
        )
        self.styles: tuple[str, ...] = tuple(self.ready["styles"])
        self._columns: tuple[tuple[str, ...], ...] = tuple(map(tuple, self.ready["columns"]))
        self._lock = threading.Lock()
        self._logged: dict[str, list[float]] = defaultdict(list)
        self._failed: dict[str, int] = dict.fromkeys(self.names, 0)
        self._silent: set[str] = set()
        self._checked = False
        self.advance: Callable[[int, int, str], None] = lambda done, total, unit: None
        self._verifiers = tuple(p.name for p in packed if p.module in BUILT_IN.values())

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """One result per sample, in order. `state` is what functions see as `trainer_state`; what it leaves out is 0."""
        with self._lock:
            scoring = Scoring(self, state)
            scoring.add(dict(enumerate(samples)))
            return scoring.finish()

    @contextmanager
    def scoring(self, state: Mapping[str, Any]) -> "Iterator[Scoring]":
        """Score samples as they come; until the end of the block nothing else is scored here."""
        with self._lock:
            scoring = Scoring(self, state)
            try:
                yield scoring
            finally:
                for worker in self._busy:  # after an error or Ctrl-C, nobody waits for what they do
                    self._replace(worker)

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

    def _collect(self, this: Round) -> list[Scored]:
        samples = this.samples
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
        return [self._scored(this, index, sample) for index, sample in sorted(samples.items())]

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


class Scoring:
    """Samples that are scored while more of them come: by functions that take one answer at once, by those that take all of
    them together in the end. The scores are those of one call of `RewardPool.score`."""

    def __init__(self, pool: RewardPool, state: Mapping[str, Any] | None) -> None:
        if pool.closed:
            raise RewardError("this reward pool is closed; make a new one")
        self._pool = pool
        whole = {**trainer_state(), **(state or {})}
        self._round = Round(styles=pool.styles, workers=len(pool.workers), state=whole)

    def add(self, samples: Mapping[int, Sample]) -> None:
        """More samples, by their numbers. Does not wait for their scores."""
        if samples and not self._pool._checked:
            columns = dict.fromkeys(name for sample in samples.values() for name in sample.row)
            self._pool._check_wanted(tuple(columns))
        self._round.add(samples)

    def poll(self) -> None:
        """Give workers what waits and hear what they have done; returns at once."""
        pool, this = self._pool, self._round
        if this.finished:
            return
        with _run_under_way():
            for worker in list(pool.workers):
                pool._give(worker, this.queue, self._packed, self._heard)
            pool._hear(self._heard, 0.0)

    def finish(self) -> list[Scored]:
        """One result per sample, in the order of their numbers."""
        pool, this = self._pool, self._round
        if not this.samples:
            return []
        this.close()

        def waiting(job: Job, seconds: float) -> None:
            name, on = pool.names[job.function], this.current(job)
            logger.warning("reward `%s` has been waiting %.0f s on %s", name, seconds, on)

        with _run_under_way():
            pool.run(
                [this.queue] * len(pool.workers),
                pack=self._packed,
                heard=self._heard,
                waiting=waiting,
                say_after_s=pool.say_after_s,
                progress=lambda: pool.advance(this.known, len(this.samples) * len(pool.names), "rewards"),
            )
        this.settle()
        return pool._collect(this)

    def _packed(self, job: Job, worker: Worker) -> bytes:
        return self._round.payload(job)

    def _heard(self, job: Job, said: dict[str, Any] | Broken) -> None:
        if isinstance(said, Broken):
            self._round.broke(job, said.how, said.why)
        else:
            self._round.heard(job, said, name=self._pool.names[job.function])


@contextmanager
def _run_under_way() -> Iterator[None]:
    """What goes wrong now is no mistake of the command line."""
    try:
        yield
    except RewardError as error:
        error.exit_code = 1 if error.exit_code == 2 else error.exit_code
        raise
