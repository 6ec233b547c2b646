"""Loops for what the conformance cases do not ask of other libraries, as those in `rolecall.conformance.references`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rolecall.conformance.references import Mask, Row, members, moments, put_back


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
    return put_back(targets, mask)


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


def opo(scores: Row, lengths: Sequence[int], groups: Sequence[int], include: Sequence[bool]) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = members(groups, include, i)
        if not include[i]:
            out.append(0.0)
            continue
        baseline = math.fsum(lengths[j] * scores[j] for j in group) / sum(lengths[j] for j in group)
        out.append(score - baseline)
    return out


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(biased variance + eps) over the positions that count."""
    centre, variance = moments(x, mask)
    return torch.where(mask, (x - centre) / math.sqrt(variance + eps), 0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))
