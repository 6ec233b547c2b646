"""Direct preference optimisation: of two answers to a prompt, raise the better one against the reference.

    loss = mean over pairs of  - log sigmoid(beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)))

Rafailov et al. 2023, arXiv 2305.18290. An answer's log-prob is the sum over its content and stop token. The mean is over
all pairs of the step, however they are cut into micro-batches and spread over ranks. The reference is the policy as it
was at the start (with an adapter: the model below it), asked anew in every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolecall.config.training import DPOOptions
from rolecall.experience.batches import collate, lengths_of
from rolecall.maths.losses import dpo
from rolecall.maths.roles import TrainRule
from rolecall.policy.packing import micro_batches
from rolecall.train.data import order_of
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.reference import Reference
from rolecall.train.score import score
from rolecall.train.step import Updater
from rolecall.types import Batch, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, as trajectories."""

    chosen: Trajectory
    """The better one."""
    rejected: Trajectory
    """The worse one."""


class DPOLearner:
    """The preference side of `train.loop.Learner`."""

    def __init__(self, options: DPOOptions, *, updater: Updater, reference: Reference, pairs: Any) -> None:
        if options.batch < updater.accelerator.num_processes:
            raise ValueError(
                f"{options.batch} pairs per step cannot be shared by {updater.accelerator.num_processes} processes; "
                "raise batch or use fewer processes"
            )
        self.options, self.updater, self.reference, self.pairs = options, updater, reference, pairs
        self.rule = TrainRule(stop=options.train_stop)
        self.order = order_of(pairs, seed=options.seed)
        self._metrics: dict[str, float] = {}

    def collect(self, step: int) -> Batch:
        """This rank's part of the next pairs, rows chosen, rejected, chosen, …, with the reference's log-probs."""
        accelerator = self.updater.accelerator
        chosen = self.order.take(self.options.batch)[accelerator.process_index :: accelerator.num_processes]
        set_lr(self.updater.optimizer, lr_factor(step, steps=self.options.steps, options=self.options.optim))
        return self.batch_of([self.pairs[i] for i in chosen])

    def batch_of(self, pairs: Sequence[AnswerPair]) -> Batch:
        """Pairs as a batch of twice as many rows."""
        batch = collate([answer for pair in pairs for answer in (pair.chosen, pair.rejected)])
        batch = replace(batch, verdicts=self.rule.verdicts(batch.roles))
        with self.reference.module() as frozen:
            return replace(batch, ref_logprobs=self._score(frozen, batch))

    def update(self, batch: Batch) -> None:
        """One optimiser step, unless the gradient is not finite."""
        updater, o = self.updater, self.options
        mask, pairs = self.rule.eligible(batch.roles), len(batch) // 2
        reference = _of_pairs(batch.ref_logprobs, mask)
        everywhere = float(updater.all_sum(torch.tensor(float(pairs))))
        found = torch.zeros(2, pairs, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)

        def backward(chosen: Tensor) -> None:
            nonlocal loss
            rows = torch.stack([2 * chosen, 2 * chosen + 1], dim=1).flatten()
            logprobs, counted = self._logprobs(batch, rows, mask)
            if len(chosen):
                policy = _of_pairs(logprobs, counted)
                ref = reference[:, chosen].to(policy)
                per_pair = dpo(policy[0], policy[1], ref[0], ref[1], beta=o.beta, label_smoothing=o.label_smoothing)
                total = per_pair.sum() / everywhere
                found[:, chosen] = policy.detach().double().cpu()
            else:
                # Other ranks have more micro-batches: this one still reaches every parameter, with gradient 0.
                total = 0.0 * logprobs.sum()
            loss = loss + total.detach().double().cpu()
            # DDP averages gradients over ranks; the denominator already counts them all.
            updater.accelerator.backward(total * updater.accelerator.num_processes)

        sizes = 2 * lengths_of(batch).view(-1, 2).amax(dim=1)
        grad_norm, finite = updater.descend(micro_batches(sizes, token_budget=updater.token_budget), backward)
        meter = Meter()
        _measure(meter, found, reference.double(), beta=o.beta)
        meter.total("num_tokens", mask.sum())
        self._metrics = {
            "loss": float(updater.all_sum(loss)),
            "grad_norm": grad_norm,
            "learning_rate": float(updater.optimizer.param_groups[0]["lr"]),
            "skipped": float(not finite),
            **meter.result(updater.all_sum),
        }

    def evaluate(self, pairs: Sequence[AnswerPair]) -> dict[str, float]:
        """The same numbers on other pairs."""
        batch, o = self.batch_of(pairs), self.options
        mask = self.rule.eligible(batch.roles)
        policy = _of_pairs(self._score(self.updater.module, batch), mask).double()
        reference = _of_pairs(batch.ref_logprobs, mask).double()
        meter = Meter()
        meter.mean("loss", dpo(*policy, *reference, beta=o.beta, label_smoothing=o.label_smoothing))
        _measure(meter, policy, reference, beta=o.beta)
        return meter.result()

    def _logprobs(self, batch: Batch, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, where they count) of some rows; of no rows, those of two tokens that do not count."""
        device = self.updater.accelerator.device
        if len(rows):
            part = batch.rows(rows)
            time = max(2, int(lengths_of(part).max()))
            ids, wanted = part.ids[:, :time].to(device), mask[rows, :time].to(device)
        else:
            ids = torch.zeros(1, 2, dtype=torch.long, device=device)
            wanted = torch.zeros_like(ids, dtype=torch.bool)
        return self.updater.module(ids, wanted, temperature=1.0).logprobs, wanted

    def _score(self, module: torch.nn.Module, batch: Batch) -> Tensor:
        return score(
            module,
            batch,
            self.rule.eligible(batch.roles),
            temperature=1.0,
            token_budget=self.updater.token_budget,
            device=self.updater.accelerator.device,
        ).logprobs

    def metrics(self) -> dict[str, float]:
        """The numbers of the last step."""
        return self._metrics

    def explain(self) -> str:
        """The last step in words."""
        m = self._metrics
        return f"loss {m['loss']:.4f}, {m['rewards/accuracies']:.0%} ranked right, margin {m['rewards/margins']:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """The data position. The reference is the model that the run starts from."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])


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
