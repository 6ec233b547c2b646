"""Where a step's experience comes from: rows are asked, each a number of times, and the answers are scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from rolecall.config.parts import ChatOptions
from rolecall.config.rl import RLOptions
from rolecall.maths.roles import Role, response_roles
from rolecall.policy.load import LoadedModel
from rolecall.recipes.rendering import rendered_prompt
from rolecall.rewards.records import Messages, Reward, Sample, Scored, trainer_state, why_unscored
from rolecall.rollout.engine import Engine, in_order
from rolecall.tasks.rows import Rows, place_of
from rolecall.train.data import RowOrder, StreamOrder, order_of
from rolecall.train.ranks import Ranks
from rolecall.train.timing import Timer
from rolecall.types import Completion, Finish, Request, Sampling, Trajectory


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


class RowsCollector:
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
        raise NotImplementedError

    def skip(self, steps: int) -> None:
        """Leave the rows of so many steps to others."""
        self.order.take(steps * self.options.prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(state["order"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A row with its answers; one entry per answer everywhere."""

    row: int
    """Which row of the data it is."""
    request: Request
    prompt: str
    """The prompt as text."""
    completions: Sequence[Completion]
    answers: Sequence[str]
    """As text, without the stop token."""
    scored: Sequence[Scored]
    greedy: Scored | None = None
    """What the greedy answer scored, if one was asked for."""

    @property
    def flat(self) -> bool:
        """True if no two answers score differently, so that there is nothing to compare. Failed rewards do not count."""
        return len({s.total for s in self.scored if s.total is not None}) < 2

    def trajectories(self, group: int) -> list[Trajectory]:
        """The answers as trajectories of this group."""
        return [
            replace(trajectory_of(self.request, c, group=group), scores=dict(s.scores))
            for c, s in zip(self.completions, self.scored, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Asks a policy. It keeps no state: the same rows, step and seed give the same answers."""

    policy: LoadedModel
    engine: Engine
    reward: Reward
    rows: Rows
    chat: ChatOptions
    sampling: Sampling
    timer: Timer

    @classmethod
    def of(cls, options: Any, **parts: Any) -> "Asker":
        """One that puts prompts and draws answers as the options say."""
        return cls(chat=options.chat, sampling=options.sampling, **parts)

    def ask(
        self,
        chosen: Mapping[int, int],
        *,
        samples: int,
        seed: int,
        step: int,
        state: Mapping[str, Any],
        greedy: bool = False,
    ) -> list[Answered]:
        """Answer the chosen rows, given by their prompts' numbers in the step, `samples` times each.

        `state` is what rewards see as `trainer_state`. With `greedy`, also once with the likeliest tokens; that answer
        is scored and reported beside the others.
        """
        if not chosen:
            self.reward.score([], state=state)  # it may be sharded, and other ranks have rows
            return []
        rows = {number: self.rows[i] for number, i in chosen.items()}
        requests = [
            prompt_request(self.policy, row, self.chat, self.sampling, n=samples, seed=seed, step=step, prompt=number)
            for number, row in rows.items()
        ]
        likeliest = [replace(r, n=1, sampling=replace(r.sampling, temperature=0.0)) for r in requests] if greedy else []
        completions: list[Completion] = []
        with self.timer.phase("generate"):
            for asked in (requests, likeliest) if greedy else (requests,):
                ended = self.timer.counted(self.engine.stream(asked), total=sum(r.n for r in asked), unit="answers")
                completions += in_order(asked, ended)
        answers = [answer_text(self.policy, c) for c in completions]
        with self.timer.phase("reward"):
            told = [sample_of(rows[c.prompt], c, answer) for c, answer in zip(completions, answers, strict=True)]
            scored = self.reward.score(told, state=state)
        both = list(zip(completions, answers, scored, strict=True))
        sampled, beside = both[: samples * len(requests)], both[samples * len(requests) :]
        greedily = {c.prompt: (answer, s) for c, answer, s in beside}
        groups: dict[int, list[tuple[Completion, str, Scored]]] = {request.prompt: [] for request in requests}
        for c, answer, s in sampled:
            groups[c.prompt].append((c, answer, _with_greedy(s, greedily.get(c.prompt))))
        return [
            Answered(
                row=row,
                request=request,
                prompt=self.policy.tokenizer.decode(request.prompt_ids),
                completions=[c for c, _, _ in groups[request.prompt]],
                answers=[answer for _, answer, _ in groups[request.prompt]],
                scored=[s for _, _, s in groups[request.prompt]],
                greedy=greedily[request.prompt][1] if greedy else None,
            )
            for row, request in zip(chosen.values(), requests, strict=True)
        ]

    def samples_of(self, group: Answered) -> list[Sample]:
        """A row's answers as another reward sees them."""
        row = self.rows[group.row]
        return [sample_of(row, c, answer) for c, answer in zip(group.completions, group.answers, strict=True)]


class Answers(RowsCollector):
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
        self.asker = Asker.of(options, policy=policy, engine=engine, reward=reward, rows=rows, timer=timer)

    def collect(self, step: int) -> Collected:
        """Sample answers to the next prompts and score them."""
        o = self.options.algorithm
        how: dict[str, Any] = {"samples": self.options.samples, "seed": self.options.seed, "greedy": o.name == "remax"}
        ask: Callable[..., list[Answered]] = partial(self.asker.ask, step=step, state=self.state_at(step), **how)
        taken = self.take()
        kept, drawn = ask(taken), None
        if o.resample:
            kept, drawn = self._replace_flat(kept, ask)
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

    def _replace_flat(
        self, groups: list[Answered], ask: Callable[..., list[Answered]]
    ) -> tuple[list[Answered], Resampled]:
        """Ask further prompts, as many as groups are flat, for the rounds that are left."""
        wanted, everything, rounds, asked = len(groups), list(groups), 1, self.options.prompts
        while rounds < self.options.algorithm.resample:
            missing = wanted - sum(not g.flat for g in everything)
            before, needed = self._needed(missing)
            if not needed:
                break
            own = slice(before, before + missing)
            numbers, chosen = range(asked, asked + needed)[own], self.order.take(needed)[own]
            everything += ask(dict(zip(numbers, chosen, strict=True)))
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


def unscored(rows: Rows, groups: Sequence[Answered]) -> str | None:
    """Why no answer has a score; None if any has."""
    answered = [(group.row, scored) for group in groups for scored in group.scored]
    return why_unscored([scored for _, scored in answered], lambda i: place_of(rows, answered[i][0]))


def _with_greedy(scored: Scored, beside: tuple[str, Scored] | None) -> Scored:
    """The greedy answer is kept on record beside each answer that is compared with it."""
    if beside is None:
        return scored
    answer, greedy = beside
    return replace(scored, extras={**scored.extras, "greedy_answer": answer, "greedy_score": greedy.total})


def prompt_request(
    policy: LoadedModel,
    row: Mapping[str, Any],
    chat: ChatOptions,
    sampling: Sampling,
    *,
    n: int,
    seed: int,
    step: int,
    prompt: int,
) -> Request:
    """The request for a row's prompt."""
    ids = rendered_prompt(row, policy=policy, chat=chat).ids
    return Request(prompt_ids=ids, sampling=sampling, n=n, seed=seed, step=step, prompt=prompt)


def answer_text(policy: LoadedModel, completion: Completion) -> str:
    """The answer as text, without its stop token."""
    ids = completion.ids[:-1] if completion.finish is Finish.STOP else completion.ids
    return str(policy.tokenizer.decode(list(ids), skip_special_tokens=True))


def as_completion(prompt: Any, answer: str) -> Any:
    """Text for text prompts, a message for conversations: what reward functions of TRL's kind expect."""
    return answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]


def sample_of(row: Mapping[str, Any], completion: Completion, answer: str) -> Sample:
    """An answer as rewards see it."""
    return Sample(
        prompt=row["prompt"],
        completion=as_completion(row["prompt"], answer),
        completion_ids=completion.ids,
        row=row,
        prompt_index=completion.prompt,
        sample_index=completion.sample,
    )


def trajectory_of(request: Request, completion: Completion, *, group: int) -> Trajectory:
    """The whole sequence with its roles: the prompt was given, the answer's roles come from its length and finish."""
    start, length = len(request.prompt_ids), len(completion.ids)
    return Trajectory(
        ids=request.prompt_ids + completion.ids,
        roles=(int(Role.PROMPT),) * start + _answer_roles(length, completion.finish is Finish.STOP),
        behaviour_logprobs=(float("nan"),) * start + completion.behaviour_logprobs,
        episode=completion.sample,
        group=group,
        turns=((start, start + length),),
        finish=completion.finish,
        policy_version=completion.policy_version,
        supports=None if completion.supports is None else (b"",) * start + completion.supports,
        versions=completion.versions and tuple((start + a, start + b, v) for a, b, v in completion.versions),
    )


@lru_cache(maxsize=8192)
def _answer_roles(length: int, stopped: bool) -> tuple[int, ...]:
    return tuple(response_roles(torch.tensor([length]), torch.tensor([stopped]), width=length)[0].tolist())
