"""From scores to rewards: one number per sequence becomes rewards at positions.

The score sits on the last *eligible* position, so that under every rule sum(rewards) == score + KL part. A row without
an eligible position has nowhere to put it: its rewards are 0, and `untrainable` names it so that it is counted.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rolecall.maths.checks import check_bool, check_mask, check_shape, keep


def untrainable(mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch"]:
    """Rows without any eligible position: their score cannot be placed."""
    check_mask(mask)
    return ~mask.any(dim=1)


def last_eligible(mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """True at the last eligible position of each row, and nowhere else."""
    check_mask(mask)
    after = mask.flip(1).cumsum(dim=1).flip(1)
    return mask & (after == 1)


def place_scores(scores: Float[Tensor, "batch"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Each score on the last eligible position of its row."""
    check_mask(mask)
    check_shape(tuple(mask.shape[:1]), like="the batch", scores=scores)
    return keep(last_eligible(mask), scores[:, None])


def shape_rewards(
    scores: Float[Tensor, "batch"],
    kl: Float[Tensor, "batch time"] | None,
    mask: Bool[Tensor, "batch time"],
    *,
    kl_coef: float,
) -> Float[Tensor, "batch time"]:
    """rewards_t = - kl_coef kl_t, plus the score at the last eligible position. Stiennon et al. 2020, arXiv 2009.01325.

    kl None or kl_coef 0: the score alone.
    """
    rewards = place_scores(scores, mask)
    check_mask(mask, kl=kl)
    if kl is None or kl_coef == 0:
        return rewards
    return rewards - kl_coef * keep(mask, kl)


def overlong_penalty(lengths: Int[Tensor, "batch"], *, max_length: int, buffer: int) -> Float[Tensor, "batch"]:
    """A soft length limit to add to scores: 0 up to max_length - buffer, then falling linearly to -1 at max_length.

    DAPO's overlong shaping, Yu et al. 2025, arXiv 2503.14476.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must lie in 1..max_length, got buffer={buffer}, max_length={max_length}")
    over = (lengths - (max_length - buffer)).to(torch.get_default_dtype())
    return -(over / buffer).clamp(0, 1)


def missing_stop_penalty(
    scores: Float[Tensor, "batch"], stopped: Bool[Tensor, "batch"], *, penalty: float
) -> Float[Tensor, "batch"]:
    """Scores, less `penalty` for answers that did not end themselves."""
    check_shape(tuple(scores.shape), like="scores", stopped=stopped)
    check_bool(stopped=stopped)
    return torch.where(stopped, scores, scores - penalty)


def clip_scores(scores: Float[Tensor, "batch"], *, limit: float) -> Float[Tensor, "batch"]:
    """Scores within [-limit, limit]."""
    if limit <= 0:
        raise ValueError(f"limit must be positive, got {limit}")
    return scores.clamp(-limit, limit)
