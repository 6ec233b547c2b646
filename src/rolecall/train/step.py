"""One optimiser step on a batch, blind to the algorithm.

A loss is a function of the policy's outputs and the batch that gives named terms, each with its own mask and way of
counting. The step counts every term's denominator over all micro-batches and all ranks before the first forward, so that

    total = sum over terms of  coef x sum over positions of (weight x value)

does not depend on how the batch was cut into micro-batches or spread over ranks.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from rolecall.experience.batches import lengths_of, micro_batches
from rolecall.maths.reduce import denominator_of, sequence_lengths
from rolecall.maths.roles import Verdict
from rolecall.policy.dropout import dropping
from rolecall.policy.model import Against, Outputs, PolicyModel, filler, shares_prefixes
from rolecall.policy.sharded import is_sharded, whole
from rolecall.train.ranks import Ranks
from rolecall.train.state import first_non_finite
from rolecall.train.terms import Loss as Loss
from rolecall.train.terms import Tally
from rolecall.train.terms import Term as Term
from rolecall.train.timing import Timer
from rolecall.types import Batch

_NAMED = 8
"""Samples that a line of the log names."""
_log = logging.getLogger("rolecall")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimiser step did."""

    terms: Mapping[str, float]
    """Each term over all ranks, before its coefficient."""
    loss: float
    """The total."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    skipped: bool
    """True if loss or gradient was not finite: the weights are untouched."""
    outputs: Outputs
    """What the policy said about this rank's rows while the step was computed, [batch, time]."""
    bad_rows: Sequence[int] = ()
    """Rows of this rank in which the loss is not finite."""
    contributions: Mapping[str, Tensor] = field(default_factory=dict)
    """[batch, time] float64 per term, coefficient included: they add up to the loss. Only if asked for."""


def trained(batch: Batch) -> Tensor:
    """The positions that train, by their verdict."""
    if batch.verdicts is None:
        raise ValueError("the batch has no verdicts yet; TrainRule.verdicts gives them")
    return batch.verdicts == Verdict.TRAINED


def denominator(term: Term, batch: Batch) -> Tensor:
    """What the term is divided by, as far as this batch goes."""
    return denominator_of(term.mask, mode=term.mode, lengths=sequence_lengths(term.mask, batch.episodes))


class Updater:
    """Turns batches and a loss into optimiser steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        token_budget: int,
        max_grad_norm: float | None,
        timer: Timer | None = None,
    ) -> None:
        """`module` and `optimizer` come from `accelerator.prepare`; a micro-batch holds up to `token_budget` tokens."""
        self.accelerator, self.module, self.optimizer = accelerator, module, optimizer
        self.token_budget, self.max_grad_norm = token_budget, max_grad_norm
        self.timer = timer or Timer()
        self.moves = 0
        """Optimiser steps taken."""
        self.not_finite: str | None = None
        """What was not finite in the last step that was skipped, on this rank; None if it was on another."""

    def step(
        self,
        batch: Batch,
        loss: Loss,
        *,
        temperature: float,
        record: bool = False,
        against: Against | None = None,
        place: tuple[int, int] | None = None,
    ) -> StepResult:
        """Forward and backward over all micro-batches, then one optimiser step if everything is finite.

        With `against` (`Reference.read`) the outputs have the exact KL to the reference. `place` is (step of the run,
        number of the optimiser step in it), which decides what dropout drops.
        """
        module = self.accelerator.unwrap_model(self.module)
        if not int(self._over_ranks(trained(batch).sum(), "sum")):
            _forget(module)
            return self._nothing(batch)
        tally = Tally(batch, *self._denominators(batch, loss), device=self.accelerator.device, record=record)
        total: dict[str, float] = {}

        def backward(rows: Tensor) -> None:
            if len(rows):
                part = batch.rows(rows)
                part = part.trimmed(max(2, int(lengths_of(part).max())))
                ids, wanted, supports = part.ids, trained(part), part.supports
                part = part.to(self.accelerator.device)
            else:
                (ids, wanted), supports = filler(), None

            def row_loss(outputs: Outputs, which: slice) -> Tensor:
                return tally.add(loss(outputs, part.rows(which)), outputs, rows[which])

            how: dict[str, Any] = {"temperature": temperature, "against": against, "supports": supports}
            summed, _ = self.module(ids, wanted, loss=row_loss, **how)
            # DDP averages gradients over ranks; the denominators already count them all.
            self.accelerator.backward(summed * self.accelerator.num_processes)

        def loss_is_finite() -> bool:
            tally.settle()
            sums = self.all_sum(torch.stack(list(tally.terms.values()))).tolist()
            total.update(zip(tally.terms, sums, strict=True))
            return math.isfinite(sum(tally.coefs[name] * term for name, term in total.items()))

        parts = self._micro_batches(batch, groups=shares_prefixes(module))
        grad_norm, finite = self.descend(parts, backward, loss_is_finite, place=place)
        _forget(module)
        return StepResult(
            terms=total,
            loss=sum(tally.coefs[name] * term for name, term in total.items()),
            grad_norm=grad_norm,
            skipped=not finite,
            outputs=tally.outputs(),
            bad_rows=sorted(tally.bad_rows),
            contributions=tally.contributions,
        )

    def say_skipped(self, step: int, result: StepResult, names: Sequence[str]) -> None:
        """Log why a step was skipped, and which samples are to blame; `names` are those of the batch's rows."""
        blamed = ", ".join(names[row] for row in result.bad_rows[:_NAMED])
        more = len(result.bad_rows) - _NAMED
        _log.warning(
            "step %d was skipped: %s is not finite%s%s",
            step,
            self.not_finite or "something on another process",
            f"; the loss is not in {blamed}" if blamed else "",
            f" and {more} more" if more > 0 else "",
        )

    def descend(
        self,
        parts: Sequence[Tensor],
        backward: Callable[[Tensor], None],
        loss_is_finite: Callable[[], bool] = lambda: True,
        *,
        place: tuple[int, int] | None = None,
    ) -> tuple[float, bool]:
        """One optimiser step from the gradients that `backward` adds for the rows of each part.

        It is called with no rows where other ranks have more parts; gradients are exchanged in the last round. Returns
        the gradient's norm before clipping, and whether it and the loss were finite: if not, no step was taken. `place` as
        in `step`.
        """
        rounds = int(self._over_ranks(torch.tensor(float(len(parts))), "max"))
        self.timer.advance(0, rounds, "micro-batches")
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(rounds):
            rows = parts[i] if i < len(parts) else torch.zeros(0, dtype=torch.long)
            # Sharded gradients are exchanged every time: held back, they would lie whole on every rank.
            last = i == rounds - 1 or is_sharded(self.module)
            context = nullcontext() if last else self.accelerator.no_sync(self.module)
            where = None if place is None else (*place, i, self.accelerator.process_index)
            with context, dropping(self.module, where):
                backward(rows)
            self.timer.advance(i + 1, rounds, "micro-batches")
        loss_was_finite = loss_is_finite()
        grad_norm = self._clip()
        bad = not (loss_was_finite and math.isfinite(grad_norm))
        # After the exchange gradients are the same everywhere, but memory can fail on one rank alone.
        if bool(self._over_ranks(torch.tensor(float(bad)), "max")):
            self.not_finite = self._first_bad() if bad else None
            return grad_norm, False
        self.moves += 1
        self.optimizer.step()
        return grad_norm, True

    def _nothing(self, batch: Batch) -> StepResult:
        """No position trains on any rank: no step, so that an optimiser's momentum does not move the weights either."""
        zeros = torch.zeros(batch.ids.shape)
        return StepResult(terms={}, loss=0.0, grad_norm=0.0, skipped=False, outputs=Outputs(zeros, zeros, None))

    def _denominators(self, batch: Batch, loss: Loss) -> tuple[dict[str, Term], dict[str, Tensor]]:
        """The terms, and each one's denominator over all ranks: the loss is asked with outputs of zeros."""
        zeros = torch.zeros(batch.ids.shape, device=batch.ids.device)
        with torch.no_grad():
            terms = dict(loss(Outputs(zeros, zeros, zeros, zeros), batch))
        if not terms:
            raise ValueError("the loss gave no terms; return at least one, such as {'policy': Term(...)}")
        for name, term in terms.items():
            if bool((term.mask & ~trained(batch)).any()):
                raise ValueError(
                    f"loss term {name!r} counts positions whose verdict is not TRAINED, for which the policy computes "
                    "nothing; use `mask & trained(batch)`"
                )
        local = torch.stack([denominator(term, batch) for term in terms.values()])
        return terms, dict(zip(terms, self.all_sum(local), strict=True))

    def _micro_batches(self, batch: Batch, *, groups: bool) -> list[Tensor]:
        """The rows of each micro-batch, as far as they train; with `groups`, those of a group together where they fit."""
        rows = trained(batch).any(dim=1).nonzero().flatten()
        parts = micro_batches(
            lengths_of(batch)[rows], token_budget=self.token_budget, groups=batch.groups[rows] if groups else None
        )
        return [rows[part] for part in parts]

    def _clip(self) -> float:
        """The gradient's norm; a gradient that is not finite is left as it is, to be looked at."""
        given = [p for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
        known = float(whole(norm.detach()))
        if self.max_grad_norm is not None and math.isfinite(known):
            nn.utils.clip_grads_with_norm_(given, self.max_grad_norm, norm)
        return known

    def _first_bad(self) -> str:
        module = self.accelerator.unwrap_model(self.module)
        held = {name: p for name, p in module.named_parameters() if p.requires_grad}
        weight = first_non_finite(held)
        if weight is not None:
            return f"the weight {weight}"
        gradient = first_non_finite({name: p.grad for name, p in held.items() if p.grad is not None})
        return "the loss" if gradient is None else f"the gradient of {gradient}"

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the update, for passes beside it. A sharded module has its own."""
        return nullcontext() if is_sharded(self.module) else self.accelerator.autocast()

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        number, count = self.accelerator.process_index, self.accelerator.num_processes
        return Ranks(number=number, count=count, all_sum=self.all_sum, all_max=self.all_max, gather=self.all_gather)

    def all_sum(self, x: Tensor) -> Tensor:
        """A tensor added up over ranks."""
        return self._over_ranks(x, "sum")

    def all_max(self, x: Tensor) -> Tensor:
        """A tensor's maximum over ranks."""
        return self._over_ranks(x, "max")

    def all_gather(self, items: list[Any]) -> list[Any]:
        """The lists of all ranks, one after the other."""
        return items if self.accelerator.num_processes == 1 else list(gather_object(items))

    def _over_ranks(self, x: Tensor, how: str) -> Tensor:
        if self.accelerator.num_processes == 1:
            return x
        gathered = self.accelerator.gather(x.to(self.accelerator.device)[None])
        assert isinstance(gathered, Tensor)
        return (gathered.sum(0) if how == "sum" else gathered.amax(0)).to(x.device)


def _forget(module: nn.Module) -> None:
    """What was kept of an earlier pass is of no use after a step."""
    if isinstance(module, PolicyModel):
        module.forget()
