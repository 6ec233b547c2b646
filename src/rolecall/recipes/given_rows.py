"""Learning from rows that are given (SFT, reward models, DPO): their order, the learning rate, the numbers of a step."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rolecall.policy.packing import micro_batches
from rolecall.train.data import order_of
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.step import Updater
from rolecall.transfer import to_host


class RowsLearner:
    """What these learners share of `train.learner.Learner`: one optimiser step per batch of rows, listed or streamed."""

    unit: ClassVar[str] = "rows"
    line: ClassVar[str]
    """The last step in words, to be filled in with its numbers."""

    def __init__(self, options: Any, *, updater: Updater, rows: Any) -> None:
        ranks = updater.accelerator.num_processes
        if options.batch < ranks:
            raise ValueError(
                f"{options.batch} {self.unit} per step cannot be shared by {ranks} processes; raise batch or use fewer "
                "processes"
            )
        self.options, self.updater, self.rows = options, updater, rows
        self.order = order_of(rows, seed=options.seed)
        self._metrics: dict[str, float] = {}
        self._step = 0

    def take(self, step: int) -> list[Any]:
        """This rank's part of the next rows, at the step's learning rate."""
        self._step = step + 1
        chosen = self.updater.ranks.share(self.order.take(self.options.batch))
        set_lr(self.updater.optimizer, lr_factor(step, steps=self.options.steps, options=self.options.optim))
        return [self.rows[i] for i in chosen]

    def measured(self, meter: Meter, *, loss: float, grad_norm: float, skipped: bool) -> None:
        """The step's numbers, over all ranks."""
        self._metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(self.updater.optimizer.param_groups[0]["lr"]),
            "skipped": float(skipped),
            **meter.result(self.updater.all_sum),
        }

    def descend(self, sizes: Tensor, read: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Any]]:
        """One optimiser step on the mean loss over all pairs of all ranks, unless the gradient is not finite.

        `read(rows)` gives both sides of these pairs, [2, pairs] with gradient, and their losses, [pairs]; without rows,
        anything that reaches every parameter. `sizes` are the tokens of each pair. Returns both sides of all pairs and
        the step's loss, gradient norm and whether it was skipped.
        """
        updater, pairs = self.updater, len(sizes)
        everywhere = float(updater.all_sum(torch.tensor(float(pairs))))
        sides = torch.zeros(2, pairs, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)

        def backward(rows: Tensor) -> None:
            nonlocal loss
            found, losses = read(rows)
            # Without rows other ranks have more micro-batches: this one still reaches every parameter, with gradient 0.
            total = losses.sum() / everywhere if len(rows) else 0.0 * found.sum()
            both, one = to_host([found.detach().double(), total.detach().double()])
            if len(rows):
                sides[:, rows] = both
            loss = loss + one
            # DDP averages gradients over ranks; the denominator already counts them all.
            updater.accelerator.backward(total * updater.accelerator.num_processes)

        parts = micro_batches(sizes, token_budget=updater.token_budget)
        grad_norm, finite = updater.descend(parts, backward, place=(self._step, 0))
        return sides, {"loss": float(updater.all_sum(loss)), "grad_norm": grad_norm, "skipped": not finite}

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def explain(self) -> str:
        return self.line.format_map(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(state["order"])
