"""Returns of agents: gamma and lambda count environment steps.

A language model's positions may skip what the policy did not choose: a tool's output takes no time. An environment's
steps may not. A step at which an agent has one action is a step like any other: it discounts, and the agent's value is
learned there. While an agent is absent nothing is asked of its networks; what is paid then reaches the last step before:

    agent         there there  -     -   there            V at "-" is r + gamma V of the step after it,
    V             a     b     (c)   (d)   e               which makes the TD error there 0
    d = r_3 + gamma e        c = r_2 + gamma d        TD error of b: r_1 + gamma c - b

An agent that dies has no value after its last step, and so none after a cut.
"""

import torch
from torch import Tensor

from rolecall.marl.episodes import EpisodeBatch
from rolecall.maths.returns import gae


def advantages_and_returns(
    batch: EpisodeBatch, rewards: Tensor, values: Tensor, there: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE and TD(lambda) targets [batch x n, time], at every step that happened.

    All of `rewards`, `values` and `there` are [batch, time, n]: one column per agent, or one for the team. What is found
    where an agent was not there means nothing.
    """
    behind = batch.behind(torch.where(there, values, 0.0))
    values = _carried(batch, rewards, values, there, behind, gamma)
    mask = batch.valid[..., None].expand_as(there)
    return gae(as_rows(rewards), as_rows(values), as_rows(mask), gamma=gamma, lam=lam, bootstrap=behind.flatten())


def _carried(
    batch: EpisodeBatch, rewards: Tensor, values: Tensor, there: Tensor, behind: Tensor, gamma: float
) -> Tensor:
    """The values, with those of steps at which an agent was not there taken from the steps after them."""
    if not bool((batch.valid[..., None] & ~there).any()):
        return values
    carried, after = values.clone(), behind
    for t in reversed(range(values.shape[1])):
        carried[:, t] = torch.where(there[:, t], values[:, t], rewards[:, t] + gamma * after)
        after = torch.where(batch.valid[:, t, None], carried[:, t], after)
    return carried


def as_rows(x: Tensor) -> Tensor:
    """[batch, time, n, …] as [batch x n, time, …]."""
    return x.transpose(1, 2).flatten(0, 1)
