"""Tripwires on a run: checks what must hold at every step, and ends the run with a `Tripwire` where it does not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.experience.batches import lengths_of
from rolecall.maths.roles import TrainRule
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import has_adapter
from rolecall.policy.model import Outputs
from rolecall.recipes.experience import MiniStep, Rollout
from rolecall.recipes.rl import engine_weights
from rolecall.rollout.engine import Engine, weights_hash
from rolecall.train import tripwires
from rolecall.train.score import score
from rolecall.train.step import Updater, denominator, trained
from rolecall.train.tripwires import Finding, Tripwire
from rolecall.types import Batch

_SAMPLED = 4096
"""Weights of each parameter that are looked at to tell how many changes were rounded away."""


class Guard:
    """The watch that checks. All ranks of a job have one."""

    def __init__(
        self,
        options: RLOptions,
        *,
        policy: LoadedModel,
        updater: Updater,
        engine: Engine,
        engine_dtype: torch.dtype,
        probe_every: int = 50,
    ) -> None:
        """The gradient probe and, with an adapter, the comparison of merged weights run at step 1 and every
        `probe_every` steps, and so does that of engine and trainer where the update drops inputs and does not show it;
        everything else at every step."""
        self.options, self.policy, self.updater, self.engine = options, policy, updater, engine
        self.engine_dtype, self.probe_every = engine_dtype, probe_every
        self.rule = TrainRule(stop=options.algorithm.train_stop)
        mixed = updater.accelerator.mixed_precision == "bf16"
        self.dtype = torch.bfloat16 if mixed else policy.model.dtype
        self._hash: str | None = None
        self._before: list[Tensor] = []
        self._version = 0
        self._metrics: dict[str, float] = {}

    def rolled_out(self, rollout: Rollout) -> None:
        """Check the rewards, and remember the weights that the update starts from."""
        o, joined, batch = self.options.algorithm, rollout.joined, rollout.sequences
        assert batch.rewards is not None
        assert batch.scores is not None
        found = tripwires.reward_sum(
            batch.rewards,
            batch.scores,
            joined.join(rollout.kl) if rollout.kl is not None and o.kl_in == "reward" else None,
            self.rule.eligible(batch.roles),
            kl_coef=rollout.kl_coef,
        )
        self._trip(found, rollout, rows=torch.tensor([rows[0] for rows in joined.rows]))
        self._hash = self._hash or self._trainer_hash()
        self._before = self._bf16_sample()
        self._version = self.engine.version
        if self.options.policy.lora_dropout and rollout.step % self.probe_every == 0:
            self._check_policy(rollout, rollout.batch, self._without_dropout(rollout.batch))

    def updated(self, rollout: Rollout, steps: Sequence[MiniStep]) -> None:
        """Check what the optimiser steps did, and that the engine has it."""
        taken = [mini for mini in steps if mini.result.terms and not mini.result.skipped]
        probe = (
            rollout.step % self.probe_every == 0
        )  # of the step, so that a resumed run probes where the whole one does
        for mini in taken:
            self._check_contributions(rollout, mini)
        if taken and taken[0] is steps[0]:
            self._check_start(rollout, steps[0])
            self._check_counts(rollout, steps[0])
            if probe:
                self._check_gradient(rollout, steps[0])
        self._check_weights(rollout, taken, probe=probe)

    def metrics(self) -> dict[str, float]:
        """`weights_moved`, `engine_in_sync` where it was looked at, and `rounded_away` for bfloat16 weights."""
        return self._metrics

    def _check_start(self, rollout: Rollout, first: MiniStep) -> None:
        """The first optimiser step of a rollout sees the policy that sampled it, unless it drops some of its inputs."""
        if not self.options.policy.lora_dropout:
            self._check_policy(rollout, first.batch, first.result.outputs.logprobs, first)

    def _check_policy(self, rollout: Rollout, batch: Batch, logprobs: Tensor, first: MiniStep | None = None) -> None:
        """The log-probs are those of the policy that sampled the batch, the rollout's or a mini-step's."""
        mask, bound = trained(batch), tripwires.ratio_bound(self.dtype)
        if batch.policy_versions is not None:
            mask = mask & (batch.policy_versions == self._version)[:, None]
        for elsewhere in (batch.replayed, batch.guided):
            if elsewhere is not None:
                mask = mask & ~elsewhere[:, None]
        if batch.behaviour_logprobs is not None and self.options.sampled_now:
            band = tripwires.engine_band(self.dtype, self.engine_dtype)
            self._trip(tripwires.engine_mismatch(logprobs, batch.behaviour_logprobs, mask, band=band), rollout, first)
        if batch.old_logprobs is not None and self.options.old_source == "recompute":
            self._trip(tripwires.first_ratio(logprobs, batch.old_logprobs, mask, bound=bound), rollout, first)
        if batch.ref_logprobs is not None and self._version == 0:
            self._trip(tripwires.kl_at_start(logprobs, batch.ref_logprobs, mask, bound=bound), rollout, first)

    def _without_dropout(self, batch: Batch) -> Tensor:
        updater = self.updater
        with updater.autocast():
            return score(
                updater.module,
                batch,
                trained(batch),
                temperature=self.options.sampling.scoring_temperature,
                token_budget=updater.token_budget,
            ).logprobs

    def _check_counts(self, rollout: Rollout, mini: MiniStep) -> None:
        with torch.no_grad():
            terms = rollout.algorithm.loss(mini.result.outputs, mini.batch)
        local = torch.stack([denominator(term, mini.batch) for term in terms.values()])
        counts = dict(zip(terms, self.updater.all_sum(local), strict=True))
        self._trip(tripwires.denominators(terms, counts, mini.result.contributions, mini.batch.episodes), rollout, mini)

    def _check_gradient(self, rollout: Rollout, mini: MiniStep) -> None:
        """On the shortest row in which something trains."""
        rows = trained(mini.batch).any(dim=1).nonzero().flatten()
        if len(rows):
            row = rows[lengths_of(mini.batch)[rows].argmin()][None]
            picked = {name: x[row] for name, x in mini.result.outputs._asdict().items() if x is not None}
            outputs = Outputs(**({"values": None} | picked))
            found = tripwires.untrained_gradient(rollout.algorithm.loss, outputs, mini.batch.rows(row))
            self._trip(found, rollout, mini, row)

    def _check_contributions(self, rollout: Rollout, mini: MiniStep) -> None:
        result = mini.result
        self._trip(tripwires.contributions(result.contributions, trained(mini.batch)), rollout, mini)
        parts = torch.stack(list(result.contributions.values()))
        summed, size = self.updater.all_sum(torch.stack([parts.sum(), parts.abs().sum()])).tolist()
        self._trip(tripwires.loss_sum(summed, result.loss, size=size), rollout)

    def _check_weights(self, rollout: Rollout, taken: Sequence[MiniStep], *, probe: bool) -> None:
        before, self._hash = self._hash, self._trainer_hash()
        moved = before != self._hash
        paid = any(group["lr"] > 0 for group in self.updater.optimizer.param_groups)
        found = tripwires.weights_moved(
            moved=moved,
            could=paid and bool(taken),
            should=paid and any(mini.result.grad_norm > 0 for mini in taken),
            exact=self.dtype is torch.float32,
        )
        self._metrics = {"weights_moved": float(moved), **self._rounded_away()}
        self._trip(found, rollout)
        if has_adapter(self.policy) and not probe:  # merging costs a copy of the model
            return
        found = tripwires.engine_sync(
            engine=self.engine.hash(),
            trainer=weights_hash(engine_weights(self.policy), self.engine_dtype),
            version=self.engine.version,
            expected=self._version + 1,
        )
        self._metrics["engine_in_sync"] = float(found is None)
        self._trip(found, rollout)

    def _trainer_hash(self) -> str:
        """Of all that trains, critic and adapter included, in its own precision."""
        training = {name: p for name, p in self.updater.module.named_parameters() if p.requires_grad}
        by_dtype = {p.dtype: {n: q for n, q in training.items() if q.dtype is p.dtype} for p in training.values()}
        return "".join(weights_hash(part, dtype) for dtype, part in by_dtype.items())

    def _bf16_sample(self) -> list[Tensor]:
        """A copy of evenly spaced weights of every bfloat16 parameter that trains."""
        return [_spaced(p.detach()).clone() for p in self._bf16_parameters()]

    def _bf16_parameters(self) -> list[torch.nn.Parameter]:
        held = [p for group in self.updater.optimizer.param_groups for p in group["params"]]
        return [p for p in held if p.dtype is torch.bfloat16]

    def _rounded_away(self) -> dict[str, float]:
        """The share of sampled bfloat16 weights with an update that are, bit for bit, where they were before it."""
        still = total = 0
        for parameter, before in zip(self._bf16_parameters(), self._before, strict=True):
            momentum = self.updater.optimizer.state[parameter].get("exp_avg")
            if momentum is not None:
                pushed = _spaced(momentum) != 0
                still += int((pushed & (_spaced(parameter.detach()) == before)).sum())
                total += int(pushed.sum())
        return {"rounded_away": still / total} if total else {}

    def _trip(
        self, found: Finding | None, rollout: Rollout, mini: MiniStep | None = None, rows: Tensor | None = None
    ) -> None:
        """Raise if something was found in the rollout's batch, or in a mini-step's, or in some rows of that."""
        if found is None:
            return
        index = torch.tensor(list(found.rows), dtype=torch.long)
        index = index if rows is None else rows[index]
        index = index if mini is None else mini.rows[index]
        worst = [rollout.trained_trajectories[i] for i in index.tolist()]
        raise Tripwire(found, step=rollout.step + 1, samples=[(t.group, t.episode) for t in worst])


def _spaced(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)]
