"""PPO, GRPO and REINFORCE: each an advantage and a loss, a few lines apart.

    advantage(batch) -> [batch] or [batch, time], or a pair (advantages, returns) where there is a critic
    loss(outputs, batch) -> {term: Term}

`AlgorithmOptions` holds the choices, `Knobs` the numbers that move while training. What an algorithm needs of the batch
(scores, rewards, values, old and reference log-probs) has been computed before it is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rolecall.config.rl import AlgorithmOptions
from rolecall.maths import advantages as adv
from rolecall.maths import losses
from rolecall.maths.kl import kl_estimate
from rolecall.maths.reduce import masked_moments, masked_whiten
from rolecall.maths.returns import gae
from rolecall.maths.roles import TrainRule
from rolecall.policy.model import Outputs
from rolecall.train.step import Loss, Term, trained
from rolecall.types import Batch

Advantage = Callable[[Batch], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """Numbers that move while training."""

    kl_coef: float = 0.0
    """The KL controller's coefficient now."""
    baseline: float = 0.0
    """The moving average of scores, for REINFORCE."""
    max_new_tokens: int = 1
    """The longest answer: the constant length of seq-mean-token-sum-norm."""
    bootstrap: Tensor | None = None
    """[batch] values behind answers that were cut off, for PPO; None: 0."""
    all_sum: Callable[[Tensor], Tensor] = lambda x: x
    """Adds a tensor over ranks, for statistics of the whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What to optimise."""

    advantage: Advantage
    loss: Loss


def grpo(o: AlgorithmOptions, knobs: Knobs) -> Algorithm:
    """Shao et al. 2024: an answer is as good as it is better than the other answers to its prompt."""

    def advantage(batch: Batch) -> Tensor:
        scores, include = worth(o, batch), scored(batch)
        if o.scale == "batch":
            centred = adv.grpo(scores, batch.groups, scale=None, include=include)
            return centred / (spread(scores, include, knobs) + 1e-4)
        return adv.grpo(scores, batch.groups, scale=None if o.scale == "none" else o.scale, include=include)

    def loss(out: Outputs, batch: Batch) -> dict[str, Term]:
        return {"policy": clipped(o, knobs, out, batch), **regularisers(o, knobs, out, batch)}

    return Algorithm(advantage=advantage, loss=loss)


def ppo(o: AlgorithmOptions, knobs: Knobs) -> Algorithm:
    """Schulman et al. 2017: advantages from a critic by GAE, returns from the *raw* advantages, then whitened."""

    def advantage(batch: Batch) -> tuple[Tensor, Tensor]:
        steps = TrainRule(stop=o.train_stop).eligible(batch.roles)
        rewards = need(batch.rewards)
        if o.whiten_rewards:
            rewards = whiten(rewards, trained(batch), knobs, shift_mean=False)
        raw, returns = gae(rewards, need(batch.values), steps, gamma=o.gamma, lam=o.lam, bootstrap=knobs.bootstrap)
        return whiten(raw, trained(batch), knobs), returns

    def loss(out: Outputs, batch: Batch) -> dict[str, Term]:
        mask = trained(batch)
        value = losses.value_clip(need(out.values), need(batch.values), need(batch.returns), mask, clip=o.value_clip)
        return {
            "policy": clipped(o, knobs, out, batch),
            "value": Term(values=value, mask=mask, mode="token-mean", coef=o.vf_coef),
            **regularisers(o, knobs, out, batch),
        }

    return Algorithm(advantage=advantage, loss=loss)


def reinforce(o: AlgorithmOptions, knobs: Knobs) -> Algorithm:
    """Williams 1992: log-probs times score minus a baseline; no ratio, so one optimiser step per rollout."""

    def advantage(batch: Batch) -> Tensor:
        scores, include = worth(o, batch), scored(batch)
        if o.baseline == "prompt":
            return adv.reinforce(scores, adv.group_mean(scores, batch.groups, include=include), include=include)
        if o.baseline == "mean":
            return adv.reinforce(scores, float(moments(scores, include, knobs)[0]), include=include)
        return adv.reinforce(scores, knobs.baseline if o.baseline == "ema" else 0.0, include=include)

    def loss(out: Outputs, batch: Batch) -> dict[str, Term]:
        mask = trained(batch)
        values = weighted(losses.reinforce(out.logprobs, need(batch.advantages), mask), batch)
        return {
            "policy": policy_term(o, knobs, values, batch),
            **regularisers(o, knobs, out, batch),
        }

    return Algorithm(advantage=advantage, loss=loss)


ALGORITHMS: dict[str, Callable[[AlgorithmOptions, Knobs], Algorithm]] = {
    "grpo": grpo,
    "ppo": ppo,
    "reinforce": reinforce,
}


def clipped(o: AlgorithmOptions, knobs: Knobs, out: Outputs, batch: Batch) -> Term:
    """PPO's clipped policy loss. Without old log-probs the ratio is exactly 1 and only its gradient is left."""
    mask = trained(batch)
    old = out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    values = losses.ppo_clip(
        out.logprobs,
        old,
        need(batch.advantages),
        mask,
        clip_low=o.clip_low,
        clip_high=o.clip_high,
        dual_clip=o.dual_clip,
    )
    return policy_term(o, knobs, weighted(values, batch), batch)


def policy_term(o: AlgorithmOptions, knobs: Knobs, values: Tensor, batch: Batch, coef: float = 1.0) -> Term:
    """A term that is added up as the options say."""
    norm = (o.norm or float(knobs.max_new_tokens)) if o.aggregate == "seq-mean-token-sum-norm" else None
    return Term(values=values, mask=trained(batch), mode=o.aggregate, coef=coef, norm=norm)


def regularisers(o: AlgorithmOptions, knobs: Knobs, out: Outputs, batch: Batch) -> dict[str, Term]:
    """The KL to the reference, if it is in the loss, and the entropy bonus."""
    mask, terms = trained(batch), {}
    if o.kl_coef and o.kl_in == "loss":
        kl = kl_estimate(out.logprobs, need(batch.ref_logprobs), mask, kind=o.kl_kind, straight_through=True)
        terms["kl"] = policy_term(o, knobs, kl, batch, coef=knobs.kl_coef)
    if o.entropy_coef:
        terms["entropy"] = Term(
            values=torch.where(mask, out.entropy, 0), mask=mask, mode="token-mean", coef=-o.entropy_coef
        )
    return terms


def worth(o: AlgorithmOptions, batch: Batch) -> Tensor:
    """[batch] what each answer is worth: its score and, with the KL in the reward, less the KL of all its positions."""
    scores = need(batch.scores)
    if not (o.kl_coef and o.kl_in == "reward"):
        return scores
    placed = TrainRule(stop=o.train_stop).eligible(batch.roles).any(dim=1) & scored(batch)
    return torch.where(placed, need(batch.rewards).sum(dim=1), scores)


def moments(x: Tensor, mask: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """Mean and variance over all ranks."""
    mean, variance = masked_moments(x, mask, all_sum=knobs.all_sum)
    return mean.to(x.dtype), variance.to(x.dtype)


def whiten(x: Tensor, mask: Tensor, knobs: Knobs, *, shift_mean: bool = True) -> Tensor:
    """Unit variance over all ranks, and zero mean."""
    return masked_whiten(x, mask, shift_mean=shift_mean, moments=moments(x, mask, knobs))


def spread(scores: Tensor, include: Tensor, knobs: Knobs) -> Tensor:
    """The unbiased standard deviation of all scores on all ranks."""
    count = knobs.all_sum(include.sum().double())
    return (moments(scores, include, knobs)[1] * count / (count - 1).clamp(min=1)).sqrt().to(scores.dtype)


def weighted(values: Tensor, batch: Batch) -> Tensor:
    """Per-position values times the batch's importance weights, if it has any."""
    return values if batch.weights is None else values * torch.where(trained(batch), batch.weights, 0)


def scored(batch: Batch) -> Tensor:
    """[batch] bool: rows whose reward did not fail."""
    return ~need(batch.scores).isnan()


def need(tensor: Tensor | None) -> Tensor:
    """A field of the batch that must have been computed."""
    if tensor is None:
        raise ValueError("the algorithm asks for something that was not computed for this batch; see AlgorithmOptions")
    return tensor
