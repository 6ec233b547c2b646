"""Scoring without gradient: old, reference and current log-probs, entropies and values of a batch."""

import torch
from torch import Tensor, nn

from rolecall.experience.batches import lengths_of, micro_batches
from rolecall.policy.model import Outputs, shares_prefixes
from rolecall.train.timing import Timer
from rolecall.types import Batch


@torch.no_grad()
def score(
    module: nn.Module,
    batch: Batch,
    wanted: Tensor,
    *,
    temperature: float,
    token_budget: int,
    device: torch.device | str = "cpu",
    timer: Timer | None = None,
) -> Outputs:
    """What a `PolicyModel` says about the wanted positions, [batch, time]; 0 elsewhere."""
    shape = batch.ids.shape
    logprobs, entropy, values = (torch.zeros(shape) for _ in range(3))
    found_values = False
    plain = getattr(module, "module", module)  # inside DDP
    groups = batch.groups if shares_prefixes(plain) else None
    parts = micro_batches(lengths_of(batch), token_budget=token_budget, groups=groups)
    for done, rows in enumerate(parts, start=1):
        part = batch.rows(rows)
        time = max(2, int(lengths_of(part).max()))
        part = part.trimmed(time)
        out = module(part.ids.to(device), wanted[rows, :time].to(device), temperature=temperature)
        logprobs[rows, :time], entropy[rows, :time] = out.logprobs.float().cpu(), out.entropy.float().cpu()
        if out.values is not None:
            values[rows, :time], found_values = out.values.float().cpu(), True
        if timer is not None:
            timer.advance(done, len(parts), "micro-batches")
    return Outputs(logprobs, entropy, values if found_values else None)
