"""Networks on recorded episodes: only slots that are filled are shown to them, so that padding can do no harm."""

import torch
from torch import Tensor

from rolecall.marl.episodes import EpisodeBatch
from rolecall.marl.nets import UNAVAILABLE, Agents


def action_scores(agents: Agents, batch: EpisodeBatch, inputs: Tensor | None = None) -> Tensor:
    """[batch, time, agent, action]: what the networks say in every filled slot, 0 elsewhere.

    Recurrent networks walk the episodes from their beginning with an empty memory; the others see filled slots alone.
    `inputs` are `agent_inputs` if they are at hand.
    """
    x = agent_inputs(agents, batch) if inputs is None else inputs
    if agents.shape.recurrent:
        scores, _ = agents(torch.where(batch.filled[..., None], x, 0.0).transpose(0, 1))
        return torch.where(batch.filled[..., None], scores.transpose(0, 1), 0.0)
    filled = batch.filled[..., 0]
    found, _ = agents(x[filled][None])
    scores = found.new_zeros(*filled.shape, *found.shape[2:])
    return scores.masked_scatter(filled[..., None, None], found[0])


def agent_inputs(agents: Agents, batch: EpisodeBatch) -> Tensor:
    """[batch, time, agent, inputs]."""
    last = None
    if agents.shape.last_action:
        onehot = batch.actions_onehot
        last = torch.cat([torch.zeros_like(onehot[:, :1]), onehot[:, :-1]], 1)
    return agents.inputs(batch.obs, last)


def available(scores: Tensor, avail: Tensor) -> Tensor:
    """Scores with what may not be done pushed out of reach. Where nothing may be done they stay."""
    nothing = ~avail.any(-1, keepdim=True)
    return torch.where(avail | nothing, scores, UNAVAILABLE)
