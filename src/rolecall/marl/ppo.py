"""IPPO and MAPPO: PPO for each agent, with a critic of its own observation or of the whole state.

Each agent's steps are a row [time] of `maths.returns.gae` and `maths.losses.ppo_clip`: the same functions that train
language models. The policy learns from the steps at which the agent chose, the critic from all at which it was there.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rolecall.marl.episodes import EpisodeBatch
from rolecall.marl.nets import Agents, Critic, RunningMoments, action_scores, agent_inputs, available
from rolecall.marl.returns import advantages_and_returns, as_rows
from rolecall.maths.losses import entropy, ppo_clip, value_clip
from rolecall.maths.reduce import aggregate, masked_mean, masked_whiten

View = Literal["own", "state"]


class ActorCritic(nn.Module):
    """The agents, and the critic that says what to expect from here."""

    def __init__(self, agents: Agents, critic: Critic, *, view: View) -> None:
        super().__init__()
        self.agents, self.critic, self.view = agents, critic, view

    def critic_inputs(self, batch: EpisodeBatch) -> Tensor:
        """[batch, time, agent, inputs]: the agent's observation or the state, and which agent it is about."""
        count = self.agents.shape.agents
        seen = batch.obs if self.view == "own" else batch.state[:, :, None].expand(-1, -1, count, -1)
        return torch.cat([seen, self.agents.ids.expand(*seen.shape[:3], -1)], -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What PPO learns from: agents' steps as rows [batch x agent, time], or, for networks without memory, [steps, 1].

    `inputs` are those of the agents' networks for steps, None for rows, whose episodes `batch` holds.
    """

    batch: EpisodeBatch | None
    inputs: Tensor | None
    seen: Tensor
    """What the critic sees."""
    agent: Tensor
    """Whose step it is; only for steps."""
    actions: Tensor
    avail: Tensor
    mask: Tensor
    """Steps at which the agent chose: the policy learns from them."""
    there: Tensor
    """Steps at which it was there, with a choice or without: the critic learns from them."""
    old_logprobs: Tensor | None
    """None before the first of several passes over everything, which finds them."""
    old_values: Tensor
    """On the critic's own scale."""
    advantages: Tensor
    """Whitened over the steps with a choice."""
    returns: Tensor
    """On the critic's own scale."""

    def __len__(self) -> int:
        return len(self.mask) if self.batch is None else len(self.batch)

    def part(self, index: Tensor) -> "Steps":
        """The chosen steps; or, with memory, the chosen episodes."""
        if self.batch is None:
            assert self.inputs is not None
            return Steps(batch=None, inputs=self.inputs[index], **self._taken(index))
        agents = self.mask.shape[0] // len(self.batch)
        rows = (index[:, None] * agents + torch.arange(agents)).flatten()
        return Steps(batch=self.batch.rows(index), inputs=None, **self._taken(rows))

    def _taken(self, index: Tensor) -> dict[str, Any]:
        held = {name: getattr(self, name) for name in _TENSORS}
        return {name: None if tensor is None else tensor[index] for name, tensor in held.items()}


_TENSORS = ("seen", "agent", "actions", "avail", "mask", "there", "old_logprobs", "old_values", "advantages", "returns")


@torch.no_grad()
def prepare(
    module: ActorCritic,
    moments: RunningMoments | None,
    batch: EpisodeBatch,
    *,
    gamma: float,
    lam: float,
    logprobs: bool = True,
) -> tuple[Steps, dict[str, float]]:
    """Old values and, unless told not to, log-probs, then advantages and returns, of a fresh batch.

    `moments` take the returns in.
    """
    seen = module.critic_inputs(batch)
    filled = batch.filled[..., 0]
    said = module.critic(seen[filled])
    own = said.new_zeros(seen.shape[:3]).masked_scatter(filled[..., None], said)  # on the critic's own scale
    values = own if moments is None else moments.restore(own)
    mask, there = as_rows(batch.eligible), as_rows(batch.there & batch.valid[..., None])
    rewards = batch.paid(values.shape[2])
    advantages, returns = advantages_and_returns(batch, rewards, values, batch.there, gamma=gamma, lam=lam)
    if moments is not None:
        moments.update(returns, there)
    missed = returns - as_rows(values)
    spread = masked_mean((returns - masked_mean(returns, there)).square(), there)
    left = masked_mean(missed.square(), there) - masked_mean(missed, there).square()
    measured = {
        "policy/value": float(masked_mean(as_rows(values), there)),
        "critic/explained_variance": float(1 - left / spread) if float(spread) > 0 else 0.0,
        "policy/advantage_abs": float(masked_mean(advantages.abs(), mask)),
    }
    old_logprobs = None
    if logprobs:
        scores = available(action_scores(module.agents, batch), batch.avail_actions)
        old_logprobs = as_rows(scores.log_softmax(-1).gather(-1, batch.actions)[..., 0])
    if moments is not None:
        # The critic's scale has just moved: what it said before is put on the new one.
        returns, own = moments.normalise(returns), moments.normalise(values)
    steps = Steps(
        batch=batch,
        inputs=None,
        seen=as_rows(seen),
        agent=torch.arange(seen.shape[2]).expand(*seen.shape[:2], -1).transpose(1, 2).flatten(0, 1),
        actions=as_rows(batch.actions[..., 0]),
        avail=as_rows(batch.avail_actions),
        mask=mask,
        there=there,
        old_logprobs=old_logprobs,
        old_values=as_rows(own),
        advantages=masked_whiten(advantages, mask),
        returns=returns,
    )
    if not module.agents.shape.recurrent:
        steps = _single(steps, as_rows(agent_inputs(module.agents, batch)))
    return steps, measured


def _single(steps: Steps, inputs: Tensor) -> Steps:
    """The steps at which an agent was there, without order: [steps, 1]."""
    taken = steps._taken(steps.there)
    wide: dict[str, Any] = {name: None if tensor is None else tensor[:, None] for name, tensor in taken.items()}
    return Steps(batch=None, inputs=inputs[steps.there], **wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLoss:
    """What one mini-batch says."""

    loss: Tensor
    """With gradient."""
    logprobs: Tensor
    """What was found before the step; the old log-probs of the passes that follow the first."""
    terms: dict[str, Tensor]
    """Before coefficients."""
    measured: dict[str, Tensor]
    """Numbers for metrics."""


def ppo_loss(
    module: ActorCritic,
    steps: Steps,
    *,
    clip: float,
    clip_value: float | None,
    vf_coef: float,
    entropy_coef: float,
) -> PPOLoss:
    """policy + vf_coef value - entropy_coef entropy: means over the steps with a choice, the value over all others too."""
    if steps.batch is None:
        assert steps.inputs is not None
        scores = module.agents.at(steps.inputs, steps.agent[:, 0])[:, None]
    else:
        scores = as_rows(action_scores(module.agents, steps.batch))
    mask, there = steps.mask, steps.there
    scores = available(scores, steps.avail)
    logprobs = scores.log_softmax(-1).gather(-1, steps.actions[..., None])[..., 0]
    values = module.critic(torch.where(there[..., None], steps.seen, 0.0))
    found = logprobs.detach()
    old = found if steps.old_logprobs is None else steps.old_logprobs
    policy = ppo_clip(logprobs, old, steps.advantages, mask, clip_low=clip, clip_high=clip)
    value = value_clip(values, steps.old_values, steps.returns, there, clip=clip_value)
    terms = {
        "policy": aggregate(policy, mask, mode="token-mean"),
        "value": aggregate(value, there, mode="token-mean"),
        "entropy": aggregate(entropy(scores, mask), mask, mode="token-mean"),
    }
    with torch.no_grad():
        log_ratio = torch.where(mask, found - old, 0.0)
        moved = (log_ratio.exp() - 1).abs() > clip
        measured = {
            "policy/approx_kl": masked_mean(log_ratio.exp() - 1 - log_ratio, mask),
            "clip_ratio/region_mean": masked_mean((moved & (log_ratio * steps.advantages > 0)).float(), mask),
        }
    loss = terms["policy"] + vf_coef * terms["value"] - entropy_coef * terms["entropy"]
    return PPOLoss(loss=loss, logprobs=found, terms=terms, measured=measured)
