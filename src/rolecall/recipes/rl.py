"""Reinforcement learning of a language model: roll out, score, shape, compare, update, sync.

One rollout is `prompts` x `samples` answers. What an answer is worth comes from a reward; how it is compared and what
is optimised from an `Algorithm`. The learner holds all state of a run, so that a checkpoint of it continues exactly.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.experience.batches import Joined
from rolecall.maths.advantages import EMABaseline
from rolecall.maths.entropy import EntropyTarget, FixedEntropy
from rolecall.maths.kl import AdaptiveKL, FixedKL
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import has_adapter, merged, merged_weights
from rolecall.policy.model import PolicyModel
from rolecall.policy.sharded import in_parts
from rolecall.recipes.algorithms import Algorithm, Coefficients, algorithm_of, boosted, own_advantage, own_loss
from rolecall.recipes.collect import Answers, Collector
from rolecall.recipes.experience import MiniStep, Rollout, Watch
from rolecall.recipes.measure import finish, in_words, measure_resampled, measure_rollout, measure_update
from rolecall.recipes.prepare import Preparer, Source
from rolecall.recipes.replay import Replay, finish_replay, measure_replay
from rolecall.rewards.records import Reward, why_unscored
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows, place_of
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.reference import Reference
from rolecall.train.step import Updater
from rolecall.train.timing import Timer
from rolecall.types import Batch, Trajectory


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
        rows: Rows | None,
        reference: Reference | None = None,
        watches: Sequence[Watch] = (),
        timer: Timer | None = None,
        advantage: Any = None,
        loss: Any = None,
        collector: Collector | None = None,
    ) -> None:
        """`advantage` and `loss` replace the algorithm's own: an algorithm of the user's. `collector` takes the place of
        sampling answers to the rows, which may then be None."""
        self.options, self.policy, self.module, self.updater = options, policy, module, updater
        self.engine, self.reward, self.reference = engine, reward, reference
        self.watches = list(watches)
        targets = options.algorithm.critic != "none" and loss is None  # the preset's loss of the critic needs them
        self._own_advantage = None if advantage is None else own_advantage(advantage, returns=targets)
        self._own_loss = None if loss is None else own_loss(loss)
        self.timer = timer or Timer()
        self.ranks = updater.ranks
        if options.prompts < self.ranks.count:
            raise ValueError(
                f"{options.prompts} prompts per step cannot be shared by {self.ranks.count} processes; raise prompts or use "
                "fewer processes"
            )
        o = options.algorithm
        self.sampling = options.sampling
        self.prepare = Preparer(
            options, policy=policy, module=module, updater=updater, reference=reference, timer=self.timer
        )
        self.rule = self.prepare.rule
        self.collector = collector or self._answers(rows)
        self.kl: FixedKL | AdaptiveKL = FixedKL(coef=o.kl_coef)
        if o.kl_target is not None:
            self.kl = AdaptiveKL(coef=o.kl_coef, target=o.kl_target, horizon=o.kl_horizon)
        self.entropy: FixedEntropy | EntropyTarget = FixedEntropy(coef=o.entropy_coef)
        if o.entropy_target is not None:
            self.entropy = EntropyTarget(
                coef=o.entropy_coef, target=o.entropy_target, rate=o.entropy_rate, limit=o.entropy_max
            )
        self.baseline = EMABaseline(decay=0.9)
        self.replay: Replay | None = None
        if options.replay.on:
            prepare, own = self._prepare_replayed, loss is not None
            self.replay = Replay(options, prepare=prepare, own_loss=own, ranks=self.ranks)
        self._meter = Meter()
        self._metrics: dict[str, float] = {}
        self._terms: tuple[str, ...] = ()
        self.unscored: str | None = None
        """Why no answer of this process has a score in the last step; None if any has."""

    def _answers(self, rows: Rows | None) -> Collector:
        if rows is None:
            raise ValueError("there is nothing to learn from: give rows, or a collector")
        return Answers(
            self.options,
            policy=self.policy,
            engine=self.engine,
            reward=self.reward,
            rows=rows,
            timer=self.timer,
            ranks=self.ranks,
        )

    # -- rolling out ---------------------------------------------------------------------------------------------

    def collect(self, step: int) -> Rollout:
        """Sample and score the next answers, and make them a batch that is ready to train."""
        o = self.options.algorithm
        if o.kl_warmup:
            self.kl = FixedKL(coef=o.kl_coef * min(1.0, (step + 1) / o.kl_warmup))
        found = self.collector.collect(step)
        rows = getattr(self.collector, "rows", None)
        self.unscored = why_unscored(
            found.scored, lambda i: f"row {found.rows[i]}" if rows is None else place_of(rows, found.rows[i])
        )
        old = self.options.old_source
        source = Source(old_logprobs=old, recorded=old == "behaviour" or not self.options.sampled_now)
        with self.timer.phase("score"):
            totals = [s.total for s in found.scored]
            ready = self.prepare(
                found.trajectories,
                totals,
                source,
                self._coefficients(),
                self._algorithm,
                baselines=found.baselines,
                extras=[s.extras for s in found.scored],
            )
        rollout = Rollout(
            **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
            step=step,
            joined=ready.joined,
            batch=ready.batch,
            kl=ready.kl,
            kl_coef=self.kl.coef,
            algorithm=ready.algorithm,
        )
        if self.replay is not None:
            with self.timer.phase("replay"):
                rollout = self.replay.mix(rollout, version=self.engine.version)
        self._meter = Meter()
        measure_rollout(self._meter, rollout, rule=self.rule)
        if self.options.ahead:
            ages = [float(self.engine.version - t.policy_version) for t in found.trajectories]
            self._meter.mean("async/staleness", torch.tensor(ages))
        if found.drawn is not None:
            measure_resampled(self._meter, found.drawn)
        for watch in self.watches:
            watch.rolled_out(rollout)
        return rollout

    def _prepare_replayed(self, trajectories: Sequence[Trajectory], totals: Sequence[float | None]) -> Batch:
        o = self.options.replay
        needed = o.decoupled or o.weights != "none" or o.mode == "observe"
        source = Source(old_logprobs="recompute" if needed else "behaviour", fresh=False, recorded=True)
        return self.prepare(trajectories, totals, source, self._coefficients(), self._algorithm).batch

    def _coefficients(self) -> Coefficients:
        return Coefficients(
            kl_coef=self.kl.coef,
            entropy_coef=self.entropy.coef,
            baseline=self.baseline.value,
            max_new_tokens=self.options.sampling.max_new_tokens,
            all_sum=self.updater.all_sum,
        )

    def _algorithm(self, coefficients: Coefficients) -> Algorithm:
        made, high = algorithm_of(self.options.algorithm, coefficients), self.options.lessons.clip_high
        if high is not None:
            wider = algorithm_of(dataclasses.replace(self.options.algorithm, clip_high=high), coefficients)
            made = dataclasses.replace(made, loss=boosted(made.loss, wider.loss))
        return Algorithm(advantage=self._own_advantage or made.advantage, loss=self._own_loss or made.loss)

    # -- updating ------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> list[MiniStep]:
        """Several passes over the rollout, each in several optimiser steps; then the engine gets the weights."""
        o, batch = self.options.algorithm, rollout.training
        set_lr(self.updater.optimizer, lr_factor(rollout.step, steps=self.options.steps, options=self.options.optim))
        getattr(self.engine, "release", lambda: None)()
        steps: list[MiniStep] = []
        numbers = self._row_numbers(rollout)
        planned = [
            (epoch, i, rows)
            for epoch in range(o.epochs)
            for i, rows in enumerate(self._minibatches(numbers, rollout.step, epoch))
        ]
        for epoch, i, rows in self.timer.parts(planned):
            part = batch if o.minibatches == 1 else batch.rows(rows)
            result = self.updater.step(
                part,
                rollout.algorithm.loss,
                temperature=self.sampling.scoring_temperature,
                record=True,
                against=self.prepare.against if o.kl_in == "loss" else None,
                place=(rollout.step, len(steps)),
            )
            steps.append(MiniStep(epoch=epoch, minibatch=i, rows=rows, batch=part, result=result))
            if result.skipped:
                sampled = [rollout.trained_trajectories[j] for j in rows.tolist()]
                names = [f"group {t.group} episode {t.episode}" for t in sampled]
                self.updater.log_skipped(rollout.step + 1, result, names)
        with self.timer.phase("sync"):
            self.engine.load(engine_weights(self.policy), self.engine.version + 1)
        self._measure(rollout, steps)
        self._move_coefficients(rollout)
        if self.replay is not None:
            self.replay.remember(rollout)
        for watch in self.watches:
            watch.updated(rollout, steps)
            self._metrics |= getattr(watch, "metrics", dict)()
        return steps

    def _row_numbers(self, rollout: Rollout) -> list[int]:
        """Of each row: the number of its episode, or of the row among those of all ranks, which is its own in one process."""
        batch = rollout.training
        if bool(self.ranks.all_max(torch.tensor(float(batch.episodes is not None)))):  # on this rank or on another
            named = Joined(rollout.trained_trajectories).names if batch.episodes is None else batch.episodes
            return named.tolist()
        if self.ranks.count == 1:
            return list(range(len(batch)))
        # One process has the fresh groups in the order of their numbers, then the replayed ones, -1, -2, …, which every
        # rank counts for itself. A group is on one rank.
        number, count = self.ranks.number, self.ranks.count
        replayed = [False] * len(batch) if batch.replayed is None else batch.replayed.tolist()
        groups = [
            (-1 - group) * count + number if again else group
            for group, again in zip(batch.groups.tolist(), replayed, strict=True)
        ]
        keys = list(zip(replayed, groups, range(len(batch)), strict=True))
        place = {key: i for i, key in enumerate(sorted(self.ranks.gather(keys)))}
        return [place[key] for key in keys]

    def _minibatches(self, numbers: Sequence[int], step: int, epoch: int) -> Sequence[Tensor]:
        """This rank's rows of each optimiser step, which is that of one process; the samples of an episode stay together."""
        o = self.options.algorithm
        if o.minibatches == 1:
            return [torch.arange(len(numbers))]
        everywhere = sorted(set(self.ranks.gather(list(numbers))))
        rng = np.random.default_rng([self.options.seed, step, epoch])
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            rows.setdefault(number, []).append(row)
        parts = np.array_split(rng.permutation(len(everywhere)), o.minibatches)
        chosen = [[row for i in part.tolist() for row in rows.get(everywhere[i], ())] for part in parts]
        return [torch.tensor(part, dtype=torch.long) for part in chosen]

    def _move_coefficients(self, rollout: Rollout) -> None:
        """The KL controller and the moving baseline after this rollout, and the reference if its time has come."""
        o, batch = self.options.algorithm, rollout.sequences
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
        if "entropy" in self._metrics:
            self.entropy = self.entropy.update(self._metrics["entropy"])
        if o.reference_every is not None and self.reference is not None and (rollout.step + 1) % o.reference_every == 0:
            self.reference.refresh()

    def _measure(self, rollout: Rollout, steps: Sequence[MiniStep]) -> None:
        o = self.options.algorithm
        alike = self.options.old_source != "recompute" and not self.options.policy.lora_dropout
        measure_update(self._meter, steps, o, engine_alike=alike, guided_high=self.options.lessons.clip_high)
        if rollout.replay is not None:
            measure_replay(self._meter, rollout, steps, self.options.replay)
        made = [s.result for s in steps if s.result.terms]  # an optimiser step in which nothing trained has no terms
        self._terms = tuple(made[0].terms) if made else ()
        found = finish_replay(self._meter.result(self.updater.all_sum, self.updater.all_max))
        for name in self._terms:
            found[f"loss/{name}"] = sum(result.terms[name] for result in made) / len(made)
        count = max(1, len(made))
        found["loss"] = found["loss/total"] = sum(result.loss for result in made) / count
        found["grad_norm"] = found["loss/grad_norm"] = sum(result.grad_norm for result in made) / count
        found["skipped"] = float(sum(s.result.skipped for s in steps))
        found["learning_rate"] = float(self.updater.optimizer.param_groups[0]["lr"])
        found["kl_coef"], found["entropy_coef"] = self.kl.coef, self.entropy.coef
        found["policy_version"] = float(self.engine.version)
        found["optimizer_steps"] = float(sum(not result.skipped for result in made))
        told: dict[str, float] = getattr(self.collector, "take_metrics", dict)()
        if not self.options.ahead:  # else the reward may have scored later steps already, and the collector tells
            told = self._told(len(rollout.sequences)) | told
        told |= getattr(self.engine, "metrics", dict)()
        self._metrics = told | finish(found)

    def _told(self, answers: int) -> dict[str, float]:
        """What rewards have logged and counted on all ranks: failures are added up, other numbers are means over answers."""
        own: dict[str, float] = getattr(self.reward, "take_metrics", dict)()
        if self.ranks.count == 1:
            return own
        told = self.ranks.gather([(answers, own)])
        found = {}
        for name in dict.fromkeys(name for _, one in told for name in one):
            known = [(count, one[name]) for count, one in told if name in one]
            whole = 1 if name.startswith("rewards/") and name.endswith("/failed") else sum(count for count, _ in known)
            found[name] = sum(value * (count if whole > 1 else 1) for count, value in known) / whole
        return found

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def explain(self) -> str:
        return in_words(self._metrics, self._terms)

    def mark(self) -> Callable[[], None]:
        """This moment, to come back to: `collect` moves the position in the data, the KL coefficient and the buffer."""
        position, kl = self.collector.state_dict(), self.kl
        undo = None if self.replay is None else self.replay.mark()

        def back() -> None:
            self.collector.load_state_dict(position)
            self.kl = kl
            if undo is not None:
                undo()

        return back

    @property
    def refreshed(self) -> dict[str, Tensor] | None:
        """The reference's weights, if it does not stay what it was at the start."""
        if self.reference is None or self.options.algorithm.reference_every is None:
            return None
        return self.reference.weights

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that continues exactly, beside the policy's weights and optimiser."""
        return {
            "collector": self.collector.state_dict(),
            "kl_coef": self.kl.coef,
            "entropy_coef": self.entropy.coef,
            "baseline": dataclasses.asdict(self.baseline),
            "policy_version": self.engine.version,
            "reference": self.refreshed,
            "replay": None if self.replay is None else self.replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; the policy's weights must be loaded already."""
        self.collector.load_state_dict(state["collector"])
        if isinstance(self.kl, AdaptiveKL):  # a fixed coefficient is a setting, which may have been changed
            self.kl = dataclasses.replace(self.kl, coef=state["kl_coef"])
        if isinstance(self.entropy, EntropyTarget):
            held = min(state["entropy_coef"], self.entropy.limit)  # the limit may have been changed
            self.entropy = dataclasses.replace(self.entropy, coef=held)
        self.baseline = EMABaseline(**state["baseline"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.load(state["reference"])
        if self.replay is not None:
            self.replay.load_state_dict(state.get("replay"))
        self.engine.load(engine_weights(self.policy), state["policy_version"])


def engine_weights(policy: LoadedModel) -> dict[str, Tensor]:
    """The weights an engine samples from, by their Hugging Face names; an adapter is merged into a copy."""
    if in_parts(policy.model):
        return merged_weights(policy)
    plain = merged(policy) if has_adapter(policy) else policy
    return {name: parameter.detach() for name, parameter in plain.model.named_parameters()}
