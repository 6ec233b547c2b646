"""The samples that are scored together: what is still to be tried, and what is known of each.

Pure bookkeeping, without processes or clocks; `pool` tells it what was heard and what broke.
"""

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolecall.errors import out_of_range
from rolecall.rewards.records import RewardError, Sample, WrongCount

_GIVE_UP = 8
"""If this many samples of a function ran into the deadline and none was ever scored, the rest is not tried."""

Stage = Literal["first", "alone", "again"]
Broken = Literal["exception", "crash", "deadline"]


@dataclass(kw_only=True, slots=True)
class Job:
    """One call: a function and some of the samples."""

    function: int
    samples: tuple[int, ...]
    stage: Stage = "first"
    """first; alone: to find out which sample makes a call fail; again: those that do not, together."""
    reported: int = 0
    """How many of the samples have been heard of."""


class Round:
    """Values, failures and extras are by function and sample number. Functions that take one answer are called with each as it
    comes (`add`), those that take all when all are there (`close`)."""

    def __init__(self, *, styles: Sequence[str], workers: int, state: Mapping[str, Any]) -> None:
        self.samples: dict[int, Sample] = {}
        self._styles, self._workers, self._state = styles, workers, state
        self.values: list[dict[int, float | None]] = [{} for _ in styles]
        self.failures: list[dict[int, str]] = [{} for _ in styles]
        self.extras: dict[int, dict[str, Any]] = {}
        self.metrics: dict[tuple[int, tuple[int, ...]], list[tuple[str, float]]] = {}
        self._open = 0
        self._retried: set[tuple[int, int]] = set()
        self._alone_left = [0] * len(styles)
        self._hung = [0] * len(styles)
        self.queue: deque[Job] = deque()

    def add(self, samples: Mapping[int, Sample]) -> None:
        """More samples, by their numbers."""
        self.samples |= samples
        self.extras |= {index: {} for index in samples}
        new = tuple(sorted(samples))
        size = max(1, min(64, -(-len(new) // (4 * self._workers))))
        for function, style in enumerate(self._styles):
            for start in range(0, len(new) if style != "batch" else 0, size):
                self._add(Job(function=function, samples=new[start : start + size]))

    def close(self) -> None:
        """There are no more samples. Functions that take all of them get them in the order of their numbers."""
        everything = tuple(sorted(self.samples))
        for function, style in enumerate(self._styles):
            if style == "batch" and everything:
                self._add(Job(function=function, samples=everything))

    @property
    def finished(self) -> bool:
        """True when no job is queued or running."""
        return self._open == 0

    @property
    def known(self) -> int:
        """How many rewards and failures are known, over all functions."""
        return sum(map(len, self.values)) + sum(map(len, self.failures))

    def payload(self, job: Job) -> bytes:
        """What the worker gets."""
        chosen = [self.samples[index] for index in job.samples]
        environments = [sample.environment for sample in chosen]
        answers = {
            "prompts": [sample.prompt for sample in chosen],
            "completions": [sample.completion for sample in chosen],
            "completion_ids": [list(sample.completion_ids) for sample in chosen],
            "rows": [sample.row for sample in chosen],
            "environments": environments if any(e is not None for e in environments) else None,
            "state": self._state,
        }
        try:
            return pickle.dumps({"function": job.function, "answers": answers}, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise RewardError(
                f"the samples cannot be sent to a reward worker ({type(error).__name__}: {error}); rows and environments "
                f"must hold plain data"
            ) from error

    def current(self, job: Job) -> str:
        """What a job is busy with, for messages."""
        if self._styles[job.function] == "batch" and len(job.samples) > 1:
            return f"{len(job.samples)} samples"
        return self.samples[job.samples[min(job.reported, len(job.samples) - 1)]].place

    def heard(self, job: Job, message: Mapping[str, Any], *, name: str) -> None:
        """A worker's message about this job."""
        if "values" in message:
            self._batch_scored(job, message, name)
        elif "at" in message:
            self._sample_scored(job, message)
        elif "error" in message:
            self.broke(job, "exception", str(message["error"]))
            return
        if message.get("done"):
            self._close(job)

    def broke(self, job: Job, how: Broken, why: str) -> None:
        """The call came to nothing: by an exception in a batch, or because the worker is gone."""
        if self._styles[job.function] == "batch":
            self._batch_broke(job, how, why)
        else:
            self._sample_broke(job, how, why)
        self._close(job)
        if self._hung[job.function] >= _GIVE_UP and not self.values[job.function]:
            self._give_up(job.function)

    def settle(self) -> None:
        """At the end: a sample that nobody spoke of has failed, it is not "not applicable"."""
        for function, values in enumerate(self.values):
            for index in sorted(self.samples):
                if index not in values and index not in self.failures[function]:
                    self._fail(function, index, "its worker process never answered")

    def _add(self, job: Job, *, front: bool = False) -> None:
        self._open += 1
        if front:
            self.queue.appendleft(job)
        else:
            self.queue.append(job)

    def _close(self, job: Job) -> None:
        self._open -= 1
        if job.stage != "alone" or self._styles[job.function] != "batch":
            return
        self._alone_left[job.function] -= 1
        if self._alone_left[job.function] == 0:
            self._rest_again(job.function)

    def _rest_again(self, function: int) -> None:
        """All were tried alone: the good ones are scored together, as a function that compares answers expects."""
        good = tuple(sorted(self.values[function]))
        if 1 < len(good) < len(self.samples):
            self._add(Job(function=function, samples=good, stage="again"))

    def _batch_scored(self, job: Job, message: Mapping[str, Any], name: str) -> None:
        values = message["values"]
        if len(values) != len(job.samples):
            raise WrongCount(name=name, expected=len(job.samples), got=len(values))
        for column, extras in message["extras"].items():
            if len(extras) != len(job.samples):
                raise RewardError(
                    f"reward `{name}` logged {len(extras)} values of `{column}` for {len(job.samples)} answers; "
                    f"log_extra takes one per answer"
                )
            for index, extra in zip(job.samples, extras, strict=True):
                self.extras[index][column] = extra
        if job.stage == "again":  # what the calls alone had logged is replaced with their values
            self.metrics = {key: logged for key, logged in self.metrics.items() if key[0] != job.function}
        self.metrics[job.function, job.samples] = [(str(k), float(v)) for k, v in message["metrics"]]
        for index, value in zip(job.samples, values, strict=True):
            self._record(job.function, index, value)

    def _sample_scored(self, job: Job, message: Mapping[str, Any]) -> None:
        index = job.samples[message["at"]]
        if "error" in message:
            self._fail(job.function, index, str(message["error"]))
        else:
            self.extras[index].update(message["extras"])
            self.metrics[job.function, (index,)] = [(str(k), float(v)) for k, v in message["metrics"]]
            self._record(job.function, index, message["value"])
        job.reported = message["at"] + 1

    def _record(self, function: int, index: int, value: Any) -> None:
        if isinstance(value, dict):
            self._fail(function, index, f"it returned {value['bad']}, which is not a number")
        elif value is not None and (why := out_of_range(value)):
            self._fail(function, index, f"it returned {value}, which {why}")
        else:
            self.values[function][index] = None if value is None else float(value)

    def _fail(self, function: int, index: int, why: str) -> None:
        self.values[function].pop(index, None)
        self.failures[function][index] = why

    def _batch_broke(self, job: Job, how: Broken, why: str) -> None:
        if job.stage == "again":
            return  # each was scored alone; that stands
        lone = len(job.samples) == 1
        if job.stage == "alone" or (lone and how != "crash"):
            self._hung[job.function] += how == "deadline"
            for index in job.samples:
                self._fail(job.function, index, why)
            return
        self._alone_left[job.function] = len(job.samples)
        for index in job.samples:
            self._add(Job(function=job.function, samples=(index,), stage="alone"))

    def _sample_broke(self, job: Job, how: Broken, why: str) -> None:
        if job.reported == len(job.samples):
            return  # all were heard of; it died on the way out
        guilty, rest = job.samples[job.reported], job.samples[job.reported + 1 :]
        if how == "crash" and (job.function, guilty) not in self._retried:
            self._retried.add((job.function, guilty))
            self._add(Job(function=job.function, samples=(guilty,), stage="alone"))
        else:
            self._hung[job.function] += how == "deadline"
            self._fail(job.function, guilty, why)
        if rest:
            self._add(Job(function=job.function, samples=rest), front=True)

    def _give_up(self, function: int) -> None:
        why = f"not tried: the first {self._hung[function]} samples all ran into the deadline"
        for job in [job for job in self.queue if job.function == function]:
            self.queue.remove(job)
            self._open -= 1
            for index in job.samples:
                self._fail(function, index, why)
