"""From trajectories to a rectangle, and what cuts it into micro-batches that fit."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rolecall.maths.roles import Role
from rolecall.policy.packing import micro_batches as micro_batches
from rolecall.types import Batch, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories as one right-padded batch. Log-probs are NaN wherever the policy did not sample."""
    if not trajectories:
        raise ValueError("cannot make a batch of no trajectories")
    lengths = np.array([len(t.ids) for t in trajectories])
    inside = np.arange(lengths.max()) < lengths[:, None]

    def rectangle(rows: Iterable[Sequence[float]], dtype: type, fill: float) -> Tensor:
        held: np.ndarray = np.full(inside.shape, fill, dtype)
        held[inside] = np.fromiter(chain.from_iterable(rows), dtype, count=int(lengths.sum()))
        return torch.from_numpy(held)

    sampled = [t.behaviour_logprobs for t in trajectories]
    unknown = ((torch.nan,) * n if row is None else row for row, n in zip(sampled, lengths.tolist(), strict=True))
    return Batch(
        ids=rectangle((t.ids for t in trajectories), np.int64, 0),
        roles=rectangle((t.roles for t in trajectories), np.uint8, int(Role.PAD)),
        groups=torch.tensor([t.group for t in trajectories]),
        behaviour_logprobs=rectangle(unknown, np.float32, np.nan) if any(row is not None for row in sampled) else None,
        policy_versions=torch.tensor([t.policy_version for t in trajectories]),
    )


def lengths_of(batch: Batch) -> Tensor:
    """Tokens per row, padding left out (by role)."""
    return (batch.roles != Role.PAD).sum(dim=1)


def runs_in(batch: Batch, runs: Sequence[Sequence[int]]) -> Tensor:
    """[batch, time] True at every token of every place where one of the runs of ids stands within the policy's words."""
    chosen = (batch.roles == Role.CONTENT) | (batch.roles == Role.STOP)
    ids = torch.where(chosen, batch.ids, -1)
    found = torch.zeros_like(chosen)
    for run in runs:
        if not 0 < len(run) <= ids.shape[1]:
            continue
        places = (ids.unfold(1, len(run), 1) == torch.tensor(run)).all(dim=2)
        for offset in range(len(run)):
            found[:, offset : offset + places.shape[1]] |= places
    return found
