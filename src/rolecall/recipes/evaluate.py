"""How good a policy is on held-out rows: greedy accuracy, avg@k, pass@k, length, truncation, KL to the start."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolecall.config.parts import ChatOptions
from rolecall.experience.batches import collate
from rolecall.maths.kl import kl_estimate
from rolecall.maths.roles import TrainRule
from rolecall.policy.load import LoadedModel
from rolecall.recipes.collect import answer_text, prompt_request, sample_of, trajectory_of
from rolecall.rewards.records import Reward, Sample
from rolecall.rollout.engine import Engine, in_order
from rolecall.tasks.rows import Rows
from rolecall.train.ranks import Ranks
from rolecall.train.reference import Reference
from rolecall.train.score import assist, score
from rolecall.train.timing import Timer
from rolecall.types import Sampling, Trajectory

EVALUATION_STEP = 2**40
"""Evaluations draw their random numbers as if at this step, so that they never repeat those of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Numbers, and the greedy answers they come from."""

    numbers: dict[str, float]
    """`reward` (mean greedy score) and `accuracy` (share of greedy answers that score 1 or more) first of all."""
    prompts: list[Any]
    answers: list[str]
    scores: list[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredAnswer:
    """What an evaluation counts of one answer."""

    prompt: int
    sample: int
    text: str
    length: float
    """In tokens."""
    truncated: bool
    total: float | None
    pleased: float | None
    """The score of training's own reward, where another decides."""
    kl: float
    """To the reference, where that is asked for."""


class HeldOut(ABC):
    """Evaluates whatever weights the engine holds, always on the same rows with the same random numbers."""

    def __init__(
        self,
        *,
        rows: Rows,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        reference: Reference | None = None,
        state_at: Callable[[int], Mapping[str, Any]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """With `samples` > 1 also avg@k and pass@k and, given a reference, the KL to it on those samples. `state_at(step)`
        is what rewards see as `trainer_state`. Processes that train together share the rows."""
        self.ranks = ranks or Ranks()
        self.rows, self.sampling, self.samples, self.seed, self.reference = rows, sampling, samples, seed, reference
        self.state: Mapping[str, Any] = {}
        self._state_at = state_at or (lambda step: {"global_step": step})

    def __call__(self, step: int) -> dict[str, float]:
        """The numbers alone, of a run that has taken this many steps."""
        self.state = self._state_at(step)
        return self.run().numbers

    @abstractmethod
    def run(self) -> Evaluation:
        """Answer every row greedily, and `samples` times at the sampling temperature if asked."""


class Evaluator(HeldOut):
    """Of answers to prompts."""

    def __init__(
        self,
        *,
        policy: LoadedModel,
        engine: Engine,
        reward: Reward,
        chat: ChatOptions,
        train_reward: Reward | None = None,
        token_budget: int = 8192,
        timer: Timer | None = None,
        **how: Any,
    ) -> None:
        """`train_reward` is told too, if it is not the reward that decides: when it rises and the other does not, the
        policy has learned to please it. `how` is for `HeldOut`."""
        super().__init__(**how)
        self.train_reward = train_reward
        self.policy, self.engine, self.reward, self.chat = policy, engine, reward, chat
        self.token_budget, self.timer = token_budget, timer or Timer()

    def run(self) -> Evaluation:
        found = self._answers(replace(self.sampling, temperature=0.0), 1)
        totals = [answer.total for answer in found]
        known = [t for t in totals if t is not None]
        numbers = {"reward": sum(known) / len(known)} if known else {}
        numbers |= {
            "accuracy": sum(t >= 1 for t in known) / len(totals),
            "mean_length": sum(answer.length for answer in found) / len(found),
            "clipped_ratio": sum(answer.truncated for answer in found) / len(found),
            "failed": sum(t is None for t in totals) / len(totals),
        }
        pleased = [answer.pleased for answer in found if answer.pleased is not None]
        numbers |= {"train_reward": sum(pleased) / len(pleased)} if pleased else {}
        if self.samples > 1:
            numbers |= self._sampled()
        prompts, texts = [row["prompt"] for row in self.rows], [answer.text for answer in found]
        return Evaluation(numbers=numbers, prompts=prompts, answers=texts, scores=totals)

    def _sampled(self) -> dict[str, float]:
        found = self._answers(self.sampling, self.samples, sampled=True)
        totals = [answer.total for answer in found]
        right = torch.tensor([float(t is not None and t >= 1) for t in totals]).view(len(self.rows), self.samples)
        numbers = {
            f"avg@{self.samples}": float(right.mean()),
            f"pass@{self.samples}": float(right.amax(dim=1).mean()),
        }
        if self.reference is not None:
            numbers["kl"] = float(torch.tensor([answer.kl for answer in found]).mean())
        return numbers

    def _answers(self, sampling: Sampling, n: int, *, sampled: bool = False) -> list[ScoredAnswer]:
        """n answers to every row, in order. Each rank answers its share of the rows, and all get all of them."""
        own = self.ranks.share(range(len(self.rows)))
        requests = {
            i: prompt_request(
                self.policy, self.rows[i], self.chat, sampling, n=n, seed=self.seed, step=EVALUATION_STEP, prompt=i
            )
            for i in own
        }
        asked = list(requests.values())
        ended = self.timer.counted(self.engine.stream(asked), total=n * len(asked), unit="answers")
        completions = in_order(asked, ended) if asked else []
        texts = [answer_text(self.policy, c) for c in completions]
        samples = [sample_of(self.rows[c.prompt], c, text) for c, text in zip(completions, texts, strict=True)]
        totals = self._score(self.reward, samples)
        pleased: list[float | None] = [None] * len(completions)
        if self.train_reward is not None and not sampled:
            pleased = self._score(self.train_reward, samples)
        kl = [0.0] * len(completions)
        if sampled and self.reference is not None:
            trajectories = [trajectory_of(requests[c.prompt], c, group=c.prompt) for c in completions]
            temperature = self.sampling.scoring_temperature
            kl = kl_to(self.reference, trajectories, temperature=temperature, token_budget=self.token_budget).tolist()
        found = [
            ScoredAnswer(
                prompt=c.prompt,
                sample=c.sample,
                text=texts[i],
                length=len(c.ids),
                truncated=c.finish.truncated,
                total=totals[i],
                pleased=pleased[i],
                kl=kl[i],
            )
            for i, c in enumerate(completions)
        ]
        return sorted(self.ranks.gather(found), key=lambda answer: (answer.prompt, answer.sample))

    def _score(self, reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
        found = [scored.total for scored in reward.score(samples, state=self.state)]  # all ranks ask: it may be sharded
        reward.take_metrics()  # so that what evaluations log and count is not mistaken for training's
        return found


def kl_to(
    reference: Reference, trajectories: Sequence[Trajectory], *, temperature: float, token_budget: int = 8192
) -> Tensor:
    """[batch] KL from the policy to the reference over each trajectory, estimated (k1) on the policy's own samples. All ranks
    must ask, also one that has no trajectories."""
    with reference.module() as frozen:
        if not trajectories:
            assist(frozen, temperature=temperature)
            return torch.zeros(0)
        batch = collate(trajectories)
        mask = TrainRule().eligible(batch.roles)
        ref = score(frozen, batch, mask, temperature=temperature, token_budget=token_budget)
    assert batch.behaviour_logprobs is not None
    return kl_estimate(batch.behaviour_logprobs, ref.logprobs, mask, kind="k1").sum(dim=1)
