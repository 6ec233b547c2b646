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

from rolecall.conformance.adapters import FORBIDDEN, NAN

PACKAGES = ("verl",)
_LONE = (
    "definition: the bare score is kept, which is REINFORCE without a baseline for that prompt, so a lone answer that "
    "scores 7 outweighs whole groups; without others there is nothing to compare with, and 0 leaves it out."
)
_EMPTY = (
    "robustness: 0 / 0 where the counts are those of the micro-batch itself; with the counts of the whole batch, which "
    "verl's trainer passes, the result is 0."
)
REASONS = {
    "whiten_one_position": "definition: it refuses a single position, since its variance divides by n - 1 = 0.",
    "aggregate_of_nothing": _EMPTY,
    "aggregate_ignores_rubbish": "robustness: the sequence modes multiply by the mask, and NaN * 0 is NaN; the token "
    "modes use `where` and pass.",
    "gae_ignores_rubbish": NAN,
    "returns_ignore_rubbish": NAN,
    "grpo_of_a_flat_group": "bug: in float32 the mean of equal scores is off in the last place, and that error is divided "
    "by an std of about 0 + 1e-6: eight answers that all score 0.7 get advantages of 0.056 instead of 0. Equal scores "
    "must be found by comparing them.",
    "grpo_of_a_single_answer": _LONE,
    "rloo_of_a_single_answer": _LONE,
    "kl_in_loss_gradient": "bug in the default: by enumeration k3 as a loss follows the gradient of KL(reference || "
    "policy), because E[(1 - exp(-x)) grad log pi] = - sum ref(a) grad log pi(a). Choose `k3+` or `k2`, which pass.",
    "kl_ignores_rubbish": "robustness: kl_penalty takes no mask, and masking its result later leaves 0 * NaN in the "
    "gradient of the square.",
    "policy_loss_of_nothing": _EMPTY,
    "value_loss_ignores_rubbish": "robustness: the value is masked by `where` after the square, whose gradient is then "
    "0 * NaN.",
    "importance_weights_may_all_be_masked": "bug: if every weight of a batch is masked to 0, the effective sample size that "
    "it logs divides by 0 and raises ZeroDivisionError.",
    "entropy_of_forbidden_choices": FORBIDDEN,
}


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
    more = _one_row_more(rewards, values, mask)
    returns = core_algos.compute_gae_advantage_return(*more, gamma, lam)[1][:-1]
    return returns - values, returns


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """core_algos.compute_reinforce_plus_plus_outcome_advantage, its returns"""
    config: Any = SimpleNamespace(gamma=gamma)
    more = _one_row_more(rewards, mask)
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(*more, config=config)[1][:-1]


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


def _one_row_more(*tensors: Tensor) -> list[Tensor]:
    """With a row of ones: the whitening at the end of verl's returns, not looked at here, refuses one position alone."""
    return [torch.cat([tensor.double(), torch.ones(1, tensor.shape[1]).double()]) for tensor in tensors]
