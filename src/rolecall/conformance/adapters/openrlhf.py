"""OpenRLHF's losses, KL, rewards and experience maker.

`openrlhf.models` imports flash-attn and `openrlhf.trainer.ray` vllm, which need a GPU and have no part in the maths. As
OpenRLHF's own tests do, the files of pure maths are loaded past them.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openrlhf
import torch
from torch import Tensor

from rolecall.conformance.adapters import FORBIDDEN, NAN

PACKAGES = ("openrlhf",)
_EMPTY = (
    "robustness: masked_mean divides 0 by 0; with the counts of the whole batch, which its trainer passes, aggregate_loss "
    "gives 0."
)
_STEPS = (
    "bug for answers with tool output inside: masked positions are walked through as steps of reward and value 0, so "
    "what comes before a tool call bootstraps from 0 and every tool token discounts once more. t + 1 must be the next "
    "position that the policy chose. Answers of one turn pass."
)
REASONS = {
    "mean_of_nothing": "robustness: 0 / 0.",
    "mean_ignores_rubbish": NAN,
    "whiten_ignores_rubbish": NAN,
    "aggregate_of_nothing": _EMPTY,
    "aggregate_ignores_rubbish": NAN,
    "gae_walks_over_observations": _STEPS,
    "gae_ignores_rubbish": NAN,
    "returns_walk_over_observations": _STEPS,
    "returns_ignore_rubbish": NAN,
    "grpo_of_a_flat_group": "bug: in float32 the mean of equal scores is off in the last place, and that error is divided "
    "by an std of the same size + 1e-9: eight answers that all score 0.7 get advantages of 0.92. Equal scores must be "
    "found by comparing them.",
    "kl_in_loss_gradient": "bug in the default: the gradient of k1 is that of log pi, whose mean over the policy is 0, so "
    "the KL term does not pull at all. OpenRLHF prints the advice to take k2 or k3; k2 is right, k3 follows KL(reference "
    "|| policy), and --algo.kl.unbiased_gradient is right with each.",
    "kl_ignores_rubbish": "robustness: compute_approx_kl takes no mask, and masking its result later leaves 0 * NaN in "
    "the gradient of the square.",
    "policy_loss_of_nothing": _EMPTY,
    "policy_loss_ignores_rubbish": NAN,
    "value_loss_ignores_rubbish": NAN,
    "entropy_of_forbidden_choices": FORBIDDEN,
}


def _package(name: str, **members: Any) -> None:
    """A package that is found on disk but whose own __init__ is not run."""
    module = ModuleType(name)
    module.__path__ = [str(Path(openrlhf.__path__[0]).joinpath(*name.split(".")[1:]))]
    module.__dict__.update(members)
    sys.modules[name] = module


def _experience_maker() -> Any:
    _package("openrlhf.models")
    _package("openrlhf.trainer.ppo_utils")
    _package("openrlhf.trainer.ray")
    _package("openrlhf.trainer.ray.launcher", RayActorGroup=object)
    return importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")


_maker = _experience_maker()
_loss = importlib.import_module("openrlhf.models.loss")
_utils = importlib.import_module("openrlhf.models.utils")
_Experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience").Experience


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """models.utils.masked_mean"""
    return _utils.masked_mean(x, mask)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """models.utils.masked_normalize over the flattened batch"""
    return _utils.masked_normalize(x.reshape(1, -1), mask.reshape(1, -1)).view_as(x)


def aggregate(x: Tensor, mask: Tensor, *, mode: str, tokens: int | None = None, sequences: int | None = None) -> Tensor:
    """models.loss.aggregate_loss"""
    if mode not in ("token-mean", "seq-mean-token-mean"):
        raise NotImplementedError(f"no {mode}")
    totals = {"batch_num_tokens": tokens, "global_batch_size": sequences}
    return _loss.aggregate_loss(x, mask, token_level_loss=mode == "token-mean", **totals)


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """models.utils.compute_reward"""
    return _utils.compute_reward(scores, kl_coef, kl, action_mask=mask)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """RemoteExperienceMaker.get_advantages_and_returns"""
    return _maker.RemoteExperienceMaker.get_advantages_and_returns(None, values, rewards, mask, gamma, lam)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """RemoteExperienceMaker.get_cumulative_returns"""
    return _maker.RemoteExperienceMaker.get_cumulative_returns(None, rewards, mask, gamma)


def grpo(scores: Tensor, groups: Tensor, *, scale: str | None = "group") -> Tensor:
    """RemoteExperienceMaker.compute_advantages_and_returns with group_norm, or dr_grpo without scale"""
    if scale == "batch":
        raise NotImplementedError("no std over the batch")
    return _group_advantages("group_norm" if scale else "dr_grpo", scores, groups)


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """RemoteExperienceMaker.compute_advantages_and_returns with rloo"""
    return _group_advantages("rloo", scores, groups)


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str, straight_through: bool = False
) -> Tensor:
    """models.utils.compute_approx_kl, with unbiased_gradient for straight-through"""
    return _utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=kind, unbiased_gradient=straight_through)


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """models.utils.compute_approx_kl with k1, the default of --algo.kl.estimator, and aggregate_loss"""
    return _loss.aggregate_loss(_utils.compute_approx_kl(logprobs, ref_logprobs), mask)


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """models.utils.compute_approx_kl with k1, the default of --algo.kl.estimator"""
    return _utils.compute_approx_kl(logprobs, ref_logprobs)


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """models.utils.log_probs_from_logits of logits and ids that the adapter aligns"""
    scored = _utils.log_probs_from_logits(logits[:, :-1], ids[:, 1:], temperature=temperature)
    return torch.nn.functional.pad(scored, (1, 0))


def sft_loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """models.loss.GPTLMLoss with labels of -100 where the mask is False"""
    return _loss.GPTLMLoss()(logits, torch.where(mask, ids, -100))


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
    """models.loss.PolicyLoss"""
    loss = _loss.PolicyLoss(clip_eps_low=clip_low, clip_eps_high=clip_high, dual_clip=dual_clip)
    return loss(logprobs, old_logprobs, advantages, action_mask=mask)[0]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """models.loss.ValueLoss"""
    return _loss.ValueLoss(clip_eps=clip)(values, old_values, returns, action_mask=mask)


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """models.utils.compute_entropy, not compiled"""
    return _utils.compute_entropy.__wrapped__(logits)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """models.loss.DPOLoss"""
    return _loss.DPOLoss(beta)(chosen, rejected, ref_chosen, ref_rejected)[0]


def _group_advantages(estimator: str, scores: Tensor, groups: Tensor) -> Tensor:
    """On a bare instance: answers of one token, no KL, no clipping of rewards."""
    space = SimpleNamespace
    advantage = space(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=True)
    samples = len(groups) // len(groups.unique())
    if samples == 1:
        raise NotImplementedError("refuses one sample per prompt")
    args = space(
        rollout=space(n_samples_per_prompt=samples), reward=space(clip_range=None), algo=space(advantage=advantage)
    )
    maker = _maker.RemoteExperienceMaker.__new__(_maker.RemoteExperienceMaker)
    maker.strategy, maker.kl_ctl, maker.advantage_estimator = space(args=args), space(value=0.0), estimator
    one = torch.ones(len(scores), 1)
    made = _Experience(
        index=list(range(len(scores))), rewards=scores.clone(), action_mask=one, kl=0 * one.to(scores), info={}
    )
    return maker.compute_advantages_and_returns([made])[0].advantages[:, 0]
