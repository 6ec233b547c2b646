"""The maths once more, as plain loops over Python floats (float64): slow, easy to check by eye, and sharing no code with it."""

import math
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


def table(function: Callable[..., float], mask: Tensor, *tensors: Tensor) -> Tensor:
    """function(row, t) at every position that counts, 0 elsewhere; `tensors` become nested lists handed to function."""
    rows = [tensor.tolist() for tensor in tensors]
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                out[i, t] = function(*(row[i][t] for row in rows))
    return out


def mean(xs: Row) -> float:
    return math.fsum(xs) / len(xs)


def put_back(kept: Row, mask: Mask) -> list[float]:
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
    return put_back([sum(gamma**k * r for k, r in enumerate(kept[t:])) for t in range(len(kept))], mask)


def moments(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and biased variance of the values that count; (0, 0) if there are none."""
    kept = [v for v, counts in zip(x.double().flatten().tolist(), mask.flatten().tolist(), strict=True) if counts]
    if not kept:
        return 0.0, 0.0
    centre = mean(kept)
    return centre, mean([(v - centre) ** 2 for v in kept])


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


def members(groups: Sequence[int], include: Sequence[bool], i: int) -> list[int]:
    return [j for j in range(len(groups)) if groups[j] == groups[i] and include[j]]


def deviation(xs: Row) -> float:
    """Unbiased standard deviation."""
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def grpo(scores: Row, groups: Sequence[int], include: Sequence[bool], scale: str | None, eps: float) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = [scores[j] for j in members(groups, include, i)]
        if not include[i] or len(group) == 1 or len(set(group)) == 1:
            out.append(0.0)
            continue
        over = {"group": group, "batch": [s for s, ok in zip(scores, include, strict=True) if ok], None: None}[scale]
        out.append((score - mean(group)) / (1.0 if over is None else deviation(over) + eps))
    return out


def rloo(scores: Row, groups: Sequence[int], include: Sequence[bool]) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in members(groups, include, i) if j != i]
        out.append(score - mean(others) if include[i] and others else 0.0)
    return out


KL: dict[str, Callable[[float, float], float]] = {
    "k1": lambda p, q: p - q,
    "clamp": lambda p, q: max(p - q, 0.0),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    "abs": lambda p, q: abs(p - q),
}


def exact_kl(logits: Row, ref_logits: Row) -> float:
    p, q = softmax(logits), softmax(ref_logits)
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def softmax(logits: Row) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(rho: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    loss = max(-advantage * rho, -advantage * clip(rho, 1 - low, 1 + high))
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def sequence_log_ratios(logprobs: Tensor, old: Tensor, mask: Tensor, *, reduce: str) -> Tensor:
    """`reduce` ("mean" or "sum") of the log ratios of each row's positions that count, at each position of the row."""
    out = []
    for p, q, counts in zip(logprobs.tolist(), old.tolist(), mask.tolist(), strict=True):
        gaps = [a - b for a, b, count in zip(p, q, counts, strict=True) if count]
        value = math.fsum(gaps) / (len(gaps) if reduce == "mean" and gaps else 1)
        out.append([value] * len(p))
    return torch.tensor(out, dtype=torch.float64)


def importance(log_ratio: float, kind: str, low: float, high: float) -> float:
    weight = math.exp(log_ratio)
    if kind == "truncate":
        return clip(weight, low, high)
    return weight if low <= weight <= high else 0.0


def value_loss(value: float, old: float, target: float, clip_range: float | None) -> float:
    error = (value - target) ** 2
    if clip_range is not None:
        error = max(error, (clip(value, old - clip_range, old + clip_range) - target) ** 2)
    return error / 2


def entropy(logits: Row) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0)
