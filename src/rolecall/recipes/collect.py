"""Where a step's experience comes from: rows are asked, answers are sampled and scored."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rolecall.config.rl import RLOptions
from rolecall.policy.load import LoadedModel
from rolecall.recipes.sampling import answer_text, answered, as_completion, prompt_request, trajectory_of
from rolecall.rewards.records import Reward, Sample, Scored
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.train.data import RowOrder
from rolecall.train.timing import Timer
from rolecall.types import Trajectory


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


class Answers:
    """One answer per sample: prompts are taken from the rows in order, each is answered `samples` times."""

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
    ) -> None:
        """Of every step's prompts, rank r of n takes each n-th, from the r-th on."""
        self.options, self.policy, self.engine, self.reward, self.rows = options, policy, engine, reward, rows
        self.timer, self.rank, self.ranks = timer, rank, ranks
        self.order = RowOrder(len(rows), seed=options.seed)

    def collect(self, step: int) -> Collected:
        """Sample answers to the next prompts and score them."""
        options = self.options
        chosen = self.order.take(options.prompts)[self.rank :: self.ranks]
        rows = [self.rows[i] for i in chosen]
        seed = options.seed + self.rank * 2**32
        requests = [
            prompt_request(
                self.policy, row, options.chat, options.sampling, n=options.samples, seed=seed, step=step, prompt=i
            )
            for i, row in enumerate(rows)
        ]
        with self.timer.phase("generate"):
            completions = answered(self.engine, requests, self.timer)
        answers = [answer_text(self.policy, c) for c in completions]
        samples = [
            Sample(
                prompt=rows[c.prompt]["prompt"],
                completion=as_completion(rows[c.prompt]["prompt"], answer),
                completion_ids=c.ids,
                row=rows[c.prompt],
                prompt_index=c.prompt,
                sample_index=c.sample,
            )
            for c, answer in zip(completions, answers, strict=True)
        ]
        with self.timer.phase("reward"):
            scored = self.reward.score(samples, state={"global_step": step})
        trajectories = [
            dataclasses.replace(
                trajectory_of(requests[c.prompt], c, group=self._group(step, c.prompt)), scores=dict(s.scores)
            )
            for c, s in zip(completions, scored, strict=True)
        ]
        return Collected(
            trajectories=trajectories,
            prompts=[self.policy.tokenizer.decode(requests[c.prompt].prompt_ids) for c in completions],
            answers=answers,
            scored=scored,
            rows=[chosen[c.prompt] for c in completions],
            seed=seed,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position in the rows."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])

    def _group(self, step: int, prompt: int) -> int:
        return step * self.options.prompts + prompt * self.ranks + self.rank
