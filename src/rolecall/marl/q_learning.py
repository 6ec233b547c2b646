"""IQL, VDN and QMIX: Q-learning on episodes.

    y_t = r_t + gamma ((1 - lam) V_{t+1} + lam y_{t+1})        V = Q_target(argmax_a Q(a)) or max_a Q_target(a)
    loss = sum over steps of (Q(a_t) - y_t)^2 / steps

V after the last step is 0 if the episode ended, else that of the slot after it. IQL learns each agent's own Q; VDN and
QMIX learn the team's, mixed from the agents'. Targets count environment steps (`marl.returns`); lam = 0 is PyMARL's.
A dead or absent agent adds nothing to the mix and nothing to the loss; one with a single action has a value like others.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rolecall.marl.episodes import EpisodeBatch
from rolecall.marl.nets import Agents, action_scores, agent_inputs, available
from rolecall.marl.returns import advantages_and_returns, as_rows
from rolecall.maths.reduce import aggregate, masked_mean


class QNetworks(nn.Module):
    """The agents and, for a team's Q, the mixer."""

    def __init__(self, agents: Agents, mixer: nn.Module | None) -> None:
        super().__init__()
        self.agents, self.mixer = agents, mixer

    def target(self) -> "QNetworks":
        """A copy that does not train."""
        return copy.deepcopy(self).requires_grad_(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class QLoss:
    """What one batch says."""

    loss: Tensor
    """With gradient."""
    errors: Tensor
    """[batch]: mean |Q - y| of each episode, for priorities."""
    q: Tensor
    """Mean Q of what was done."""
    target: Tensor
    """Mean y."""


def q_loss(
    live: QNetworks,
    target: QNetworks,
    batch: EpisodeBatch,
    *,
    gamma: float,
    lam: float,
    double: bool,
    weights: Tensor | None = None,
    scale: Callable[[Tensor], Tensor] = lambda reward: reward,
) -> QLoss:
    """The loss of one batch. `weights` [batch] weigh episodes, `scale` is applied to rewards."""
    inputs = agent_inputs(live.agents, batch)
    scores = action_scores(live.agents, batch, inputs)
    done = scores.gather(-1, batch.actions)[..., 0]
    with torch.no_grad():
        theirs = action_scores(target.agents, batch, inputs)
        best = available(scores if double else theirs, batch.avail_actions).argmax(-1, keepdim=True)
        future = theirs.gather(-1, best)[..., 0]
    if live.mixer is None:
        q, value, there = done, future, batch.there
    else:
        assert target.mixer is not None
        q = _mixed(live.mixer, done, batch, batch.valid)
        with torch.no_grad():
            value = _mixed(target.mixer, future, batch, batch.filled[..., 0])
        there = batch.there.any(-1, keepdim=True)
    rewards = scale(batch.paid(there.shape[-1]))
    mask = as_rows(there & batch.valid[..., None])
    with torch.no_grad():
        _, targets = advantages_and_returns(batch, rewards, value, there, gamma=gamma, lam=lam)
    error = as_rows(q) - targets
    squares = error.square()
    if weights is not None:
        squares = squares * weights.repeat_interleave(there.shape[-1])[:, None]
    per_row = masked_mean(error.detach().abs(), mask, dim=1)
    return QLoss(
        loss=aggregate(squares, mask, mode="token-mean"),
        errors=per_row.view(len(batch), -1).mean(1),
        q=masked_mean(as_rows(q).detach(), mask),
        target=masked_mean(targets, mask),
    )


def _mixed(mixer: nn.Module, values: Tensor, batch: EpisodeBatch, where: Tensor) -> Tensor:
    """[batch, time, 1]: the team's value in the slots asked for, 0 elsewhere; who is not there adds 0."""
    kept = torch.where(batch.there, values, 0.0)[where]
    found = mixer(kept, batch.state[where])
    return found.new_zeros(where.shape).masked_scatter(where, found)[..., None]


@torch.no_grad()
def follow(target: Sequence[Tensor], live: Sequence[Tensor], *, share: float) -> None:
    """Move a target network's parameters towards the live one's: all the way with share 1."""
    for held, new in zip(target, live, strict=True):
        held.lerp_(new, share)
