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


def place_turn_scores(
    turn_scores: Float[Tensor, "batch turns"], turns: Int[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Each turn's score on the last eligible position of that turn; `turns` numbers the turn of every position.

    A turn without an eligible position gives its score to the last eligible position before it, or, at the start of the
    row, to the first one: nothing is lost. Rows with fewer turns than columns are filled up with 0.

        turns    0 0 1 1 1 2 2        scores 5 7 9
        mask     1 1 0 0 0 0 1        turn 1 has none, so its 7 joins turn 0
        rewards  0 12 0 0 0 0 9
    """
    check_mask(mask, turns=turns)
    batch, time = mask.shape
    check_shape((batch, turn_scores.shape[-1]), like="[batch, turns]", turn_scores=turn_scores)
    if bool((mask & ((turns < 0) | (turns >= turn_scores.shape[1]))).any()):
        raise ValueError(f"turns must lie in 0..{turn_scores.shape[1] - 1} at eligible positions: one score per turn")
    position = torch.arange(time, device=mask.device).expand(batch, time)
    # Column 0 collects positions that are not eligible, column k + 1 the last eligible position of turn k.
    last = position.new_full((batch, turn_scores.shape[1] + 1), -1)
    last = last.scatter_reduce(1, keep(mask, turns + 1), torch.where(mask, position, -1), "amax")
    last = last[:, 1:].cummax(dim=1).values
    first = mask.long().argmax(dim=1, keepdim=True)
    rewards = turn_scores.new_zeros(batch, time).scatter_add(1, torch.where(last < 0, first, last), turn_scores)
    return keep(mask, rewards)


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
