"""Scoring without gradient: old, reference and current log-probs, entropies and values of a batch."""

import torch
from torch import Tensor, nn

from rolecall.experience.batches import lengths_of, micro_batches
from rolecall.policy.model import Against, Outputs, filler, shares_prefixes
from rolecall.policy.sharded import rest, rounds
from rolecall.train.timing import Timer
from rolecall.transfer import to_host
from rolecall.types import Batch


@torch.no_grad()
def score(
    module: nn.Module,
    batch: Batch,
    wanted: Tensor,
    *,
    temperature: float,
    token_budget: int,
    timer: Timer | None = None,
    against: Against | None = None,
    keep: bool = False,
) -> Outputs:
    """What a `PolicyModel` says about the wanted positions, [batch, time]; 0 elsewhere. With `against`, the exact KL.

    With `keep`, an update of the same rows that follows at once need not begin with the same forward pass. That takes
    the memory of the update's activations, so it is done only if all rows are one micro-batch.
    """
    found: dict[str, Tensor] = {}
    plain = getattr(module, "module", module)  # inside DDP
    groups = batch.groups if shares_prefixes(plain) else None
    parts = micro_batches(lengths_of(batch), token_budget=token_budget, groups=groups)
    passes = rounds(plain, len(parts))
    for done, rows in enumerate(parts, start=1):
        part = batch.rows(rows)
        time = max(2, int(lengths_of(part).max()))
        part = part.trimmed(time)
        out = module(
            part.ids,
            wanted[rows, :time],
            temperature=temperature,
            against=against,
            keep=keep and len(parts) == 1,
            supports=part.supports,
        )
        _put(found, batch, out, (rows, slice(time)))
        if timer is not None:
            timer.advance(done, len(parts), "micro-batches")
    for _ in range(passes - len(parts)):  # other ranks have more
        _put(found, batch, module(*filler(), temperature=temperature, against=against), None)
    rest(plain)
    return Outputs(found["logprobs"], found["entropy"], found.get("values"), found.get("kl"))


@torch.no_grad()
def assist(module: nn.Module, *, temperature: float) -> None:
    """`score` on a rank that has nothing to score: the passes that other ranks need of it."""
    for _ in range(rounds(module, 0)):
        module(*filler(), temperature=temperature)
    rest(module)


def _put(found: dict[str, Tensor], batch: Batch, out: Outputs, place: tuple[Tensor, slice] | None) -> None:
    wide = torch.float64 if out.logprobs.dtype == torch.float64 else torch.float32  # as the model computes
    given = {name: tensor.to(wide) for name, tensor in zip(Outputs._fields, out, strict=True) if tensor is not None}
    for name, tensor in zip(given, to_host(list(given.values())), strict=True):
        held = found.setdefault(name, torch.zeros(batch.ids.shape, dtype=tensor.dtype))
        if place is not None:
            held[place] = tensor
