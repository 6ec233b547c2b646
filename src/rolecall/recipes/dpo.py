"""Direct preference optimisation: of two answers to a prompt, raise the better one against the reference.

    loss = mean over pairs of  - log sigmoid(beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)))

Rafailov et al. 2023, arXiv 2305.18290. An answer's log-prob is the sum over its content and stop token. The mean is over
all pairs of the step, however they are cut into micro-batches and spread over ranks. The reference is the policy as it
was at the start (with an adapter: the model below it), asked again in every step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rolecall.config.training import DPOOptions
from rolecall.experience.batches import collate, lengths_of
from rolecall.maths.losses import dpo
from rolecall.maths.roles import TrainRule
from rolecall.recipes.given_rows import RowsLearner
from rolecall.recipes.rendering import Pair
from rolecall.train.metrics import Meter
from rolecall.train.reference import Reference
from rolecall.train.score import score
from rolecall.train.step import Updater
from rolecall.transfer import to_device
from rolecall.types import Batch, Trajectory


class DPOLearner(RowsLearner):
    """Learns from `preferences.Pair`s of trajectories."""

    unit = "pairs"
    line = "loss {loss:.4f}, {rewards/accuracies:.0%} ranked right, margin {rewards/margins:.3g}"

    def __init__(self, options: DPOOptions, *, updater: Updater, reference: Reference, pairs: Any) -> None:
        super().__init__(options, updater=updater, rows=pairs)
        self.reference, self.rule = reference, TrainRule(stop=options.train_stop)

    def collect(self, step: int) -> Batch:
        """This rank's part of the next pairs, rows chosen, rejected, chosen, …, with the reference's log-probs."""
        return self.batch_of(self.take(step))

    def batch_of(self, pairs: Sequence[Pair[Trajectory]]) -> Batch:
        """Pairs as a batch of twice as many rows."""
        batch = collate([answer for pair in pairs for answer in (pair.chosen, pair.rejected)])
        batch = replace(batch, verdicts=self.rule.verdicts(batch.roles))
        with self.reference.module() as frozen:
            return replace(batch, ref_logprobs=self._score(frozen, batch))

    def update(self, batch: Batch) -> None:
        o, mask = self.options, self.rule.eligible(batch.roles)
        reference = _of_pairs(batch.ref_logprobs, mask)

        def read(pairs: Tensor) -> tuple[Tensor, Tensor]:
            rows = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten()
            policy = _of_pairs(*self._logprobs(batch, rows, mask))
            ref = to_device(reference[:, pairs], policy.device).to(policy)
            return policy, dpo(*policy, *ref, beta=o.beta, label_smoothing=o.label_smoothing) if len(pairs) else ref

        found, step = self.descend(2 * lengths_of(batch).view(-1, 2).amax(dim=1), read)
        meter = Meter()
        _measure(meter, found, reference.double(), beta=o.beta)
        meter.total("num_tokens", mask.sum())
        self.measured(meter, **step)

    def evaluate(self, pairs: Sequence[Pair[Trajectory]]) -> dict[str, float]:
        """The same numbers on other pairs, which ranks share."""
        own = self.updater.ranks.share(pairs)
        batch, o = self.batch_of(own or pairs[:1]), self.options  # every rank takes part in the passes
        mask = self.rule.eligible(batch.roles)
        policy = _of_pairs(self._score(self.updater.module, batch), mask)[:, : len(own)].double()
        reference = _of_pairs(batch.ref_logprobs, mask)[:, : len(own)].double()
        meter = Meter()
        meter.mean("loss", dpo(*policy, *reference, beta=o.beta, label_smoothing=o.label_smoothing))
        _measure(meter, policy, reference, beta=o.beta)
        return meter.result(self.updater.all_sum)

    def _logprobs(self, batch: Batch, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, where they count) of some rows; of no rows, those of two pairs of tokens that do not count."""
        if len(rows):
            part = batch.rows(rows)
            time = max(2, int(lengths_of(part).max()))
            ids, wanted = part.ids[:, :time], mask[rows, :time]
        else:
            ids = torch.zeros(2, 2, dtype=torch.long)
            wanted = torch.zeros_like(ids, dtype=torch.bool)
        logprobs = self.updater.module(ids, wanted, temperature=1.0).logprobs
        return logprobs, to_device(wanted, logprobs.device)

    def _score(self, module: torch.nn.Module, batch: Batch) -> Tensor:
        return score(
            module,
            batch,
            self.rule.eligible(batch.roles),
            temperature=1.0,
            token_budget=self.updater.token_budget,
        ).logprobs


def _of_pairs(logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """[2, pairs]: the summed log-probs of the chosen and the rejected answers."""
    assert logprobs is not None
    return torch.where(mask, logprobs, 0).sum(dim=1).view(-1, 2).T


def _measure(meter: Meter, policy: Tensor, reference: Tensor, *, beta: float) -> None:
    rewards = beta * (policy - reference)
    margins = rewards[0] - rewards[1]
    meter.mean("rewards/chosen", rewards[0])
    meter.mean("rewards/rejected", rewards[1])
    meter.mean("rewards/margins", margins)
    meter.mean("rewards/accuracies", (margins > 0).double() + 0.5 * (margins == 0).double())
    meter.mean("logps/chosen", policy[0])
    meter.mean("logps/rejected", policy[1])
