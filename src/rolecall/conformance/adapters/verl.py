"""verl's public functions: `verl.trainer.ppo.core_algos`, `rollout_corr_helper` and `verl.utils.torch_functional`."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

PACKAGES = ("verl",)
REASONS: dict[str, str] = {}


def answer_mask(ids: Tensor, *, stop_ids: Collection[int]) -> Tensor:
    """torch_functional.get_response_mask"""
    return verl_F.get_response_mask(ids, list(stop_ids))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """torch_functional.masked_mean"""
    return verl_F.masked_mean(x, mask)


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """torch_functional.masked_whiten"""
    return verl_F.masked_whiten(x, mask, shift_mean=shift_mean)


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    mode: str,
    norm: float | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
) -> Tensor:
    """core_algos.agg_loss"""
    totals = {"batch_num_tokens": tokens, "global_batch_size": sequences, "loss_scale_factor": norm}
    return core_algos.agg_loss(x, mask, mode, **totals)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """core_algos.compute_gae_advantage_return; it whitens advantages itself, so returns - values stand for the raw ones"""
    if mask.sum() < 2:
        padding = torch.zeros(1, mask.shape[1], dtype=rewards.dtype)  # its whitening refuses a single position
        more = (torch.cat([t, padding + c]) for t, c in ((rewards, 0), (values, 0), (mask, 1)))
        _, returns = core_algos.compute_gae_advantage_return(*more, gamma, lam)
        return returns[:-1] - values, returns[:-1]
    _, returns = core_algos.compute_gae_advantage_return(rewards, values, mask.double(), gamma, lam)
    return returns - values, returns


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """core_algos.compute_reinforce_plus_plus_outcome_advantage, its returns"""
    config: Any = SimpleNamespace(gamma=gamma)
    row = torch.ones(1, mask.shape[1], dtype=rewards.dtype)  # its whitening, not looked at, refuses few positions
    rewards, counts = torch.cat([rewards, row]), torch.cat([mask.to(rewards.dtype), row])
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, counts, config=config)[1][:-1]


def grpo(scores: Tensor, groups: Tensor, *, scale: str | None = "group") -> Tensor:
    """core_algos.compute_grpo_outcome_advantage"""
    if scale == "batch":
        raise NotImplementedError("no std over the batch")
    return _of_answers(core_algos.compute_grpo_outcome_advantage, scores, groups, norm_adv_by_std_in_grpo=bool(scale))


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """core_algos.compute_rloo_outcome_advantage"""
    return _of_answers(core_algos.compute_rloo_outcome_advantage, scores, groups)


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str, straight_through: bool = False
) -> Tensor:
    """core_algos.kl_penalty, with `+` for straight-through"""
    return core_algos.kl_penalty(logprobs, ref_logprobs, kind + "+" * straight_through)


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """core_algos.kl_penalty with low_var_kl, the default of actor.kl_loss_type, and agg_loss"""
    return core_algos.agg_loss(core_algos.kl_penalty(logprobs, ref_logprobs, "low_var_kl"), mask, "token-mean")


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """core_algos.kl_penalty with kl, the default of algorithm.kl_penalty"""
    return core_algos.kl_penalty(logprobs, ref_logprobs, "kl")


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """torch_functional.log_probs_from_logits_response"""
    scored = verl_F.log_probs_from_logits_response(ids, logits, ids.shape[1] - 1)
    return torch.nn.functional.pad(scored, (1, 0))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """core_algos.compute_policy_loss_vanilla; dual clip cannot be turned off, so None is 1e30"""
    options = {"clip_ratio": clip_low, "clip_ratio_low": clip_low, "clip_ratio_high": clip_high}
    config: Any = SimpleNamespace(
        **options, global_batch_info={}, get=lambda name, default: 1e30 if dual_clip is None else dual_clip
    )
    loss, _ = core_algos.compute_policy_loss_vanilla(old_logprobs, logprobs, advantages, mask, config=config)
    return loss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """core_algos.compute_value_loss; clipping cannot be turned off, so None is 1e30"""
    return core_algos.compute_value_loss(values, returns, old_values, mask, 1e30 if clip is None else clip)[0]


def importance_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, level: str, kind: str, high: float
) -> Tensor:
    """rollout_corr_helper.compute_rollout_correction_weights"""
    limit = high if kind == "truncate" else f"1e-30_{high}"  # it refuses a lower bound of 0
    return compute_rollout_correction_weights(logprobs - behaviour_logprobs, mask, level, limit)[0]


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """torch_functional.entropy_from_logits"""
    return verl_F.entropy_from_logits(logits)


def _of_answers(function: Any, scores: Tensor, groups: Tensor, **options: Any) -> Tensor:
    """verl takes rewards of tokens and gives advantages of tokens: answers of one token here."""
    rewards = scores[:, None]
    return function(rewards.clone(), torch.ones_like(rewards), np.asarray(groups), **options)[0][:, 0]
