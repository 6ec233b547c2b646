"""The field's silent bugs, each as an adapter function that is right but for one thing, and the case that must notice."""

HEAD = """
import math
import torch
from rolecall.conformance.adapters import rolecall as right
"""

PLANTED = {
    "log-probs of the next token": (
        "def token_logprobs(logits, ids):\n    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]\n",
        "logprobs_belong_to_their_token",
    ),
    "log-probs divided by the temperature": (
        "def token_logprobs(logits, ids, *, temperature=1.0):\n"
        "    return right.token_logprobs(logits, ids) / temperature\n",
        "logprobs_are_of_the_sampling_temperature",
    ),
    "labels not shifted against the mask": (
        "def sft_loss(logits, ids, mask):\n"
        "    return right.sft_loss(logits, ids, torch.nn.functional.pad(mask[:, :-1], (1, 0)))\n",
        "sft_gradient_is_at_the_position_before",
    ),
    "a pad id ends the answer": (
        "def answer_mask(ids, *, stop_ids):\n    return right.answer_mask(ids, stop_ids=stop_ids) & (ids != 0)\n",
        "answer_may_contain_the_pad_id",
    ),
    "the stop does not count": (
        "def answer_mask(ids, *, stop_ids):\n"
        "    return right.answer_mask(ids, stop_ids=stop_ids) & ~torch.isin(ids, torch.tensor(stop_ids))\n",
        "answer_ends_with_its_first_stop_id",
    ),
    "the bootstrap slot is a step": (
        "def episode_mask(filled, terminated, truncated):\n"
        "    end = (terminated | truncated).long()\n"
        "    return filled & (end.cumsum(1) - end == 0)\n",
        "episode_without_flag_ends_before_its_bootstrap_slot",
    ),
    "padding in the denominator": (
        "def masked_mean(x, mask):\n    return torch.where(mask, x, 0).mean()\n",
        "mean_golden",
    ),
    "a mean that multiplies by the mask": (
        "def masked_mean(x, mask):\n    return (x * mask).sum() / mask.sum().clamp(min=1)\n",
        "mean_ignores_rubbish",
    ),
    "whitening over padding": (
        "def masked_whiten(x, mask):\n    return (x - x.mean()) / x.std()\n",
        "whiten_ignores_padding",
    ),
    "whitening that always shifts": (
        "def masked_whiten(x, mask, *, shift_mean=True):\n    return right.masked_whiten(x, mask)\n",
        "whiten_without_shift_keeps_the_mean",
    ),
    "a mean of means for token-mean": (
        "def aggregate(x, mask, *, mode):\n"
        "    if mode != 'token-mean': raise NotImplementedError\n"
        "    return right.aggregate(x, mask, mode='seq-mean-token-mean')\n",
        "aggregate_equals_the_loop[token-mean]",
    ),
    "micro-batches that each take their own mean": (
        "def aggregate(x, mask, *, mode, norm=None, tokens=None, sequences=None):\n"
        "    return right.aggregate(x, mask, mode=mode, norm=norm) / (1 if tokens is sequences is None else 2)\n",
        "aggregate_pieces_add_up[token-mean]",
    ),
    "empty rows in the mean over sequences": (
        "def aggregate(x, mask, *, mode, norm=None):\n"
        "    return right.aggregate(x, mask, mode=mode, norm=norm, sequences=len(x))\n",
        "aggregate_leaves_out_an_empty_row[seq-mean-token-mean]",
    ),
    "the width as constant norm": (
        "def aggregate(x, mask, *, mode, norm=None):\n"
        "    return right.aggregate(x, mask, mode=mode, norm=norm and x.shape[1])\n",
        "aggregate_ignores_padding[seq-mean-token-sum-norm]",
    ),
    "the score on the last column": (
        "def shape_rewards(scores, kl, mask, *, kl_coef):\n"
        "    rewards = -kl_coef * torch.where(mask, kl, 0)\n"
        "    rewards[:, -1] += scores\n"
        "    return rewards\n",
        "score_survives_an_untrained_end",
    ),
    "GAE that walks through tool output": (
        "def gae(rewards, values, mask, *, gamma, lam):\n"
        "    whole = mask.flip(1).cumsum(1).flip(1) > 0\n"
        "    clean = [torch.where(mask, x, 0) for x in (rewards, values)]\n"
        "    return right.gae(*clean, whole, gamma=gamma, lam=lam)\n",
        "gae_walks_over_observations",
    ),
    "GAE that bootstraps from padding": (
        "def gae(rewards, values, mask, *, gamma, lam):\n"
        "    count = mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)\n"
        "    return right.gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=values.gather(1, count)[:, 0])\n",
        "gae_of_an_ended_row_bootstraps_nothing",
    ),
    "GAE that never bootstraps": (
        "def gae(rewards, values, mask, *, gamma, lam, bootstrap=None):\n"
        "    return right.gae(rewards, values, mask, gamma=gamma, lam=lam)\n",
        "gae_of_a_cut_row_bootstraps_its_value",
    ),
    "a biased deviation": (
        "def grpo(scores, groups):\n"
        "    n = (groups == groups[0]).sum()\n"
        "    return right.grpo(scores, groups) * (n / (n - 1).clamp(min=1)) ** 0.5\n",
        "grpo_golden",
    ),
    "flat groups divided by eps": (
        "def grpo(scores, groups):\n    return (scores - scores.mean()) / (scores.std() + 1e-9)\n",
        "grpo_of_a_flat_group",
    ),
    "a single answer keeps its score": (
        "def grpo(scores, groups):\n    return scores if len(scores) == 1 else right.grpo(scores, groups)\n",
        "grpo_of_a_single_answer",
    ),
    "a failed reward counts as 0": (
        "def grpo(scores, groups, *, include=None):\n    return right.grpo(scores, groups)\n",
        "grpo_leaves_out_a_failed_reward",
    ),
    "the answer in its own baseline": (
        "def rloo(scores, groups):\n    return right.grpo(scores, groups, scale=None)\n",
        "rloo_baseline_does_not_depend_on_the_answer",
    ),
    "policy and reference swapped": (
        "def kl_estimate(logprobs, ref_logprobs, mask, *, kind):\n"
        "    return right.kl_estimate(ref_logprobs, logprobs, mask, kind=kind)\n",
        "kl_value_is_unbiased[k3]",
    ),
    "straight-through in name only": (
        "def kl_estimate(logprobs, ref_logprobs, mask, *, kind, straight_through=False):\n"
        "    return right.kl_estimate(logprobs, ref_logprobs, mask, kind=kind)\n",
        "kl_straight_through_gradient[k3]",
    ),
    "k3 as a loss": (
        "def kl_in_loss(logprobs, ref_logprobs, mask):\n"
        "    return right.kl_estimate(logprobs, ref_logprobs, mask, kind='k3').sum()\n",
        "kl_in_loss_gradient",
    ),
    "k3 in the reward": (
        "def kl_in_reward(logprobs, ref_logprobs, mask):\n"
        "    return right.kl_estimate(logprobs, ref_logprobs, mask, kind='k3')\n",
        "kl_in_reward_gradient",
    ),
    "the more optimistic of the two losses": (
        "def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):\n"
        "    rho = (logprobs - old_logprobs).exp().clamp(1 - clip_low, 1 + clip_high)\n"
        "    return right.masked_mean(-advantages * rho, mask)\n",
        "policy_gradient_is_zero_where_clipped",
    ),
    "a dual clip for every sign": (
        "def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None):\n"
        "    ratio = (logprobs - old_logprobs).clamp(max=math.inf if dual_clip is None else 0.5 * math.log(dual_clip))\n"
        "    return right.policy_loss(old_logprobs + ratio, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)\n",
        "policy_loss_equals_the_loop[2.0]",
    ),
    "a ratio without a bound": (
        "def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):\n"
        "    rho = (logprobs - old_logprobs).exp()\n"
        "    clipped = rho.clamp(1 - clip_low, 1 + clip_high)\n"
        "    return right.masked_mean(torch.maximum(-advantages * rho, -advantages * clipped), mask)\n",
        "policy_loss_of_a_broken_record_is_finite",
    ),
    "a value clip that lets go": (
        "def value_loss(values, old_values, returns, mask, *, clip):\n"
        "    near = values if clip is None else torch.clamp(values, old_values - clip, old_values + clip)\n"
        "    return right.masked_mean(0.5 * (near - returns).square(), mask)\n",
        "value_gradient_is_zero_where_clipped",
    ),
    "a sequence weight over padding": (
        "def importance_weights(logprobs, behaviour_logprobs, mask, *, level, kind, high):\n"
        "    if level == 'token' or kind == 'mask': raise NotImplementedError\n"
        "    return (logprobs - behaviour_logprobs).sum(1, keepdim=True).exp().clamp(max=high).expand_as(mask).detach()\n",
        "importance_weights_equal_the_loop[truncate-sequence]",
    ),
    "weights with a gradient": (
        "def importance_weights(logprobs, behaviour_logprobs, mask, *, level, kind, high):\n"
        "    return (logprobs - behaviour_logprobs).exp().clamp(max=high)\n",
        "importance_weights_have_no_gradient",
    ),
    "entropy that adds 0 times -inf": (
        "def entropy(logits, mask):\n    p = logits.softmax(-1)\n    return -(p * p.log()).sum(-1)\n",
        "entropy_of_forbidden_choices",
    ),
    "DPO without its reference": (
        "def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, *, beta):\n"
        "    return right.dpo_loss(chosen, rejected, chosen, rejected, beta=beta)\n",
        "dpo_golden",
    ),
}
