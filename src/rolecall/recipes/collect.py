"""Where a step's experience comes from: answers to rows, sampled and scored, or the rollouts of another run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.experience.store import Rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.policy.load import LoadedModel
from rolecall.recipes.ask import Answered, Asker
from rolecall.rewards.records import Messages, Reward, Sample, Scored, trainer_state
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.train.data import RowOrder, StreamOrder, order_of
from rolecall.train.timing import Timer
from rolecall.types import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampled:
    """What dynamic sampling went through to fill a step."""

    rounds: int
    prompts: int
    """Prompts that were asked, those that were replaced included."""
    flat: int
    """Of these, how many had answers that all score the same."""
    score_sum: float
    """Of all their answers' scores."""
    scores: int
    """How many answers had one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What was sampled for a step and what it scored; one entry per trajectory everywhere."""

    trajectories: Sequence[Trajectory]
    prompts: Sequence[str]
    """The prompt as text."""
    answers: Sequence[str]
    """The answer as text, without its stop token."""
    scored: Sequence[Scored]
    rows: Sequence[int]
    """The row of the data that is answered."""
    seed: int
    """What the answers were sampled with, together with step, prompt and sample."""
    baselines: Sequence[float | None] | None = None
    """What the greedy answer to the same prompt scored, if one was asked for; None: its reward failed."""
    messages: Sequence[Messages] | None = None
    """Of episodes: all that the trajectory's agent read and said, its prompt first."""
    drawn: Resampled | None = None
    """With dynamic sampling: what it took."""


class Collector(Protocol):
    """Makes experience. Its state is the position in the data."""

    def collect(self, step: int) -> Collected:
        """Experience for one step; steps count from 0."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


def run_state(options: Any, order: RowOrder | StreamOrder | None, step: int, *, rank: int = 0) -> dict[str, Any]:
    """What rewards see as `trainer_state` when so many steps are done; a stream has no epochs, nor has no rows at all."""
    taken, rows = (order.taken, order.rows) if isinstance(order, RowOrder) else (0, 0)
    return trainer_state(step=step, steps=options.steps, taken=taken, rows=rows, per_step=options.prompts, rank=rank)


class OfRows:
    """What collectors share: rows are taken in order. Of every step's prompts, rank r of n takes each n-th, from the r-th
    on."""

    def __init__(self, options: RLOptions, rows: Rows, *, rank: int, ranks: int) -> None:
        self.options, self.rows, self.rank, self.ranks = options, rows, rank, ranks
        self.order = order_of(rows, seed=options.seed)

    def state_dict(self) -> dict[str, Any]:
        """The position in the rows."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])


class Answers(OfRows):
    """One answer per sample: prompts are taken from the rows in order, each is answered `samples` times.

    With `resample`, as many new prompts are taken as groups turned out flat, until there is none or the rounds are used
    up; then flat groups fill the rest. No row that was taken comes again before its next pass, and none is left out.
    """

    def __init__(
        self,
        options: RLOptions,
        *,
        policy: LoadedModel,
        engine: Engine,
        reward: Reward,
        rows: Rows,
        timer: Timer,
        rank: int = 0,
        ranks: int = 1,
        all_sum: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """`all_sum` adds over ranks."""
        super().__init__(options, rows, rank=rank, ranks=ranks)
        self.policy, self.engine, self.reward, self.timer, self.all_sum = policy, engine, reward, timer, all_sum

    def collect(self, step: int) -> Collected:
        """Sample answers to the next prompts and score them."""
        o, seed = self.options.algorithm, self.options.seed + self.rank * 2**32
        self._state = run_state(self.options, self.order, step, rank=self.rank)
        kept = self._ask(self.order.take(self.options.prompts)[self.rank :: self.ranks], step, seed, first=0)
        drawn = None
        if o.resample:
            kept, drawn = self._replace_flat(kept, step, seed)
        groups = [(step * self.options.prompts + i * self.ranks + self.rank, g) for i, g in enumerate(kept)]
        greedy = [g.greedy for g in kept for _ in g.answers]
        return Collected(
            trajectories=[t for number, g in groups for t in g.trajectories(number)],
            prompts=[g.prompt for g in kept for _ in g.answers],
            answers=[answer for g in kept for answer in g.answers],
            scored=[s for g in kept for s in g.scored],
            rows=[g.row for g in kept for _ in g.answers],
            seed=seed,
            baselines=[s.total if s is not None else None for s in greedy] if o.name == "remax" else None,
            drawn=drawn,
        )

    def _ask(self, chosen: Sequence[int], step: int, seed: int, *, first: int) -> list[Answered]:
        if not chosen:
            return []
        o = self.options
        asker = Asker(
            policy=self.policy,
            engine=self.engine,
            reward=self.reward,
            rows=self.rows,
            chat=o.chat,
            sampling=o.sampling,
            timer=self.timer,
        )
        greedy = o.algorithm.name == "remax"
        return asker.ask(chosen, samples=o.samples, seed=seed, step=step, state=self._state, first=first, greedy=greedy)

    def _replace_flat(self, groups: list[Answered], step: int, seed: int) -> tuple[list[Answered], Resampled]:
        """Ask further prompts, as many as groups are flat, for the rounds that are left."""
        wanted, everything, rounds = len(groups), list(groups), 1
        while rounds < self.options.algorithm.resample:
            missing = wanted - sum(not g.flat for g in everything)
            chosen = self._take(missing)
            if chosen is None:
                break
            everything += self._ask(chosen, step, seed, first=len(everything))
            rounds += 1
        useful, flat = [g for g in everything if not g.flat], [g for g in everything if g.flat]
        totals = [s.total for g in everything for s in g.scored if s.total is not None]
        drawn = Resampled(
            rounds=rounds, prompts=len(everything), flat=len(flat), score_sum=sum(totals), scores=len(totals)
        )
        return useful + flat[len(flat) - (wanted - len(useful)) :], drawn

    def _take(self, missing: int) -> list[int] | None:
        """This rank's share of the rows that all ranks need next; None if none needs any."""
        each = torch.zeros(self.ranks, dtype=torch.float64)
        each[self.rank] = missing
        needs = [int(n) for n in self.all_sum(each).tolist()]
        if not sum(needs):
            return None
        start = sum(needs[: self.rank])
        return self.order.take(sum(needs))[start : start + missing]


class StoredAnswers:
    """A `Collector` that reads. Files are taken in order, again from the first when all were taken."""

    def __init__(self, store: RolloutStore, *, rank: int = 0, ranks: int = 1) -> None:
        """Of every file's groups, rank r of n takes each n-th, from the r-th on."""
        self.store, self.rank, self.ranks, self.taken = store, rank, ranks, 0

    def collect(self, step: int) -> Collected:
        """The next file."""
        index = self.taken % len(self.store)
        self.taken += 1
        found = self.store.read(index)
        rows = self._rows(found)
        if not rows:
            raise UserError(
                f"{self.store.files[index]} has fewer groups than there are processes; use {self.ranks - 1} or fewer"
            )
        return Collected(
            trajectories=[found.trajectories[i] for i in rows],
            prompts=[found.details[i].prompt_text for i in rows],
            answers=[found.details[i].answer_text for i in rows],
            scored=[_scored(found, i) for i in rows],
            rows=[found.details[i].prompt or 0 for i in rows],
            seed=found.details[rows[0]].seed or 0,
        )

    def state_dict(self) -> dict[str, Any]:
        """How many files were taken, and which there are."""
        return {"taken": self.taken, "files": self.store.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last file that was taken."""
        if list(state.get("files", [])) != self.store.names:
            raise UserError(
                f"{self.store.place} does not hold the rollouts that the run began with; bring them back, or start a new run"
            )
        self.taken = int(state["taken"])

    def _rows(self, found: Rollouts) -> list[int]:
        groups = list(dict.fromkeys(t.group for t in found.trajectories))[self.rank :: self.ranks]
        return [i for i, t in enumerate(found.trajectories) if t.group in set(groups)]


class Unasked:
    """Stands for the reward of a run that scores nothing."""

    names: tuple[str, ...] = ()

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """Never called: stored answers have their scores."""
        raise AssertionError("a reward was asked for in a run that trains on stored answers")

    def take_metrics(self) -> dict[str, float]:
        """Nothing was logged."""
        return {}


def _scored(found: Rollouts, row: int) -> Scored:
    details = found.details[row]
    failure = details.reward_failure
    if details.total is None and failure is None:
        failure = "there is no score in the store"
    return Scored(
        scores=dict(found.trajectories[row].scores),
        total=None if failure is not None else details.total,
        failure=failure,
        extras=dict(details.extras),
    )
