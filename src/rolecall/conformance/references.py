"""The same maths as plain loops over Python floats (float64), position by position: slow, and easy to check by eye.

A row is a list of floats with a list of bools beside it. Functions take and give lists of rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Row = Sequence[float]
Mask = Sequence[bool]


def rows(function: Callable[..., list[float]], mask: Tensor, *tensors: Tensor, **options: object) -> Tensor:
    """A function of rows, applied to every row of [batch, time] tensors."""
    mask_rows = mask.tolist()
    columns = [tensor.double().tolist() for tensor in tensors]
    out = [function(*row, mask=m, **options) for *row, m in zip(*columns, mask_rows, strict=True)]
    return torch.tensor(out, dtype=torch.float64).reshape(mask.shape)


def spread(kept: Row, mask: Mask) -> list[float]:
    """Values of the positions that count put back in their places, 0 elsewhere."""
    rest = iter(kept)
    return [next(rest) if counts else 0.0 for counts in mask]


def gae(rewards: Row, values: Row, *, mask: Mask, gamma: float, lam: float, bootstrap: float = 0.0) -> list[float]:
    advantages = [0.0] * len(mask)
    next_value, next_advantage = bootstrap, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t] = next_advantage
    return advantages


def discounted_returns(rewards: Row, *, mask: Mask, gamma: float) -> list[float]:
    kept = [r for r, counts in zip(rewards, mask, strict=True) if counts]
    return spread([sum(gamma**k * r for k, r in enumerate(kept[t:])) for t in range(len(kept))], mask)


def td_lambda(
    rewards: Row, values: Row, *, mask: Mask, gamma: float, lam: float, bootstrap: float = 0.0
) -> list[float]:
    targets = [0.0] * len(mask)
    next_value = next_target = bootstrap
    for t in reversed(range(len(mask))):
        if mask[t]:
            next_target = rewards[t] + gamma * ((1 - lam) * next_value + lam * next_target)
            next_value = values[t]
            targets[t] = next_target
    return targets


def nstep(rewards: Row, values: Row, *, mask: Mask, gamma: float, n: int, bootstrap: float = 0.0) -> list[float]:
    r = [x for x, counts in zip(rewards, mask, strict=True) if counts]
    v = [x for x, counts in zip(values, mask, strict=True) if counts] + [bootstrap]
    targets = []
    for t in range(len(r)):
        end = min(t + n, len(r))
        targets.append(sum(gamma ** (k - t) * r[k] for k in range(t, end)) + gamma ** (end - t) * v[end])
    return spread(targets, mask)


def moments(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and biased variance of the values that count; (0, 0) if there are none."""
    kept = [v for v, counts in zip(x.double().flatten().tolist(), mask.flatten().tolist(), strict=True) if counts]
    if not kept:
        return 0.0, 0.0
    mean = sum(kept) / len(kept)
    return mean, sum((v - mean) ** 2 for v in kept) / len(kept)


def aggregate(x: Tensor, mask: Tensor, *, mode: str, norm: float = 1.0) -> float:
    kept = [
        [v for v, counts in zip(row, m, strict=True) if counts]
        for row, m in zip(x.double().tolist(), mask.tolist(), strict=True)
    ]
    kept = [row for row in kept if row]
    if not kept:
        return 0.0
    total = sum(sum(row) for row in kept)
    return {
        "token-mean": total / sum(len(row) for row in kept),
        "token-sum": total,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in kept) / len(kept),
        "seq-mean-token-sum": total / len(kept),
        "seq-mean-token-sum-norm": total / norm / len(kept),
    }[mode]


def place_score(score: float, mask: Mask) -> list[float]:
    rewards = [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            rewards[t] = score
            break
    return rewards


def place_turn_scores(scores: Row, turns: Sequence[int], mask: Mask) -> list[float]:
    rewards = [0.0] * len(mask)
    eligible = [t for t, counts in enumerate(mask) if counts]
    if not eligible:
        return rewards
    for turn, score in enumerate(scores):
        so_far = [t for t in eligible if turns[t] <= turn]
        rewards[so_far[-1] if so_far else eligible[0]] += score
    return rewards


def first_stop_roles(ids: Sequence[int], *, stop_ids: set[int], length: int) -> str:
    """One letter a position: C content, S the first stop, > after it, . padding."""
    letters, stopped = "", False
    for t, token in enumerate(ids):
        if t >= length:
            letters += "."
        elif stopped:
            letters += ">"
        elif token in stop_ids:
            letters, stopped = letters + "S", True
        else:
            letters += "C"
    return letters


def episode_roles(filled: Mask, terminated: Mask, truncated: Mask) -> str:
    """One letter a step, walking the episode as a runner would: C a step that was acted in, > behind it, . no episode."""
    steps = sum(filled)
    if steps == 0:
        return "." * len(filled)
    for t in range(steps):
        if terminated[t] or truncated[t]:
            return "C" * (t + 1) + ">" * (len(filled) - t - 1)
    return "C" * (steps - 1) + ">" * (len(filled) - steps + 1)
