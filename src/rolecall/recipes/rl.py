"""Reinforcement learning of a language model: roll out, score, shape, compare, update, sync.

One rollout is `prompts` x `samples` answers. What an answer is worth comes from a reward; how it is compared and what
is optimised from an `Algorithm`. The learner holds all state of a run, so that a checkpoint of it continues exactly.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.experience.batches import collate, lengths_of
from rolecall.maths import shaping
from rolecall.maths.advantages import EMABaseline, flat_groups
from rolecall.maths.kl import AdaptiveKL, FixedKL, kl_estimate
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import has_adapter, merged
from rolecall.policy.model import PolicyModel
from rolecall.recipes.algorithms import ALGORITHMS, Algorithm, Knobs
from rolecall.recipes.collect import Answers, Collector
from rolecall.recipes.experience import MiniStep, Rollout, Watch
from rolecall.recipes.measure import finish, in_words, measure_rollout, measure_update
from rolecall.rewards.records import Reward
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.reference import Reference
from rolecall.train.score import score
from rolecall.train.step import Updater, trained
from rolecall.train.timing import Timer
from rolecall.types import Batch, Finish, Trajectory


class RLLearner:
    """The RL side of `train.loop.Learner`."""

    def __init__(
        self,
        options: RLOptions,
        *,
        policy: LoadedModel,
        module: PolicyModel,
        updater: Updater,
        engine: Engine,
        reward: Reward,
        rows: Rows,
        reference: Reference | None = None,
        watches: Sequence[Watch] = (),
        timer: Timer | None = None,
        advantage: Any = None,
        loss: Any = None,
    ) -> None:
        """`advantage` and `loss` replace the algorithm's own: an algorithm of the user's."""
        self.options, self.policy, self.module, self.updater = options, policy, module, updater
        self.engine, self.reward, self.reference = engine, reward, reference
        self.watches, self._own_advantage, self._own_loss = list(watches), advantage, loss
        self.timer = timer or Timer()
        if options.prompts < updater.accelerator.num_processes:
            raise ValueError(
                f"{options.prompts} prompts per step cannot be shared by {updater.accelerator.num_processes} processes; "
                "raise prompts or use fewer processes"
            )
        o = options.algorithm
        self.rule = TrainRule(stop=o.train_stop)
        self.sampling = options.sampling
        self.collector: Collector = Answers(
            options,
            policy=policy,
            engine=engine,
            reward=reward,
            rows=rows,
            timer=self.timer,
            rank=updater.accelerator.process_index,
            ranks=updater.accelerator.num_processes,
        )
        self.kl: FixedKL | AdaptiveKL = FixedKL(coef=o.kl_coef)
        if o.kl_target is not None:
            self.kl = AdaptiveKL(coef=o.kl_coef, target=o.kl_target, horizon=o.kl_horizon)
        self.baseline = EMABaseline(decay=0.9)
        self._meter = Meter()
        self._metrics: dict[str, float] = {}
        self._terms: tuple[str, ...] = ()

    # -- rolling out ---------------------------------------------------------------------------------------------

    def collect(self, step: int) -> Rollout:
        """Sample and score the next answers, and make them a batch that is ready to train."""
        found = self.collector.collect(step)
        with self.timer.phase("score"):
            batch, kl, algorithm = self._prepare(found.trajectories, [s.total for s in found.scored])
        rollout = Rollout(
            step=step,
            trajectories=found.trajectories,
            prompts=found.prompts,
            answers=found.answers,
            scored=found.scored,
            batch=batch,
            kl=kl,
            kl_coef=self.kl.coef,
            rows=found.rows,
            seed=found.seed,
            algorithm=algorithm,
        )
        self._meter = Meter()
        measure_rollout(self._meter, rollout, rule=self.rule)
        for watch in self.watches:
            watch.rolled_out(rollout)
        return rollout

    def _prepare(
        self, trajectories: Sequence[Trajectory], totals: Sequence[float | None]
    ) -> tuple[Batch, Tensor | None, Algorithm]:
        """Scores -> verdicts -> log-probs and values -> rewards -> advantages."""
        o = self.options.algorithm
        batch = collate(trajectories)
        finish = [t.finish for t in trajectories]
        cut_off = torch.tensor([f.truncated for f in finish])
        aborted = torch.tensor([f is Finish.ABORT for f in finish])
        scores = self._shaped_scores(batch, totals, stopped=torch.tensor([f is Finish.STOP for f in finish]))
        scores = torch.where(aborted, torch.nan, scores)
        include = ~scores.isnan()
        verdicts = self.rule.verdicts(
            batch.roles,
            bad_record=aborted,
            reward_failed=~include,
            truncated=cut_off if o.drop_truncated else None,
            flat_group=flat_groups(scores, batch.groups, include=include) if o.drop_flat else None,
        )
        batch = dataclasses.replace(batch, scores=scores, verdicts=verdicts)

        eligible = self.rule.eligible(batch.roles)
        if o.old_source == "behaviour":
            batch = dataclasses.replace(batch, old_logprobs=batch.behaviour_logprobs)
        if o.old_source == "recompute" or self.module.has_values:
            old = self._score(self.updater.module, batch, eligible)
            batch = dataclasses.replace(batch, values=old.values)
            if o.old_source == "recompute":
                batch = dataclasses.replace(batch, old_logprobs=old.logprobs)
        kl = None
        if self.reference is not None:
            with self.reference.module() as frozen:
                batch = dataclasses.replace(batch, ref_logprobs=self._score(frozen, batch, eligible).logprobs)
            now = batch.old_logprobs if batch.old_logprobs is not None else batch.behaviour_logprobs
            assert now is not None
            assert batch.ref_logprobs is not None
            kl = kl_estimate(now, batch.ref_logprobs, eligible, kind=o.kl_kind)
        in_reward = kl if o.kl_in == "reward" else None
        placed = torch.where(include, scores, 0)
        batch = dataclasses.replace(
            batch, rewards=shaping.shape_rewards(placed, in_reward, eligible, kl_coef=self.kl.coef)
        )

        bootstrap = self._values_behind(batch, cut_off) if o.bootstrap_truncated and self.module.has_values else None
        knobs = Knobs(
            kl_coef=self.kl.coef,
            baseline=self.baseline.value,
            max_new_tokens=self.options.sampling.max_new_tokens,
            bootstrap=bootstrap,
            all_sum=self.updater.all_sum,
        )
        made = ALGORITHMS[o.name](o, knobs)
        algorithm = Algorithm(advantage=self._own_advantage or made.advantage, loss=self._own_loss or made.loss)
        return _with_advantages(batch, algorithm.advantage(batch)), kl, algorithm

    def _shaped_scores(self, batch: Batch, totals: Sequence[float | None], *, stopped: Tensor) -> Tensor:
        """[batch] scores with the recipe's clipping and penalties; NaN where the reward failed."""
        o = self.options.algorithm
        scores = torch.tensor([float("nan") if total is None else total for total in totals])
        if o.score_clip is not None:
            scores = shaping.clip_scores(scores, limit=o.score_clip)
        if o.missing_stop_penalty:
            scores = shaping.missing_stop_penalty(scores, stopped, penalty=o.missing_stop_penalty)
        if o.overlong_buffer is not None:
            lengths = ((batch.roles == Role.CONTENT) | (batch.roles == Role.STOP)).sum(dim=1)
            limit = self.options.sampling.max_new_tokens
            scores = scores + shaping.overlong_penalty(lengths, max_length=limit, buffer=o.overlong_buffer)
        return scores

    # -- updating ------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> list[MiniStep]:
        """Several passes over the rollout, each in several optimiser steps; then the engine gets the weights."""
        o, batch = self.options.algorithm, rollout.batch
        set_lr(self.updater.optimizer, lr_factor(rollout.step, steps=self.options.steps, options=self.options.optim))
        steps: list[MiniStep] = []
        for epoch in range(o.epochs):
            for i, rows in enumerate(self._minibatches(len(batch), rollout.step, epoch)):
                part = batch.rows(rows)
                result = self.updater.step(
                    part, rollout.algorithm.loss, temperature=self.sampling.scoring_temperature, record=True
                )
                steps.append(MiniStep(epoch=epoch, minibatch=i, rows=rows, batch=part, result=result))
        with self.timer.phase("sync"):
            self.engine.load(engine_weights(self.policy), self.engine.version + 1)
        self._measure(steps)
        self._move_knobs(rollout)
        for watch in self.watches:
            watch.updated(rollout, steps)
            self._metrics |= getattr(watch, "metrics", dict)()
        return steps

    def _minibatches(self, n: int, step: int, epoch: int) -> Sequence[Tensor]:
        o = self.options.algorithm
        if o.minibatches == 1:
            return [torch.arange(n)]
        order = np.random.default_rng([self.options.seed, step, epoch]).permutation(n)
        return torch.from_numpy(order).tensor_split(o.minibatches)

    def _move_knobs(self, rollout: Rollout) -> None:
        """The KL controller and the moving baseline after this rollout, and the reference if its time has come."""
        o, batch = self.options.algorithm, rollout.batch
        assert batch.scores is not None
        include = ~batch.scores.isnan()
        scored = torch.where(include, batch.scores, 0).double()
        kl = torch.zeros(()) if rollout.kl is None else rollout.kl.sum()
        local = torch.stack(
            [scored.sum(), include.sum().double(), kl.double(), torch.tensor(float(len(batch))).double()]
        )
        score_sum, known, kl_sum, answers = self.updater.all_sum(local).tolist()
        if known:
            self.baseline = self.baseline.update(torch.tensor([score_sum / known]))
        if rollout.kl is not None:
            self.kl = self.kl.update(kl_sum / answers, samples=int(answers))
        if o.reference_every is not None and self.reference is not None and (rollout.step + 1) % o.reference_every == 0:
            self.reference.refresh()

    def _measure(self, steps: Sequence[MiniStep]) -> None:
        o = self.options.algorithm
        recomputed = o.old_source == "recompute"
        measure_update(self._meter, steps, clip_low=o.clip_low, clip_high=o.clip_high, recomputed=recomputed)
        made = [s.result for s in steps if s.result.terms]  # an optimiser step in which nothing trained has no terms
        self._terms = tuple(made[0].terms) if made else ()
        found = self._meter.result(self.updater.all_sum, self.updater.all_max)
        for name in self._terms:
            found[f"loss/{name}"] = sum(result.terms[name] for result in made) / len(made)
        count = max(1, len(made))
        found["loss"] = found["loss/total"] = sum(result.loss for result in made) / count
        found["grad_norm"] = found["loss/grad_norm"] = sum(result.grad_norm for result in made) / count
        found["skipped"] = float(sum(s.result.skipped for s in steps))
        found["learning_rate"] = float(self.updater.optimizer.param_groups[0]["lr"])
        found["kl_coef"] = self.kl.coef
        found["policy_version"] = float(self.engine.version)
        found["optimizer_steps"] = float(sum(not result.skipped for result in made))
        self._metrics = getattr(self.reward, "take_metrics", dict)() | finish(found)

    def metrics(self) -> dict[str, float]:
        """The numbers of the last step."""
        return self._metrics

    def explain(self) -> str:
        """The last step in words."""
        return in_words(self._metrics, self._terms)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that continues exactly, beside the policy's weights and optimiser."""
        refreshed = self.reference is not None and self.options.algorithm.reference_every is not None
        return {
            "collector": self.collector.state_dict(),
            "kl_coef": self.kl.coef,
            "baseline": dataclasses.asdict(self.baseline),
            "policy_version": self.engine.version,
            "reference": self.reference.weights if refreshed and self.reference is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; the policy's weights must be loaded already."""
        self.collector.load_state_dict(state["collector"])
        if isinstance(self.kl, AdaptiveKL):  # a fixed coefficient is a setting, which may have been changed
            self.kl = dataclasses.replace(self.kl, coef=state["kl_coef"])
        self.baseline = EMABaseline(**state["baseline"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.load(state["reference"])
        self.engine.load(engine_weights(self.policy), state["policy_version"])

    # -- pieces --------------------------------------------------------------------------------------------------

    def _score(self, module: torch.nn.Module, batch: Batch, wanted: Tensor) -> Any:
        return score(
            module,
            batch,
            wanted,
            temperature=self.sampling.scoring_temperature,
            token_budget=self.options.optim.token_budget,
            device=self.updater.accelerator.device,
            timer=self.timer,
        )

    def _values_behind(self, batch: Batch, cut_off: Tensor) -> Tensor:
        """[batch] the critic's value behind the last token of answers that were cut off, else 0."""
        ends = lengths_of(batch)
        longer = Batch(
            ids=torch.nn.functional.pad(batch.ids, (0, 1)),
            roles=torch.nn.functional.pad(batch.roles, (0, 1)).scatter(1, ends[:, None], int(Role.CONTENT)),
            groups=batch.groups,
        )
        wanted = torch.zeros_like(longer.roles, dtype=torch.bool).scatter(1, ends[:, None], True) & cut_off[:, None]
        values = self._score(self.updater.module, longer, wanted).values
        assert values is not None
        return values.sum(dim=1)


def engine_weights(policy: LoadedModel) -> dict[str, Tensor]:
    """The weights an engine samples from, by their Hugging Face names; an adapter is merged into a copy."""
    plain = merged(policy) if has_adapter(policy) else policy
    return {name: parameter.detach() for name, parameter in plain.model.named_parameters()}


def _with_advantages(batch: Batch, made: Tensor | tuple[Tensor, Tensor]) -> Batch:
    """Write advantages (one per sequence are spread over its positions) and, with a critic, returns into the batch."""
    advantages, returns = made if isinstance(made, tuple) else (made, None)
    if advantages.dim() == 1:
        advantages = torch.where(trained(batch), advantages[:, None], 0)
    return dataclasses.replace(batch, advantages=advantages, returns=returns)
