"""KL to a reference: values, and gradients by enumerating every token that could have been sampled.

For a policy pi = softmax(theta) over four tokens, x_a = log pi(a) - log ref(a) and KL = sum_a pi(a) x_a, the gradient
that a KL penalty should follow is d KL / d theta_k = pi_k (x_k - KL).
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolecall.conformance import references
from rolecall.conformance.compare import batches, bits, close, gradients, ignores_rubbish, reals

Function = Callable[..., Tensor]
KINDS = pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
THETA, REF = reals(0.5, -0.2, 1.0, 0.1), reals(0.1, 0.6, -0.3, 0.2).log_softmax(0)
ONE = bits("1")


def _kl_gradient() -> Tensor:
    pi = THETA.softmax(0)
    x = pi.log() - REF
    return pi * (x - (pi * x).sum())


def _expected_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """E over tokens of the policy of d loss(log pi(a), log ref(a)) / d theta; the probabilities get no gradient."""
    pi = THETA.softmax(0)

    def expected(theta: Tensor) -> Tensor:
        logprobs = theta.log_softmax(0)
        return torch.stack([pi[a] * loss(logprobs[a].view(1, 1), REF[a].view(1, 1)).sum() for a in range(4)]).sum()

    return gradients(expected, THETA)[0]


@KINDS
def test_kl_value(kl_estimate: Function, kind: str) -> None:
    """The estimate at random tokens, against the formula in float64."""
    for batch in batches(holes=True):
        p, q, mask = batch.logprobs(), batch.logprobs(), batch.mask
        near = mask & ((p - q).abs() < 2)
        close(kl_estimate(p, q, mask, kind=kind), references.table(references.KL[kind], mask, p, q), near)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_value_is_unbiased(kl_estimate: Function, kind: str) -> None:
    """The mean of k1 or k3 over every token, weighted by the policy, is the KL from policy to reference, not back."""
    logprobs = THETA.log_softmax(0)
    values = kl_estimate(logprobs[:, None], REF[:, None], torch.ones(4, 1, dtype=torch.bool), kind=kind)
    close((logprobs.exp() * values[:, 0]).sum(), references.exact_kl(THETA.tolist(), REF.tolist()))


@KINDS
def test_kl_gradient_of_the_formula(kl_estimate: Function, kind: str) -> None:
    """Without straight-through the gradient is that of the formula: 1, x, 1 - exp(-x)."""
    x = 0.7
    slope = {"k1": 1.0, "k2": x, "k3": 1 - math.exp(-x)}[kind]
    (got,) = gradients(lambda p: kl_estimate(p, reals([-1.7]), ONE, kind=kind), reals([-1.0]))
    close(got, reals([slope]))


@KINDS
def test_kl_straight_through_gradient(kl_estimate: Function, kind: str) -> None:
    """With straight-through, every kind has the gradient of KL(policy || reference), by enumeration."""
    got = _expected_gradient(lambda p, q: kl_estimate(p, q, ONE, kind=kind, straight_through=True))
    close(got, _kl_gradient())


@KINDS
def test_kl_straight_through_value(kl_estimate: Function, kind: str) -> None:
    """With straight-through, the value stays that of the kind."""
    p, q = reals([-1.0]), reals([-1.7])
    close(kl_estimate(p, q, ONE, kind=kind, straight_through=True), reals([references.KL[kind](-1.0, -1.7)]))


def test_kl_in_loss_gradient(kl_in_loss: Function) -> None:
    """The KL term of the loss, as it is by default, follows the gradient of KL(policy || reference)."""
    close(_expected_gradient(lambda p, q: kl_in_loss(p, q, ONE)), _kl_gradient())


def test_kl_in_reward_gradient(kl_in_reward: Function) -> None:
    """The KL subtracted from rewards, as it is by default, leads the policy gradient down KL(policy || reference)."""
    close(_expected_gradient(lambda p, q: kl_in_reward(p, q, ONE).detach() * p), _kl_gradient())


def test_kl_of_a_lost_token_is_finite(kl_estimate: Function) -> None:
    """k3 where the policy has all but lost a token: finite, and its slope does not push the token further down."""
    p, q = reals([-1000.0]), reals([-1.0])
    value = kl_estimate(p, q, ONE, kind="k3")
    assert bool(torch.isfinite(value).all()), f"the value is {float(value):g}"
    (slope,) = gradients(lambda x: kl_estimate(x, q, ONE, kind="k3"), p)
    assert float(slope) <= 0, f"the slope is {float(slope):g}"


@KINDS
def test_kl_ignores_rubbish(kl_estimate: Function, kind: str) -> None:
    """NaN log-probs in padding reach neither the loss built from the estimate nor its gradient."""
    mask = bits("110", "100")
    p, q = reals([-1, -2, -3], [-1, -1, -1]), reals([-2, -1, -3], [-2, -1, -1])
    ignores_rubbish(lambda a, b: kl_estimate(a, b, mask, kind=kind), mask, p, q)
