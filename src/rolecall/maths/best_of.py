"""The expected score of the best of k answers, from n >= k answers."""

from math import comb, log

import torch
from jaxtyping import Float
from torch import Tensor

from rolecall.maths.checks import check_shape


def expected_best(scores: Float[Tensor, "n"], *, k: int, values: Float[Tensor, "n"] | None = None) -> Float[Tensor, ""]:
    """The mean, over all ways to draw k of the n answers, of the value of the one that scores highest.

        sum over i of  C(i - 1, k - 1) / C(n, k)  value_(i)        with the answers in ascending order of score

    The unbiased estimate of best-of-k that uses every answer. k = 1: the mean value; k = n: the value of the best. Equal
    scores share their chance. `values` are the scores themselves if not given; giving another judge's scores tells what
    answers chosen by the first are worth to the second. Scores of 0 and 1: pass@k (Chen et al. 2021, arXiv 2107.03374).
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1..{n}, the number of answers, got {k}")
    check_shape(tuple(scores.shape), like="scores", values=values)
    held = (scores if values is None else values).double()
    order = scores.argsort(stable=True)
    _, sizes = scores[order].unique_consecutive(return_counts=True)
    total, below = torch.zeros((), dtype=torch.float64), 0
    for size in sizes.tolist():
        # The best of k lies among these equals with the probability that all k lie up to here but not all below.
        chance = (comb(below + size, k) - comb(below, k)) / comb(n, k)
        total = total + chance * held[order[below : below + size]].mean()
        below += size
    return total


def best_of_kl(n: int) -> float:
    """log n - (n - 1) / n: an upper bound of the KL from best-of-n to the policy it draws from, in nats per answer.

    Beirami et al. 2024, arXiv 2401.01879 (it is often given as the KL itself). n = 1: 0.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return log(n) - (n - 1) / n
