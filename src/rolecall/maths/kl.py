"""KL divergence from the policy to a reference: per-token estimates, the exact value, and the coefficient over time.

Here x = log pi(token) - log ref(token) for a token the *policy* sampled, so E[x] = KL(pi || ref).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rolecall.maths.checks import check_choice, check_mask, check_shape, keep

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp, so that a broken record gives a large number and never inf."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp of a log ratio clamped to [-20, 20]. Outside, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k1(x: Tensor) -> Tensor:
    return x


def _clamp(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x.square()


def _k3(x: Tensor) -> Tensor:
    # Both terms stop at -20: with the exponential alone the + x would be left, whose gradient has the wrong sign.
    x = x.clamp(min=-MAX_LOG_RATIO)
    return torch.exp(-x) - 1 + x


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "clamp": _clamp, "k2": _k2, "k3": _k3, "abs": torch.abs}
KINDS = tuple(_KINDS)


def kl_estimate(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    kind: str,
    straight_through: bool = False,
) -> Float[Tensor, "batch time"]:
    """KL(pi || ref) estimated at each token sampled from pi.

    | kind  | value            | what it is                                                                            |
    |-------|------------------|---------------------------------------------------------------------------------------|
    | k1    | x                | unbiased, can be negative. As a loss its gradient is 0 in expectation.                |
    | clamp | max(x, 0)        | AlpacaFarm: charges only tokens made *more* likely than the reference has them        |
    | k2    | x^2 / 2          | biased value, but its gradient is the unbiased gradient of KL(pi || ref)              |
    | k3    | exp(-x) - 1 + x  | unbiased, never negative. As a loss it descends KL(ref || pi) instead.                |
    | abs   | |x|              | a penalty, not an estimate                                                            |

    Schulman 2020, "Approximating KL divergence". With `straight_through` the value is that of `kind` and the gradient
    that of k2: use it for a KL term in the loss. It changes nothing for KL in the reward, which has no gradient.
    """
    check_choice("kind", kind, KINDS)
    check_mask(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    x = keep(mask, logprobs) - keep(mask, ref_logprobs)
    value = _KINDS[kind](x)
    if straight_through:
        k2 = _k2(x)
        value = value.detach() + (k2 - k2.detach())  # the bracket is exactly 0, so the value is exactly that of `kind`
    return keep(mask, value)


def exact_kl(
    logits: Float[Tensor, "*shape vocab"], ref_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(pi || ref) = sum_v pi(v) (log pi(v) - log ref(v)) over the whole vocabulary.

    Entries with pi(v) = 0 (logit -inf) add 0; an entry that pi allows and the reference forbids gives inf, as it should.
    """
    check_shape(tuple(logits.shape), like="logits", ref_logits=ref_logits)
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    possible = logprobs > -torch.inf
    gap = keep(possible, logprobs - ref_logprobs)
    return (logprobs.exp() * gap).sum(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedKL:
    """A KL coefficient that stays."""

    coef: float

    def update(self, kl: float, *, samples: int) -> "FixedKL":
        """Itself, whatever was observed."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveKL:
    """A KL coefficient that steers the observed KL per sequence towards a target.

        error = clip(kl / target - 1, -0.2, 0.2)        coef <- coef (1 + error samples / horizon)

    Ziegler et al. 2019, arXiv 1909.08593. On target it stays; it moves by at most 0.2 samples / horizon at a time.
    """

    coef: float
    """The coefficient now."""
    target: float
    """The KL per sequence to hold (sum over its positions, mean over sequences)."""
    horizon: float
    """How many samples it takes to react."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target and horizon must be positive, got target={self.target}, horizon={self.horizon}")

    def update(self, kl: float, *, samples: int) -> "AdaptiveKL":
        """The controller after `samples` sequences whose mean KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))
