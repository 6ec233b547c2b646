"""Advantages from scores: how much better an answer is than what was to be expected.

Scores are one number per sequence, [batch]; `groups` gives the prompt each belongs to, as any integers. `include` is
False where a reward failed: such a row is left out of every mean, deviation and count, and gets 0. In every function a
flat group (all scores equal) gives exactly 0, and so does a group of one, which has nothing to be compared with.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rolecall.maths.checks import check_choice, check_mask, check_shape, keep
from rolecall.maths.reduce import masked_mean, masked_whiten
from rolecall.maths.returns import discounted_returns

Scores = Float[Tensor, "batch"]
Groups = Int[Tensor, "batch"]
Include = Bool[Tensor, "batch"] | None


def grpo(
    scores: Scores, groups: Groups, *, scale: str | None = "group", include: Include = None, eps: float = 1e-4
) -> Scores:
    """A_i = (r_i - mean of the group) / (std + eps).

    Shao et al. 2024, arXiv 2402.03300. The std is unbiased (n - 1), as in TRL and verl. scale="group": the group's own
    std. "batch": one std over all scores of the batch, so that easy and hard prompts weigh alike. None: no division,
    which is Dr. GRPO.
    """
    check_choice("scale", scale, ("group", "batch", None))
    included, index, size = _group(scores, groups, include)
    centred = _centred(scores, included, index, size)
    if scale is None:
        return centred
    if scale == "group":
        squares, count = _per_group(centred.square(), included, index, size), _counts(included, index, size)
    else:
        squares, count = _centred(scores, included, torch.zeros_like(index), 1).square().sum(), included.sum()
    variance = squares / (count - 1).clamp(min=1)
    # Without any spread the numerator is 0; 1 keeps the square root's gradient, and eps = 0, from giving NaN there.
    return centred / (torch.where(variance > 0, variance, 1).sqrt() + eps)


def dr_grpo(scores: Scores, groups: Groups, *, include: Include = None) -> Scores:
    """A_i = r_i - mean of the group: GRPO without the division by the std. Liu et al. 2025, arXiv 2503.20783.

    Goes with aggregation by a constant length (`seq-mean-token-sum-norm`).
    """
    return grpo(scores, groups, scale=None, include=include)


def rloo(scores: Scores, groups: Groups, *, include: Include = None) -> Scores:
    """A_i = r_i - mean of the *other* scores of the group = n / (n - 1) (r_i - mean of the group).

    Leave one out: the baseline does not depend on the answer, so the gradient is unbiased. Ahmadian et al. 2024, arXiv
    2402.14740.
    """
    included, index, size = _group(scores, groups, include)
    count = _counts(included, index, size)
    return _centred(scores, included, index, size) * count / (count - 1).clamp(min=1)


def opo(scores: Scores, lengths: Int[Tensor, "batch"], groups: Groups, *, include: Include = None) -> Scores:
    """A_i = r_i - sum(len_j r_j) / sum(len_j) over the group: the length-weighted baseline of least variance.

    Hao et al. 2025, arXiv 2505.23585. Equal lengths: Dr. GRPO. `lengths` counts trained positions.
    """
    check_shape(tuple(scores.shape), like="scores", lengths=lengths)
    included, index, size = _group(scores, groups, include)
    return reinforce(scores, _mean(scores, lengths, included, index, size), include=included)


def remax(scores: Scores, greedy_scores: Scores, *, include: Include = None) -> Scores:
    """A_i = r_i - score of the greedy answer to the same prompt. Li et al. 2023, arXiv 2310.10505.

    `include` must be False where either score failed.
    """
    return reinforce(scores, greedy_scores, include=include)


def reinforce(scores: Scores, baseline: Scores | float = 0.0, *, include: Include = None) -> Scores:
    """A_i = r_i - baseline. Williams 1992.

    The baseline is a number (0, `batch_mean`, an `EMABaseline`'s value) or one per sequence (`group_mean`, greedy scores).
    """
    included = _included(scores, include)
    if isinstance(baseline, Tensor):
        check_shape(tuple(scores.shape), like="scores", baseline=baseline)
        baseline = keep(included, baseline)
    return keep(included, keep(included, scores) - baseline)


def batch_mean(scores: Scores, *, include: Include = None) -> Scores:
    """The mean of all scores, for each row: a baseline for `reinforce`."""
    included = _included(scores, include)
    return _mean(scores, included, included, torch.zeros_like(scores, dtype=torch.long), 1)


def group_mean(scores: Scores, groups: Groups, *, include: Include = None) -> Scores:
    """The mean score of each row's prompt: the per-prompt baseline for `reinforce`."""
    included, index, size = _group(scores, groups, include)
    return _mean(scores, included, included, index, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class EMABaseline:
    """An exponential moving average of batch means, to subtract from the *next* batch's scores."""

    decay: float
    """How much of the old value stays, in [0, 1)."""
    value: float = 0.0
    """The baseline now."""
    started: bool = False
    """False until the first update, which sets the value instead of mixing it with 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")

    def update(self, scores: Scores, *, include: Include = None) -> "EMABaseline":
        """The baseline after this batch; unchanged if no reward of it succeeded."""
        included = _included(scores, include)
        if not bool(included.any()):
            return self
        mean = float(masked_mean(scores, included))
        value = self.decay * self.value + (1 - self.decay) * mean if self.started else mean
        return replace(self, value=value, started=True)


def reinforce_pp(
    rewards: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    gamma: float = 1.0,
    moments: tuple[Float[Tensor, ""], Float[Tensor, ""]] | None = None,
) -> Float[Tensor, "batch time"]:
    """REINFORCE++: discounted returns of the shaped token rewards, whitened over the batch. Hu 2025, arXiv 2501.03262.

    Needs token rewards (`shaping.shape_rewards`, with KL inside), not scores, because KL differs by token. `moments`
    are of the returns, over all ranks.
    """
    return masked_whiten(discounted_returns(rewards, mask, gamma=gamma), mask, moments=moments)


def reinforce_pp_baseline(
    scores: Scores,
    groups: Groups,
    mask: Bool[Tensor, "batch time"],
    *,
    include: Include = None,
    moments: tuple[Float[Tensor, ""], Float[Tensor, ""]] | None = None,
) -> Float[Tensor, "batch time"]:
    """REINFORCE++-baseline: subtract the group's mean, then whiten over all trained tokens of the batch.

    A batch of flat groups stays exactly 0. Rows left out by `include` are left out of the moments as well.
    """
    check_mask(mask)
    check_shape(tuple(mask.shape[:1]), like="the mask's batch", scores=scores)
    centred = dr_grpo(scores, groups, include=include)
    counted = mask & _included(scores, include)[:, None]
    return masked_whiten(centred[:, None].expand_as(mask), counted, moments=moments)


def flat_groups(scores: Scores, groups: Groups, *, include: Include = None) -> Bool[Tensor, "batch"]:
    """True for rows whose group has no two different scores (a group of one included). Rows left out are never flat."""
    included, index, size = _group(scores, groups, include)
    low, high = _range(scores, included, index, size)
    return included & (low == high)


def _included(scores: Tensor, include: Tensor | None) -> Tensor:
    included = torch.ones_like(scores, dtype=torch.bool) if include is None else include
    check_shape(tuple(scores.shape), like="scores", include=included)
    check_mask(included)
    return included


def _group(scores: Tensor, groups: Tensor, include: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """(included rows, each row's group as 0..size-1, number of groups)."""
    check_shape(tuple(scores.shape), like="scores", groups=groups)
    names, index = torch.unique(groups, return_inverse=True)
    return _included(scores, include), index, len(names)


def _per_group(x: Tensor, included: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum over each row's group of x at included rows, given back to every row."""
    return x.new_zeros(size).index_add(0, index, keep(included, x))[index]


def _counts(included: Tensor, index: Tensor, size: int) -> Tensor:
    return _per_group(included.long(), included, index, size)


def _mean(scores: Tensor, weight: Tensor, included: Tensor, index: Tensor, size: int) -> Tensor:
    """Weighted group means, in which the mean of equal scores is exactly that score (0.1 + 0.1 + 0.1 is not 3 times 0.1)."""
    weight = weight.to(scores.dtype)
    total = _per_group(weight, included, index, size)
    mean = _per_group(weight * scores, included, index, size) / total.clamp(min=1)
    low, high = _range(scores, included, index, size)
    return torch.where(low == high, low, mean)


def _centred(scores: Tensor, included: Tensor, index: Tensor, size: int) -> Tensor:
    return reinforce(scores, _mean(scores, included, included, index, size), include=included)


def _range(scores: Tensor, included: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest included score of each row's group; (inf, -inf) where none is included."""
    low, high = scores.new_full((size,), torch.inf), scores.new_full((size,), -torch.inf)
    low = low.scatter_reduce(0, index, torch.where(included, scores, torch.inf), "amin")
    high = high.scatter_reduce(0, index, torch.where(included, scores, -torch.inf), "amax")
    return low[index], high[index]
