"""One rank of steps on a batch that is spread over ranks. Run by torchrun; rank 0 writes what came out into OUT.

A case says how rows go to ranks: `uneven`, `idle` (rank 1 has nothing to train), `empty` (rank 1 has no rows), `spoilt`
(an infinite gradient on rank 1 alone), `late` (a gradient that turns NaN on rank 1 alone, after ranks exchanged them).
"""

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from small_policy import PPO, gradient, loss_of, scripted_batch, small_policy, updater

from rolecall.maths.roles import Verdict
from rolecall.train.step import Term

SHARES = {
    "uneven": ([3], [0, 1, 2, 4, 5, 6]),
    "idle": ([0, 1, 3, 4, 5], [2, 6]),
    "empty": ([0, 1, 2, 3, 4, 5, 6], []),
    "spoilt": ([3], [0, 1, 2, 4, 5, 6]),
    "late": ([3], [0, 1, 2, 4, 5, 6]),
}


def spoil(loss):
    """An infinite gradient wherever an advantage is 7."""

    def spoilt(out, batch):
        terms = dict(loss(out, batch))
        values = terms["policy"].values * torch.where(batch.advantages == 7, torch.inf, 1.0)
        return {**terms, "policy": Term(values=values, mask=terms["policy"].mask, mode="token-mean")}

    return spoilt


def stepped(case: str) -> dict[str, Any]:
    """What one step from fresh weights gives on this rank."""
    module = small_policy(critic="shared")
    step = updater(module, token_budget=14, lr=0.1)
    rank, ranks = step.accelerator.process_index, step.accelerator.num_processes
    batch = scripted_batch()
    if case == "spoilt":
        advantages = batch.advantages.clone()
        advantages[0] = 7.0  # a row of rank 1
        batch = dataclasses.replace(batch, advantages=advantages)
    if ranks > 1:
        batch = batch.rows(torch.tensor(SHARES[case][rank], dtype=torch.long))
    if case == "idle":
        assert rank == 0 or not (batch.verdicts == Verdict.TRAINED).any()
    if case == "late" and rank == 1:
        step._clip = lambda: torch.tensor(torch.nan)
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    loss = loss_of(PPO) if case != "spoilt" else spoil(loss_of(PPO))
    result = step.step(batch, loss, temperature=0.7)
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    moved = step.all_sum(torch.tensor(float(not torch.equal(before, after))))
    losses = step.all_max(torch.tensor([result.loss, -result.loss], dtype=torch.float64))
    return {
        "gradient": gradient(module),
        "terms": dict(result.terms),
        "loss": losses.tolist(),
        "skipped": result.skipped,
        "moved": float(moved),
        "ranks": ranks,
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    found = {case: stepped(case) for case in SHARES}
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        torch.save(found, out)
    gc.collect()  # wrapped models hold the process group, and hang if they outlive it
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
