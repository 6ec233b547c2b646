"""Credit for the turns of an episode: which of them made the outcome better than that of the group.

Turns are columns, [batch, turns]; `steps` is True where an episode has a turn. What is computed for a turn holds for each of
its positions. As with scores, rows that `include` leaves out count nowhere and get 0, and where nothing differs the result is
exactly 0.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rolecall.maths.advantages import grpo
from rolecall.maths.checks import check_choice, check_mask, check_shape, keep
from rolecall.maths.returns import discounted_returns

SUCCESS = 0.5
"""Scores above it are successes, for `adca` with allocation."""
INCONSISTENT = 0.2
"""adca with allocation: the weight of a step that was judged against the outcome; one that agrees with it has 1."""

PerTurn = Float[Tensor, "batch turns"]
Steps = Bool[Tensor, "batch turns"]
Scores = Float[Tensor, "batch"]
Groups = Int[Tensor, "batch"]


def by_turn(
    x: Tensor, turns: Int[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> tuple[Tensor, Bool[Tensor, "batch turns"]]:
    """[batch, turns] what the positions of each turn say, which all say the same; and which turns there are.

    turns  0 0 . 1 1        x  5 5 . 7 7        mask  1 1 0 1 1        gives  5 7, and 1 1
    """
    check_mask(mask, x=x, turns=turns)
    count = int(torch.where(mask, turns, -1).max()) + 1
    batch, position = mask.shape[0], torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = position.new_full((batch, count + 1), -1)  # column 0 collects the other positions
    last = last.scatter_reduce(1, keep(mask, turns + 1), torch.where(mask, position, -1), "amax")[:, 1:]
    steps = last >= 0
    return keep(steps, x.gather(1, last.clamp(min=0))), steps


def at_positions(per_turn: PerTurn, turns: Int[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Tensor:
    """[batch, time] what holds for a turn at each of its positions; the inverse of `by_turn`."""
    return keep(mask, per_turn.gather(1, keep(mask, turns)))


def turn_rewards(scores: Scores, given: PerTurn, steps: Steps) -> PerTurn:
    """Rewards of turns that add up to the score: what an environment gave for each, and the rest of it on the last one.

    given 1 0 2, score 5: 1 0 4. An environment that only scores the end: 0 0 5.
    """
    check_shape(tuple(steps.shape), like="[batch, turns]", given=given)
    given = keep(steps, given)
    last = steps & (steps.flip(1).cumsum(dim=1).flip(1) == 1)
    return given + keep(last, (scores - given.sum(dim=1))[:, None])


def turn_grpo(
    rewards: PerTurn, steps: Steps, groups: Groups, *, gamma: float, scale: str | None = "group", include: Tensor
) -> PerTurn:
    """A_t = (R_t - mean) / (std + eps) with R_t = sum of gamma^(k - t) r_k, k >= t: GRPO of what follows a turn.

    Mean and deviation are of all turns of the group, each episode with the same weight. gamma 1 and a reward at the end
    alone: GRPO. gamma < 1: of two episodes that end equally well the shorter is better.
    """
    check_choice("scale", scale, ("group", None))
    returns = discounted_returns(rewards, steps, gamma=gamma)
    return _standardised(returns, steps, groups, include, scale=scale, lost=1, eps=1e-4)


def adca(
    scores: Scores,
    groups: Groups,
    marks: PerTurn,
    steps: Steps,
    *,
    alpha: float,
    allocate: bool = False,
    include: Tensor,
) -> PerTurn:
    """A_t = sum over k >= t of alpha z_k, plus z of the score: step marks and the outcome, each in deviations of its group.

    ADCA-GRPO of AgentEvolver (Zhai et al. 2025, arXiv 2511.10395). Marks judge steps, more is better; where they are NaN
    the episode has none. Decoupled: z of the marks. `allocate`: marks above 0 are good, the others bad; each episode first
    spreads +1 (a success) or -1 over its steps, five times as much on those whose mark agrees with the outcome, and z is of
    these. Deviations are those of the population. alpha 0: GRPO, with that deviation.
    """
    check_shape(tuple(steps.shape), like="[batch, turns]", marks=marks)
    check_shape(tuple(scores.shape), like="scores", groups=groups, include=include)
    judged = steps & ~marks.isnan() & include[:, None]
    given = keep(judged, marks)
    if allocate:
        success = (scores > SUCCESS)[:, None]
        weights = keep(judged, torch.where((given > 0) == success, 1.0, INCONSISTENT).to(marks.dtype))
        given = torch.where(success, weights, -weights) / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)
    z = _standardised(given, judged, groups, include, scale="group", lost=0, eps=0.0)
    outcome = _standardised(scores[:, None], include[:, None], groups, include, scale="group", lost=0, eps=0.0)
    to_come = (alpha * z).flip(1).cumsum(dim=1).flip(1)
    return keep(steps & include[:, None], to_come + outcome)


def gigpo(
    scores: Scores,
    groups: Groups,
    rewards: PerTurn,
    states: Int[Tensor, "batch turns"],
    steps: Steps,
    *,
    gamma: float,
    weight: float,
    scale: str | None = "group",
    include: Tensor,
) -> PerTurn:
    """A_t = A of the episode + weight x A of the step: GiGPO, Feng et al. 2025, arXiv 2505.10978.

    The episode's is GRPO's. A step's is (R_t - mean) / (std + eps) among the turns of its group that were taken in the same
    state, R_t = sum of gamma^(k - t) r_k. A state that was met once has nothing to compare: 0. weight 0: GRPO.
    """
    check_choice("scale", scale, ("group", None))
    check_shape(tuple(steps.shape), like="[batch, turns]", rewards=rewards, states=states)
    counted = steps & include[:, None]
    returns = discounted_returns(rewards, steps, gamma=gamma)
    row, turn = counted.nonzero(as_tuple=True)
    met = torch.stack([groups[row], states[row, turn]], dim=1)
    same = torch.unique(met, dim=0, return_inverse=True)[1] if len(met) else row
    compared = torch.zeros_like(returns).index_put((row, turn), grpo(returns[row, turn], same, scale=scale))
    whole = grpo(scores, groups, scale=scale, include=include)
    return keep(counted, whole[:, None] + weight * compared)


def _standardised(
    x: PerTurn, steps: Steps, groups: Groups, include: Tensor, *, scale: str | None, lost: int, eps: float
) -> PerTurn:
    """(x - mean) / (std + eps) over the steps of each group. An episode counts once, whatever its number of steps:

    mean = mean over episodes of their mean        variance = sum over episodes of their mean (x - mean)^2 / (n - lost)
    """
    check_shape(tuple(x.shape[:1]), like="the batch", groups=groups, include=include)
    counted = steps & include[:, None]
    names, index = torch.unique(groups, return_inverse=True)
    there = counted.any(dim=1)
    share = counted.to(x.dtype) / counted.sum(dim=1, keepdim=True).clamp(min=1)

    def of_group(rows: Tensor) -> Tensor:
        return rows.new_zeros(len(names)).index_add(0, index, rows)[index]

    episodes = of_group(there.to(x.dtype))
    known = keep(counted, x)
    mean = of_group((share * known).sum(dim=1)) / episodes.clamp(min=1)
    low = x.new_full((len(names),), torch.inf).scatter_reduce(
        0, index, torch.where(counted, x, torch.inf).amin(dim=1), "amin"
    )[index]
    high = x.new_full((len(names),), -torch.inf).scatter_reduce(
        0, index, torch.where(counted, x, -torch.inf).amax(dim=1), "amax"
    )[index]
    mean = torch.where(low == high, low, mean)  # the mean of equal numbers is that number
    centred = keep(counted, known - torch.where(there, mean, 0)[:, None])
    if scale is None:
        return centred
    variance = of_group((share * centred.square()).sum(dim=1)) / (episodes - lost).clamp(min=1)
    return centred / (torch.where(variance > 0, variance, 1).sqrt() + eps)[:, None]
