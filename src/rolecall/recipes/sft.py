"""Supervised fine-tuning: raise the log-probs of demonstrated answers, and of nothing else in the row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rolecall.config.training import SFTOptions
from rolecall.experience.batches import collate
from rolecall.maths import losses
from rolecall.maths.roles import TrainRule
from rolecall.policy.model import Outputs
from rolecall.recipes.given_rows import RowsLearner
from rolecall.train.metrics import Meter
from rolecall.train.score import score
from rolecall.train.step import Term, Updater, trained
from rolecall.types import Batch, Trajectory


def nll(out: Outputs, batch: Batch) -> dict[str, Term]:
    """Mean negative log-prob over all trained tokens of the batch."""
    mask = trained(batch)
    return {"nll": Term(values=losses.nll(out.logprobs, mask), mask=mask, mode="token-mean")}


class SFTLearner(RowsLearner):
    """Imitates demonstrations: rendered rows, listed or streamed."""

    line = "loss {loss:.4f}, gradient {grad_norm:.3g}, {num_tokens:.0f} tokens"

    def __init__(self, options: SFTOptions, *, updater: Updater, demonstrations: Any) -> None:
        super().__init__(options, updater=updater, rows=demonstrations)
        self.rule = TrainRule(stop=options.train_stop)

    def collect(self, step: int) -> Batch:
        batch = collate(self.take(step))
        return dataclasses.replace(batch, verdicts=self.rule.verdicts(batch.roles))

    def update(self, batch: Batch) -> None:
        result = self.updater.step(batch, nll, temperature=1.0, place=(self._step, 0))
        if result.skipped:
            self.updater.log_skipped(self._step, result, [f"row {row}" for row in batch.groups.tolist()])
        meter, mask = Meter(), trained(batch)
        meter.mean("entropy", result.outputs.entropy, mask)
        meter.total("num_tokens", mask.sum())
        self.measured(meter, loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped)

    def evaluate(self, demonstrations: Sequence[Trajectory]) -> dict[str, float]:
        """The loss on other demonstrations: the mean over their trained tokens. Ranks share them."""
        updater = self.updater
        own = updater.ranks.share(demonstrations)
        batch = collate(own or demonstrations[:1])  # every rank takes part in the passes
        mask = self.rule.eligible(batch.roles) & bool(own)
        found = score(updater.module, batch, mask, temperature=1.0, token_budget=updater.token_budget)
        meter = Meter()
        meter.mean("loss", losses.nll(found.logprobs, mask), mask)
        return meter.result(updater.all_sum)
