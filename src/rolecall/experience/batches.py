"""From trajectories to a rectangle, and what cuts it into micro-batches that fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rolecall.maths.roles import Role
from rolecall.policy.packing import micro_batches as micro_batches
from rolecall.types import Batch, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories as one right-padded batch. Log-probs are NaN wherever the policy did not sample."""
    if not trajectories:
        raise ValueError("cannot make a batch of no trajectories")
    time = max(len(t.ids) for t in trajectories)
    ids = torch.zeros(len(trajectories), time, dtype=torch.long)
    roles = torch.full((len(trajectories), time), int(Role.PAD), dtype=torch.uint8)
    behaviour = torch.full((len(trajectories), time), torch.nan)
    for row, trajectory in enumerate(trajectories):
        ids[row, : len(trajectory.ids)] = torch.tensor(trajectory.ids)
        roles[row, : len(trajectory.ids)] = torch.tensor(trajectory.roles, dtype=torch.uint8)
        if trajectory.behaviour_logprobs is not None:
            behaviour[row, : len(trajectory.ids)] = torch.tensor(trajectory.behaviour_logprobs)
    sampled = any(t.behaviour_logprobs is not None for t in trajectories)
    return Batch(
        ids=ids,
        roles=roles,
        groups=torch.tensor([t.group for t in trajectories]),
        behaviour_logprobs=behaviour if sampled else None,
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
