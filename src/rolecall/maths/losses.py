"""Losses per position, to be reduced by `reduce.aggregate`; and losses per pair for preferences.

Lower is better. rho = exp(logprobs - old_logprobs) is the ratio between the policy and the one the ratio is taken from;
log ratios are clamped to +-20 before exp. Advantages, old and behaviour log-probs are constants: no gradient goes there.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rolecall.maths.checks import BatchTime, Mask, check_choice, check_mask, check_shape, keep
from rolecall.maths.kl import bounded_exp
from rolecall.maths.reduce import masked_mean

Pairs = Float[Tensor, "pairs"]


def ratio(logprobs: BatchTime, old_logprobs: BatchTime, mask: Mask) -> BatchTime:
    """rho = exp(logprobs - old_logprobs) where the mask is True, else 0."""
    check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return keep(mask, bounded_exp(_log_ratio(logprobs, old_logprobs, mask)))


def nll(logprobs: BatchTime, mask: Mask) -> BatchTime:
    """- log pi: the loss of SFT. REINFORCE with advantage 1."""
    check_mask(mask, logprobs=logprobs)
    return -keep(mask, logprobs)


def reinforce(logprobs: BatchTime, advantages: BatchTime, mask: Mask) -> BatchTime:
    """- A log pi. Williams 1992."""
    check_mask(mask, logprobs=logprobs, advantages=advantages)
    return -keep(mask, advantages).detach() * keep(mask, logprobs)


def ppo_clip(
    logprobs: BatchTime,
    old_logprobs: BatchTime,
    advantages: BatchTime,
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> BatchTime:
    """max(- A rho, - A clip(rho, 1 - clip_low, 1 + clip_high)): the larger, more pessimistic of the two losses.

    Schulman et al. 2017, arXiv 1707.06347. It removes the gradient of steps that go further in the good direction; it
    does not bound rho. `dual_clip` c > 1 also caps the loss at - c A where A < 0 (Ye et al. 2019, arXiv 1912.09729).
    rho = 1: the gradient of REINFORCE. clip_high > clip_low: DAPO's clip-higher.
    """
    check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    rho = bounded_exp(_log_ratio(logprobs, old_logprobs, mask))
    return keep(mask, _clipped(rho, keep(mask, advantages).detach(), clip_low, clip_high, dual_clip))


def gspo(
    logprobs: BatchTime,
    old_logprobs: BatchTime,
    advantages: BatchTime,
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
) -> BatchTime:
    """PPO's clipped loss with one ratio per sequence: s = exp(mean over its positions of the log ratio).

    Zheng et al. 2025, arXiv 2507.18071. In the GSPO-token form, whose value at every position is that of s and whose
    gradient reaches each position through its own log-prob; with equal advantages along a sequence and
    seq-mean-token-mean it equals GSPO. Clip ranges are far smaller than PPO's (3e-4 and 4e-4 in the paper).
    """
    check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    sequence = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).detach()
    rho = bounded_exp(sequence + (log_ratio - log_ratio.detach()))
    return keep(mask, _clipped(rho, keep(mask, advantages).detach(), clip_low, clip_high, None))


def cispo(
    logprobs: BatchTime,
    old_logprobs: BatchTime,
    advantages: BatchTime,
    mask: Mask,
    *,
    clip_high: float,
    clip_low: float = 1.0,
) -> BatchTime:
    """- sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, the gradient never is.

    MiniMax 2025, arXiv 2506.13585. clip_low = 1 leaves the lower side free, as they do. rho = 1: REINFORCE.
    """
    check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    rho = bounded_exp(_log_ratio(logprobs, old_logprobs, mask))
    weight = rho.clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight * keep(mask, advantages).detach() * keep(mask, logprobs)


def replay_clipped(
    logprobs: BatchTime,
    behaviour_logprobs: BatchTime,
    advantages: BatchTime,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.6,
    dual_clip: float | None = 3.0,
) -> BatchTime:
    """PPO's clipped loss for replayed samples, with the ratio to the *recorded* behaviour policy and a wider upper clip.

    AgentEvolver's off-policy settings. With unchanged weights rho = 1 and the gradient is the on-policy one.
    """
    return ppo_clip(
        logprobs, behaviour_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def replay_shaped(
    logprobs: BatchTime, behaviour_logprobs: BatchTime, advantages: BatchTime, mask: Mask, *, offset: float = 0.1
) -> BatchTime:
    """- A w / (w + offset), w = exp(logprobs - behaviour_logprobs): rare tokens learn most, likely ones saturate.

    ExGRPO, arXiv 2510.02245. At w = 1 the gradient is offset / (1 + offset)^2 of the on-policy one (0.1 / 1.21).
    """
    check_mask(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    w = bounded_exp(_log_ratio(logprobs, behaviour_logprobs, mask))
    return keep(mask, -keep(mask, advantages).detach() * w / (w + offset))


def importance_weights(
    logprobs: BatchTime,
    behaviour_logprobs: BatchTime,
    mask: Mask,
    *,
    level: str,
    kind: str,
    low: float = 0.0,
    high: float,
) -> BatchTime:
    """Weights exp(logprobs - behaviour_logprobs) that correct for a sampler that is not quite the trainer. No gradient.

    level "token": one per position. "sequence": the product over the sequence, at each of its positions.
    kind "truncate": clamped to [low, high] (TIS). "mask": 0 outside [low, high] (MIS at sequence level, IcePop at token
    level). Multiply into the per-position loss; the denominator stays the count of trained positions.
    """
    check_choice("level", level, ("token", "sequence"))
    check_choice("kind", kind, ("truncate", "mask"))
    check_mask(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    if not 0 <= low <= high:
        raise ValueError(f"the band must be 0 <= low <= high, got low={low}, high={high}")
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(mask)
    weight = bounded_exp(log_ratio)
    inside = (weight >= low) & (weight <= high)
    return keep(mask, weight.clamp(low, high) if kind == "truncate" else keep(inside, weight))


def value_clip(
    values: BatchTime, old_values: BatchTime, returns: BatchTime, mask: Mask, *, clip: float | None
) -> BatchTime:
    """0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2). clip None: plain squared error, halved."""
    check_mask(mask, values=values, old_values=old_values, returns=returns)
    value, target = keep(mask, values), keep(mask, returns).detach()
    error = (value - target).square()
    if clip is not None:
        old = keep(mask, old_values).detach()
        error = torch.maximum(error, (value.clamp(old - clip, old + clip) - target).square())
    return keep(mask, 0.5 * error)


def entropy(logits: Float[Tensor, "batch time choices"], mask: Mask) -> BatchTime:
    """- sum_v pi(v) log pi(v) of each position's distribution; choices with logit -inf add 0.

    A bonus: the loss subtracts it. All choices equal: log(choices). One choice: 0.
    """
    check_mask(mask, logits=logits[..., 0])
    # A position that does not count may hold anything, -inf everywhere included: give it a harmless distribution.
    logprobs = torch.where(mask[..., None], logits, 0).log_softmax(-1)
    possible = logprobs > -torch.inf
    return keep(mask, -(logprobs.exp() * keep(possible, logprobs)).sum(-1))


def bradley_terry(chosen: Pairs, rejected: Pairs, *, margin: Pairs | float = 0.0) -> Pairs:
    """- log sigmoid(r_chosen - r_rejected - margin), per pair. Bradley & Terry 1952. Equal scores: log 2."""
    check_shape(
        tuple(chosen.shape), like="chosen", rejected=rejected, margin=margin if isinstance(margin, Tensor) else None
    )
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


def dpo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Pairs:
    """- log sigmoid(beta margin), margin = (log pi/ref)(chosen) - (log pi/ref)(rejected), on summed log-probs per pair.

    Rafailov et al. 2023, arXiv 2305.18290. With `label_smoothing` s the pair counts as swapped with probability s
    (conservative DPO). Policy equal to the reference: log 2.
    """
    check_shape(tuple(chosen.shape), like="chosen", rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    logsigmoid = torch.nn.functional.logsigmoid
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return keep(mask, logprobs) - keep(mask, old_logprobs).detach()


def _clipped(rho: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    if dual <= 1:
        raise ValueError(f"dual_clip must be larger than 1, got {dual}")
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
