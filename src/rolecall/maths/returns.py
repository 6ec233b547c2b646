"""Returns and advantages along time: GAE, discounted returns, n-step and TD(lambda) targets.

All of them walk the positions that count and nothing else: a tool's output between two tokens of an answer is neither a
step nor a discount. (Where time passes at every step, as for agents in an environment, the mask is of the steps that
happened, and what an agent chose is a matter of the loss: `marl.returns`.) So the positions that count are moved to the front of their row, the recurrence runs there with a
constant discount, and the result is moved back:

    mask      1 1 0 0 0 1 1           slots     1 2 0 0 0 3 4       (slot 0 collects what does not count)
    rewards   a b - - - c d           front     [-] a b c d B 0 0 0

After the last position of a sequence that was cut off comes one more step, whose reward and value are both the
bootstrap value B: its own advantage is 0, and the step before it sees V_{t+1} = B. Without a bootstrap B is 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rolecall.maths.checks import BatchTime, Mask, check_mask, check_shape, keep

_BLOCK = 64
Slots = Int[Tensor, "batch time"]
Bootstrap = Float[Tensor, "batch"] | None
"""The value after the last position of sequences that were cut off, 0 for those that ended; None: all ended."""


def gae(
    rewards: BatchTime, values: BatchTime, mask: Mask, *, gamma: float, lam: float, bootstrap: Bootstrap = None
) -> tuple[BatchTime, BatchTime]:
    """Generalised advantage estimation, raw (not whitened), and the returns to fit the critic to.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

    where t + 1 is the next position that counts. V after the last one is 0, or `bootstrap` for a sequence that was cut
    off rather than ended. Schulman et al. 2015, arXiv 1506.02438. lam = 1: discounted return minus value. lam = 0: the
    one-step TD error. gamma = lam = 1: reward to go minus value. One position: r - V.
    """
    check_mask(mask, rewards=rewards, values=values)
    slots = _slots(mask)
    advantages = _from_front(_suffix_sum(_deltas(rewards, values, slots, gamma, bootstrap), gamma * lam), slots)
    return advantages, advantages + keep(mask, values)


def discounted_returns(rewards: BatchTime, mask: Mask, *, gamma: float) -> BatchTime:
    """G_t = r_t + gamma G_{t+1} over the positions that count. gamma = 1: reward to go. gamma = 0: the rewards."""
    check_mask(mask, rewards=rewards)
    slots = _slots(mask)
    return _from_front(_suffix_sum(_to_front(rewards, slots)[:, :-1], gamma), slots)


def td_lambda_targets(
    rewards: BatchTime, values: BatchTime, mask: Mask, *, gamma: float, lam: float, bootstrap: Bootstrap = None
) -> BatchTime:
    """The lambda-return G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), V and G after the end 0 or `bootstrap`.

    Sutton & Barto 2018, ch. 12. It is the GAE advantage plus the value. lam = 0: one-step target. lam = 1: discounted return.
    """
    return gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)[1]


def nstep_targets(
    rewards: BatchTime, values: BatchTime, mask: Mask, *, gamma: float, n: int, bootstrap: Bootstrap = None
) -> BatchTime:
    """G_t = r_t + gamma r_{t+1} + ... + gamma^n V_{t+n}, over the positions that count.

    Fewer than n steps before the end: all the rewards that are left, then 0 or `bootstrap`, so no value of a position
    after the end enters. n = 1: the one-step target. n >= time: the discounted return.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 step, got {n}")
    check_mask(mask, rewards=rewards, values=values)
    slots = _slots(mask)
    reward, target = _to_front(rewards, slots, bootstrap), _to_front(values, slots, bootstrap)
    for _ in range(min(n, mask.shape[1])):
        target = reward + gamma * torch.nn.functional.pad(target[:, 1:], (0, 1))
    return _from_front(target, slots)


def _deltas(rewards: BatchTime, values: BatchTime, slots: Slots, gamma: float, bootstrap: Bootstrap) -> BatchTime:
    """r_t + gamma V_{t+1} - V_t, at the front. A function of its own so that what it fills is freed after it."""
    value = _to_front(values, slots, bootstrap)
    return torch.add(_to_front(rewards, slots, bootstrap)[:, :-1], value[:, 1:], alpha=gamma) - value[:, :-1]


def _slots(mask: Mask) -> Slots:
    """1, 2, 3, … for the positions that count, in order; 0 for the others."""
    return mask.cumsum(dim=1).mul_(mask)


def _to_front(x: BatchTime, slots: Slots, bootstrap: Bootstrap = None) -> Float[Tensor, "batch time+1"]:
    """The positions that count, moved to the front of their row; after them the bootstrap value, then zeros."""
    batch, time = x.shape
    if bootstrap is None:
        # Filled in place: at [512, 1024] faulting in the pages of one more temporary costs as much as the arithmetic.
        return x.new_zeros(batch, time + 2).scatter_(1, slots, x)[:, 1:]
    check_shape((batch,), like="the batch", bootstrap=bootstrap)
    dtype = torch.promote_types(x.dtype, bootstrap.dtype)
    count = (slots > 0).sum(dim=1, keepdim=True)
    after = keep(count > 0, bootstrap[:, None]).to(dtype)
    front = x.new_zeros(batch, time + 2, dtype=dtype).scatter_(1, slots, x.to(dtype)).scatter(1, count + 1, after)
    return front[:, 1:]


def _from_front(front: Float[Tensor, "batch steps"], slots: Slots) -> BatchTime:
    """The way back: each position takes the entry of its slot; 0 at positions that do not count."""
    return torch.nn.functional.pad(front, (1, 0)).gather(1, slots)


def _suffix_sum(x: BatchTime, discount: float) -> BatchTime:
    """y_t = x_t + discount y_{t+1}, linear in time.

    Inside blocks of 64 positions it is a product with the lower-triangular matrix of powers. What a block takes over
    from the block after it is y at that block's first position, which is again a suffix sum, over blocks. A Python
    loop over positions takes several times as long (benchmarks/gae.py).
    """
    batch, time = x.shape
    blocks = -(-time // _BLOCK)
    if blocks * _BLOCK > time:
        x = torch.nn.functional.pad(x, (0, blocks * _BLOCK - time))
    steps = torch.arange(_BLOCK, dtype=torch.float64, device=x.device)
    gap = steps[:, None] - steps
    powers = torch.where(gap >= 0, discount ** gap.clamp(min=0), 0.0).to(x.dtype)
    y = (x.reshape(-1, _BLOCK) @ powers).view(batch, blocks, _BLOCK)
    if blocks > 1:
        after = torch.nn.functional.pad(_suffix_sum(y[:, 1:, 0], discount**_BLOCK), (0, 1))
        y = torch.addcmul(y, after[:, :, None], (discount ** (_BLOCK - steps)).to(x.dtype))
    return y.flatten(1)[:, :time]
