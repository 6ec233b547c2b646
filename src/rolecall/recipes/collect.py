"""Where a step's experience comes from: answers to rows, sampled and scored, or the rollouts of another run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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
from rolecall.train.ranks import Ranks
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
    lessons: Sequence[Mapping[str, Any]] = ()
    """What happened to the pool of lessons: lines for the run's directory."""


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
    """What rewards see as `trainer_state` after this many steps; a stream has no epochs, and neither have no rows."""
    taken, rows = (order.taken, order.rows) if isinstance(order, RowOrder) else (0, 0)
    return trainer_state(step=step, steps=options.steps, taken=taken, rows=rows, per_step=options.prompts, rank=rank)


class OfRows:
    """What collectors share: rows are taken in order, and each rank has its share of every step's prompts."""

    def __init__(self, options: RLOptions, rows: Rows, *, ranks: Ranks | None) -> None:
        self.options, self.rows, self.ranks = options, rows, ranks or Ranks()
        self.order = order_of(rows, seed=options.seed)

    def state_at(self, step: int) -> dict[str, Any]:
        """What rewards see as `trainer_state`."""
        return run_state(self.options, self.order, step, rank=self.ranks.number)

    def take(self) -> dict[int, int]:
        """The rows of this rank's prompts for the next step, by the prompts' numbers."""
        prompts = self.options.prompts
        return dict(zip(self.ranks.share(range(prompts)), self.ranks.share(self.order.take(prompts)), strict=True))

    def collect(self, step: int) -> Collected:
        """Experience for one step."""
        raise NotImplementedError

    def skip(self, steps: int) -> None:
        """Leave the rows of so many steps to others."""
        self.order.take(steps * self.options.prompts)

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
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(options, rows, ranks=ranks)
        self.policy, self.engine, self.reward, self.timer = policy, engine, reward, timer

    def collect(self, step: int) -> Collected:
        """Sample answers to the next prompts and score them."""
        o = self.options.algorithm
        self._state, taken = self.state_at(step), self.take()
        kept = self._ask(taken, step)
        drawn = None
        if o.resample:
            kept, drawn = self._replace_flat(kept, step)
        groups = [(step * self.options.prompts + number, g) for number, g in zip(taken, kept, strict=True)]
        greedy = [g.greedy for g in kept for _ in g.answers]
        return Collected(
            trajectories=[t for number, g in groups for t in g.trajectories(number)],
            prompts=[g.prompt for g in kept for _ in g.answers],
            answers=[answer for g in kept for answer in g.answers],
            scored=[s for g in kept for s in g.scored],
            rows=[g.row for g in kept for _ in g.answers],
            seed=self.options.seed,
            baselines=[s.total if s is not None else None for s in greedy] if o.name == "remax" else None,
            drawn=drawn,
        )

    def _ask(self, rows: Mapping[int, int], step: int) -> list[Answered]:
        """The answers to rows, given by their prompts' numbers."""
        if not rows:
            self.reward.score([], state=self._state)  # it may be sharded, and other ranks have rows
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
        return asker.ask(rows, samples=o.samples, seed=o.seed, step=step, state=self._state, greedy=greedy)

    def _replace_flat(self, groups: list[Answered], step: int) -> tuple[list[Answered], Resampled]:
        """Ask further prompts, as many as groups are flat, for the rounds that are left."""
        wanted, everything, rounds, asked = len(groups), list(groups), 1, self.options.prompts
        while rounds < self.options.algorithm.resample:
            missing = wanted - sum(not g.flat for g in everything)
            before, needed = self._needed(missing)
            if not needed:
                break
            own = slice(before, before + missing)
            numbers, chosen = range(asked, asked + needed)[own], self.order.take(needed)[own]
            everything += self._ask(dict(zip(numbers, chosen, strict=True)), step)
            asked, rounds = asked + needed, rounds + 1
        useful, flat = [g for g in everything if not g.flat], [g for g in everything if g.flat]
        totals = [s.total for g in everything for s in g.scored if s.total is not None]
        drawn = Resampled(
            rounds=rounds, prompts=len(everything), flat=len(flat), score_sum=sum(totals), scores=len(totals)
        )
        return useful + flat[len(flat) - (wanted - len(useful)) :], drawn

    def _needed(self, missing: int) -> tuple[int, int]:
        """(what the ranks before this one need next, what all of them need)."""
        each = torch.zeros(self.ranks.count, dtype=torch.float64)
        each[self.ranks.number] = missing
        needs = [int(n) for n in self.ranks.all_sum(each).tolist()]
        return sum(needs[: self.ranks.number]), sum(needs)


class StoredAnswers:
    """A `Collector` that reads. Files are taken in order, again from the first when all were taken."""

    def __init__(self, store: RolloutStore, *, ranks: Ranks | None = None) -> None:
        self.store, self.ranks, self.taken = store, ranks or Ranks(), 0

    def collect(self, step: int) -> Collected:
        """The next file."""
        index = self.taken % len(self.store)
        self.taken += 1
        found = self.store.read(index)
        rows = self._rows(found)
        if not rows:
            raise UserError(
                f"{self.store.files[index]} has fewer groups than there are processes; use {self.ranks.count - 1} or fewer"
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
        """Continue after the last file that was taken."""
        if list(state.get("files", [])) != self.store.names:
            raise UserError(
                f"{self.store.place} does not hold the rollouts that the run began with; bring them back, or start a new run"
            )
        self.taken = int(state["taken"])

    def _rows(self, found: Rollouts) -> list[int]:
        groups = set(self.ranks.share(list(dict.fromkeys(t.group for t in found.trajectories))))
        return [i for i, t in enumerate(found.trajectories) if t.group in groups]


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
