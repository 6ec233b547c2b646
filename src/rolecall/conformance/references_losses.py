"""Advantages, KL and losses once more, as plain loops over Python floats: slow, obvious, and sharing no code."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Numbers = Sequence[float]


def table(function: Callable[..., float], mask: Tensor, *tensors: Tensor) -> Tensor:
    """function(row, t) at every position that counts, 0 elsewhere; `tensors` become nested lists handed to function."""
    rows = [tensor.tolist() for tensor in tensors]
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                out[i, t] = function(*(row[i][t] for row in rows))
    return out


def members(groups: Sequence[int], include: Sequence[bool], i: int) -> list[int]:
    return [j for j in range(len(groups)) if groups[j] == groups[i] and include[j]]


def mean(xs: Numbers) -> float:
    return math.fsum(xs) / len(xs)


def spread(xs: Numbers) -> float:
    """Unbiased standard deviation."""
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def grpo(scores: Numbers, groups: Sequence[int], include: Sequence[bool], scale: str | None, eps: float) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = [scores[j] for j in members(groups, include, i)]
        if not include[i] or len(group) == 1 or len(set(group)) == 1:
            out.append(0.0)
            continue
        over = {"group": group, "batch": [s for s, ok in zip(scores, include, strict=True) if ok], None: None}[scale]
        out.append((score - mean(group)) / (1.0 if over is None else spread(over) + eps))
    return out


def rloo(scores: Numbers, groups: Sequence[int], include: Sequence[bool]) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in members(groups, include, i) if j != i]
        out.append(score - mean(others) if include[i] and others else 0.0)
    return out


def opo(scores: Numbers, lengths: Sequence[int], groups: Sequence[int], include: Sequence[bool]) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = members(groups, include, i)
        if not include[i]:
            out.append(0.0)
            continue
        baseline = math.fsum(lengths[j] * scores[j] for j in group) / sum(lengths[j] for j in group)
        out.append(score - baseline)
    return out


def whiten(rows: Sequence[Numbers], mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(biased variance + eps) over the positions that count, as a tensor."""
    xs = [x for row, keep in zip(rows, mask.tolist(), strict=True) for x, k in zip(row, keep, strict=True) if k]
    centre = mean(xs)
    variance = mean([(x - centre) ** 2 for x in xs])
    return table(lambda x: (x - centre) / math.sqrt(variance + eps), mask, torch.tensor(rows, dtype=torch.float64))


def returns(rewards: Tensor, mask: Tensor, gamma: float) -> list[list[float]]:
    """Discounted sums over the positions that count, as nested lists."""
    out = []
    for row, counts in zip(rewards.tolist(), mask.tolist(), strict=True):
        after = 0.0
        back: list[float] = []
        for reward, count in zip(reversed(row), reversed(counts), strict=True):
            after = reward + gamma * after if count else after
            back.append(after if count else 0.0)
        out.append(back[::-1])
    return out


KL: dict[str, Callable[[float, float], float]] = {
    "k1": lambda p, q: p - q,
    "clamp": lambda p, q: max(p - q, 0.0),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    "abs": lambda p, q: abs(p - q),
}


def exact_kl(logits: Numbers, ref_logits: Numbers) -> float:
    p, q = softmax(logits), softmax(ref_logits)
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def softmax(logits: Numbers) -> list[float]:
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


def entropy(logits: Numbers) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))
