"""Expert iteration: sample answers, keep those that score well, imitate them, and start again with the better policy.

Anthony et al. 2017, arXiv 1705.08439; for language models STaR, ReST and AlpacaFarm's expert iteration. The imitation is
SFT at temperature 1 on the policy's own answers. It is REINFORCE with advantage 1 for what is kept and 0 for the rest:
good answers are raised and bad ones are never lowered. Left out: every round goes on from the last one's weights, not
from the first model, and earlier rounds' answers are not used again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.config.training import ExpertIterationOptions
from rolecall.experience.batches import collate
from rolecall.files import DiskError
from rolecall.maths.roles import TrainRule
from rolecall.policy.load import LoadedModel
from rolecall.recipes.collect import Answered, Asker, run_state, unscored
from rolecall.recipes.experience import nan_for_none
from rolecall.recipes.records import KEPT_EVERY, as_json, write_answers
from rolecall.recipes.rl import engine_weights
from rolecall.recipes.sft import nll
from rolecall.train.data import order_of
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.rundir import RunDir
from rolecall.train.step import StepResult, Updater, trained
from rolecall.types import Batch, Finish, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round's answers and which of them are imitated."""

    step: int
    groups: Sequence[Answered]
    trajectories: Sequence[Trajectory]
    """All answers."""
    kept: Sequence[int]
    """Numbers of those to imitate."""


class ExpertIterationLearner:
    """The sampling and imitating side of `train.loop.Learner`; a step is a round."""

    def __init__(
        self,
        options: ExpertIterationOptions,
        *,
        policy: LoadedModel,
        updater: Updater,
        asker: Asker,
        tokenizer: str,
    ) -> None:
        ranks = updater.accelerator.num_processes
        if min(options.prompts, options.batch) < ranks:
            raise ValueError(f"prompts and batch must be at least the number of processes, {ranks}")
        self.options, self.policy, self.updater, self.asker = options, policy, updater, asker
        self.tokenizer = tokenizer
        self.rule = TrainRule(stop=options.train_stop)
        self.order = order_of(asker.rows, seed=options.seed)
        self.run: RunDir | None = None
        self._metrics: dict[str, float] = {}
        self._meter = Meter()
        self._lost = 0
        self.unscored: str | None = None
        """Why no answer of this process has a score in the last round; None if any has."""

    # -- sampling and choosing -----------------------------------------------------------------------------------

    def collect(self, step: int) -> Round:
        """Sample answers to the next prompts and choose which to imitate."""
        o, ranks = self.options, self.updater.ranks
        state = run_state(o, self.order, step, rank=ranks.number)
        rows = dict(zip(ranks.share(range(o.prompts)), ranks.share(self.order.take(o.prompts)), strict=True))
        groups = self.asker.ask(rows, samples=o.samples, seed=o.seed, step=step, state=state)
        trajectories = [
            t for number, g in zip(rows, groups, strict=True) for t in g.trajectories(step * o.prompts + number)
        ]
        kept = [i * o.samples + j for i, group in enumerate(groups) for j in self._chosen(group)]
        self.unscored = unscored(self.asker.rows, groups)
        found = Round(step=step, groups=groups, trajectories=trajectories, kept=kept)
        self._meter = Meter()
        self._measure_round(found)
        self._record(found)
        return found

    def _chosen(self, group: Answered) -> list[int]:
        """Which of a prompt's answers to imitate, best first among equals by number."""
        o = self.options
        good = [
            (scored.total, -i, i)
            for i, (scored, completion) in enumerate(zip(group.scored, group.completions, strict=True))
            if scored.total is not None and scored.total >= o.required_score and completion.finish is not Finish.ABORT
        ]
        if o.keep == "best":
            return [max(good)[2]] if good else []
        seen: set[tuple[int, ...]] = set()
        kept: list[int] = []
        for _, _, i in good:
            if not (o.unique and group.completions[i].ids in seen):
                kept.append(i)
            seen.add(group.completions[i].ids)
        return kept

    # -- imitating -----------------------------------------------------------------------------------------------

    def update(self, found: Round) -> None:
        """Passes over what was kept; then the engine gets the weights."""
        o = self.options
        set_lr(self.updater.optimizer, lr_factor(found.step, steps=o.steps, options=o.optim))
        results: list[StepResult] = []
        everywhere = int(self.updater.all_sum(torch.tensor(float(len(found.kept)))))
        parts = [rows for epoch in range(o.epochs) for rows in self._parts(found, epoch, -(-everywhere // o.batch))]
        for i, rows in self.updater.timer.parts(list(enumerate(parts))):
            batch = self._batch(found, rows)
            results.append(self.updater.step(batch, nll, temperature=1.0, place=(found.step, i)))
            if results[-1].skipped:
                names = [f"group {group}" for group in batch.groups.tolist()]
                self.updater.log_skipped(found.step + 1, results[-1], names)
            self._meter.mean("entropy", results[-1].outputs.entropy, trained(batch))
        self.asker.engine.load(engine_weights(self.policy), self.asker.engine.version + 1)
        count = max(1, len(results))
        self._metrics = {
            **self.asker.reward.take_metrics(),
            **self._meter.result(self.updater.all_sum, self.updater.all_max),
            "loss": sum(r.loss for r in results) / count,
            "grad_norm": sum(r.grad_norm for r in results) / count,
            "learning_rate": float(self.updater.optimizer.param_groups[0]["lr"]),
            "skipped": float(sum(r.skipped for r in results)),
            "optimizer_steps": float(sum(not r.skipped for r in results)),
            "policy_version": float(self.asker.engine.version),
            "records_lost": float(self._lost),
        }

    def _parts(self, found: Round, epoch: int, parts: int) -> Sequence[Tensor]:
        """This rank's kept answers, shuffled, in as many parts as all ranks together need."""
        order = np.random.default_rng([self.options.seed, found.step, epoch]).permutation(len(found.kept))
        kept = torch.tensor(found.kept, dtype=torch.long)[torch.from_numpy(order)]
        return kept.tensor_split(parts) if parts else []

    def _batch(self, found: Round, rows: Tensor) -> Batch:
        """The answers of these numbers. A rank that has none takes part with an answer of which nothing trains.

        They are imitated as text is: over the whole vocabulary, whatever part of it they were drawn from.
        """
        batch = collate([found.trajectories[i] for i in (rows.tolist() or [0])])
        idle = torch.full((len(batch),), not len(rows))
        return replace(batch, verdicts=self.rule.verdicts(batch.roles, bad_record=idle), supports=None)

    # -- what is known about it ----------------------------------------------------------------------------------

    def _measure_round(self, found: Round) -> None:
        meter, kept = self._meter, set(found.kept)
        scored = [s for group in found.groups for s in group.scored]
        scores = nan_for_none([s.total for s in scored])
        lengths = torch.tensor([float(len(c.ids)) for group in found.groups for c in group.completions])
        meter.mean("reward", scores, ~scores.isnan())
        for name in found.groups[0].scored[0].scores:
            part = nan_for_none([s.scores.get(name) for s in scored])
            meter.mean(f"rewards/{name}/mean", part, ~part.isnan())
        meter.mean("rewards/failed", scores.isnan().float())
        meter.total("kept/answers", float(len(kept)))
        meter.mean("kept/share", torch.tensor([float(i in kept) for i in range(len(scored))]))
        samples = self.options.samples
        answered = [any(i * samples + j in kept for j in range(samples)) for i in range(len(found.groups))]
        meter.mean("kept/prompts", torch.tensor(answered).float())
        meter.mean("kept/reward", scores, torch.tensor([i in kept for i in range(len(scored))]))
        meter.mean("completions/mean_length", lengths)
        cut = [float(t.finish.truncated) for t in found.trajectories]
        meter.mean("completions/clipped_ratio", torch.tensor(cut))
        meter.total("num_tokens", float(sum(len(t.ids) for t in found.trajectories)))

    def _record(self, found: Round) -> None:
        """Every answer of the round, with `kept` among its extras; the newest rounds stay."""
        o = self.options
        if self.run is None or not o.save.rollouts:
            return
        kept, scored = set(found.kept), [s for group in found.groups for s in group.scored]
        extras = [{**as_json(s.extras), "kept": number in kept} for number, s in enumerate(scored)]
        path = self.run.rollouts / f"step-{found.step + 1:06d}.parquet"
        facts = {"step": found.step + 1, "model": self.asker.engine.hash(), "tokenizer": self.tokenizer}
        try:
            write_answers(path, found.groups, found.trajectories, extras, sampling=o.sampling, **facts)
        except DiskError:
            self._lost += 1
            return
        self.run.thin(self.run.rollouts, last=o.save.rollouts, every=KEPT_EVERY)

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def explain(self) -> str:
        m = self._metrics
        reward = f"reward {m['reward']:.3f}" if "reward" in m else "no reward succeeded"
        if not m["kept/answers"]:
            return f"{reward}, none kept\nno answer was good enough to imitate: the policy stays as it is"
        return f"{reward}, kept {m['kept/answers']:.0f} ({m['kept/share']:.0%}), loss {m['loss']:.4f}"

    def state_dict(self) -> dict[str, Any]:
        """The data position and the policy's version."""
        return {"order": self.order.state_dict(), "policy_version": self.asker.engine.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the policy's weights must be loaded already."""
        self.order.load_state_dict(state["order"])
        self.asker.engine.load(engine_weights(self.policy), state["policy_version"])
