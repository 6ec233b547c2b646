"""rolecall's own maths. Passes every case."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rolecall.maths import advantages, kl, losses, reduce, returns, roles, shaping
from rolecall.policy import logprobs as policy

grpo, rloo = advantages.grpo, advantages.rloo
gae, discounted_returns = returns.gae, returns.discounted_returns
masked_mean, masked_whiten = reduce.masked_mean, reduce.masked_whiten
kl_estimate = kl.kl_estimate
shape_rewards = shaping.shape_rewards
importance_weights, entropy = losses.importance_weights, losses.entropy


def answer_mask(ids: Tensor, *, stop_ids: Collection[int]) -> Tensor:
    """maths.roles.roles_of_ids and TrainRule().eligible"""
    return roles.TrainRule().eligible(roles.roles_of_ids(ids, stop_ids=stop_ids))


def episode_mask(filled: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """maths.roles.episode_roles and TrainRule().eligible"""
    return roles.TrainRule().eligible(roles.episode_roles(filled, terminated, truncated))


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    mode: str,
    norm: float | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
) -> Tensor:
    """maths.reduce.aggregate"""
    count = tokens if mode == "token-mean" else sequences
    return reduce.aggregate(x, mask, mode=mode, norm=norm, denominator=None if count is None else float(count))


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """maths.kl.kl_estimate with kind k3 and straight_through, as in recipes.algorithms"""
    return _token_mean(kl.kl_estimate(logprobs, ref_logprobs, mask, kind="k3", straight_through=True), mask)


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """maths.kl.kl_estimate with kind k1"""
    return kl.kl_estimate(logprobs, ref_logprobs, mask, kind="k1")


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """policy.logprobs.token_logprobs with the identity as head"""
    hidden = logits[:, :-1].flatten(0, 1)
    head = torch.eye(logits.shape[-1], dtype=logits.dtype)
    scored = policy.token_logprobs(hidden, head, ids[:, 1:].flatten(), temperature=temperature).logprobs
    return torch.nn.functional.pad(scored.view(len(ids), -1), (1, 0))


def sft_loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """maths.losses.nll of policy.logprobs.token_logprobs"""
    return _token_mean(losses.nll(token_logprobs(logits, ids), mask), mask)


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **clip: Any) -> Tensor:
    """maths.losses.ppo_clip"""
    return _token_mean(losses.ppo_clip(logprobs, old_logprobs, advantages, mask, **clip), mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """maths.losses.value_clip"""
    return _token_mean(losses.value_clip(values, old_values, returns, mask, clip=clip), mask)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """maths.losses.dpo"""
    return losses.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta).mean()


def _token_mean(per_position: Tensor, mask: Tensor) -> Tensor:
    return reduce.aggregate(per_position, mask, mode="token-mean")
