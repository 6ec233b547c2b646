"""Supervised fine-tuning: raise the log-probs of demonstrated answers, and of nothing else in the row."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.config.training import SFTOptions
from rolecall.experience.batches import collate
from rolecall.maths import losses
from rolecall.maths.roles import TrainRule
from rolecall.policy.model import Outputs
from rolecall.train.data import order_of
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.score import score
from rolecall.train.step import Term, Updater, trained
from rolecall.types import Batch, Trajectory


def nll(out: Outputs, batch: Batch) -> dict[str, Term]:
    """Mean negative log-prob over all trained tokens of the batch."""
    mask = trained(batch)
    return {"nll": Term(values=losses.nll(out.logprobs, mask), mask=mask, mode="token-mean")}


class SFTLearner:
    """The supervised side of `train.loop.Learner`. `demonstrations` are rendered rows, listed or streamed."""

    def __init__(self, options: SFTOptions, *, updater: Updater, demonstrations: Any) -> None:
        if options.batch < updater.accelerator.num_processes:
            raise ValueError(
                f"{options.batch} rows per step cannot be shared by {updater.accelerator.num_processes} processes; "
                "raise batch or use fewer processes"
            )
        self.options, self.updater, self.demonstrations = options, updater, demonstrations
        self.rule = TrainRule(stop=options.train_stop)
        self.order = order_of(demonstrations, seed=options.seed)
        self._metrics: dict[str, float] = {}
        self._step = 0

    def collect(self, step: int) -> Batch:
        """The next rows as a batch."""
        self._step = step + 1
        accelerator = self.updater.accelerator
        chosen = self.order.take(self.options.batch)[accelerator.process_index :: accelerator.num_processes]
        batch = collate([self.demonstrations[i] for i in chosen])
        set_lr(self.updater.optimizer, lr_factor(step, steps=self.options.steps, options=self.options.optim))
        return dataclasses.replace(batch, verdicts=self.rule.verdicts(batch.roles))

    def update(self, batch: Batch) -> None:
        """One optimiser step."""
        result = self.updater.step(batch, nll, temperature=1.0)
        if result.skipped:
            self.updater.say_skipped(self._step, result, [f"row {row}" for row in batch.groups.tolist()])
        meter, mask = Meter(), trained(batch)
        meter.mean("entropy", result.outputs.entropy, mask)
        meter.total("num_tokens", mask.sum())
        self._metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self.updater.optimizer.param_groups[0]["lr"],
            "skipped": float(result.skipped),
            **meter.result(self.updater.all_sum),
        }

    def evaluate(self, demonstrations: Sequence[Trajectory]) -> dict[str, float]:
        """The loss on other demonstrations: the mean over their trained tokens."""
        batch = collate(demonstrations)
        mask, updater = self.rule.eligible(batch.roles), self.updater
        how = {"token_budget": updater.token_budget, "device": updater.accelerator.device}
        found = score(updater.module, batch, mask, temperature=1.0, **how)
        meter = Meter()
        meter.mean("loss", losses.nll(found.logprobs, mask), mask)
        return meter.result()

    def metrics(self) -> dict[str, float]:
        """The numbers of the last step."""
        return self._metrics

    def explain(self) -> str:
        """The last step in words."""
        m = self._metrics
        return f"loss {m['loss']:.4f}, gradient {m['grad_norm']:.3g}, {m['num_tokens']:.0f} tokens"

    def state_dict(self) -> dict[str, Any]:
        """The data position."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])
