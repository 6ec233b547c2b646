"""Log-probs, policy, value and preference losses, importance weights and entropy."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolecall.conformance import references
from rolecall.conformance.compare import batches, bits, close, gradients, ignores_rubbish, reals

Function = Callable[..., Tensor]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
IDS = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
LOGITS = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_logprobs_belong_to_their_token(token_logprobs: Function) -> None:
    """The log-prob at t is of token t and comes from the logits at t - 1."""
    table = LOGITS.log_softmax(-1).tolist()
    expected = [[0.0] + [table[i][t - 1][IDS[i, t]] for t in range(1, 4)] for i in range(2)]
    close(token_logprobs(LOGITS, IDS), reals(*expected), bits("0111", "0111"))


def test_logprobs_are_of_the_sampling_temperature(token_logprobs: Function) -> None:
    """A temperature divides the logits before the softmax, not the log-probs after it."""
    expected = token_logprobs(LOGITS / 0.5, IDS)
    close(token_logprobs(LOGITS.clone(), IDS, temperature=0.5), expected, bits("0111", "0111"))


def test_sft_loss_golden(sft_loss: Function) -> None:
    """Minus the mean log-prob of exactly the tokens that count; a uniform model gives log 3."""
    close(sft_loss(torch.zeros_like(LOGITS), IDS, bits("0110", "0001")), math.log(3))
    table = LOGITS.log_softmax(-1)
    close(sft_loss(LOGITS, IDS, bits("0110", "0001")), -(table[0, 0, 1] + table[0, 1, 2] + table[1, 2, 1]) / 3)


def test_sft_gradient_is_at_the_position_before(sft_loss: Function) -> None:
    """The gradient of a token that counts reaches the logits one position before it, and no others."""
    (got,) = gradients(lambda logits: sft_loss(logits, IDS, bits("0010", "0001")), LOGITS)
    assert got.abs().sum(-1).gt(0).tolist() == bits("0100", "0010").tolist()


def test_policy_loss_golden(policy_loss: Function) -> None:
    """Ratios 1, 1.5 and 0.5 with advantages of both signs, by hand."""
    ratios, mask = reals([1, 1.5, 0.5], [1.5, 0.5, 7]), bits("111", "110")
    advantages = reals([1, 1, 1], [-1, -1, 9])
    got = policy_loss(ratios.log() - 1, torch.full_like(ratios, -1), advantages, mask, **CLIP)
    close(got, (-1 - 1.3 - 0.5 + 1.5 + 0.8) / 5)


def test_policy_gradient_is_zero_where_clipped(policy_loss: Function) -> None:
    """Beyond the clip range in the good direction the gradient is 0; in the bad direction it stays."""
    ratios = reals([1.5, 0.5, 1.5, 0.5])
    advantages, mask = reals([1, 1, -1, -1]), bits("1111")
    old = torch.full_like(ratios, -1)
    (got,) = gradients(lambda p: policy_loss(p, old, advantages, mask, **CLIP), ratios.log() - 1)
    close(got, reals([0, -0.5, 1.5, 0]) / 4)


def test_policy_gradient_on_policy_is_reinforce(policy_loss: Function) -> None:
    """At ratio 1 the gradient at a token is - A / tokens; advantages and old log-probs get none."""
    for batch in batches(holes=True):
        p, advantages, mask = batch.logprobs(), batch.real(), batch.mask
        (got,) = gradients(lambda q, p=p, a=advantages, m=mask: policy_loss(q, p, a, m, **CLIP), p)
        close(got, torch.where(mask, -advantages, 0) / mask.sum())


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_policy_loss_equals_the_loop(policy_loss: Function, dual_clip: float | None) -> None:
    """Random tokens, against a loop in float64, with and without dual clip."""
    for batch in batches(holes=True):
        p, old, advantages, mask = batch.logprobs(), batch.logprobs(), batch.real(), batch.mask
        loss = lambda a, b, c: references.surrogate(math.exp(a - b), c, 0.2, 0.3, dual_clip)
        expected = references.table(loss, mask, p, old, advantages).sum() / mask.sum()
        close(policy_loss(p, old, advantages, mask, **CLIP, dual_clip=dual_clip), expected)


def test_dual_clip_bounds_a_bad_token(policy_loss: Function) -> None:
    """Ratio 10 with advantage -1 costs at most the dual clip, without gradient; positive advantages are not touched."""
    function = lambda p: policy_loss(p, reals([-5, -5]), reals([-1, 1]), bits("11"), **CLIP, dual_clip=2.0)
    p = reals([math.log(10) - 5, -5])
    close(function(p), (2 - 1) / 2)
    close(gradients(function, p)[0], reals([0, -0.5]))


def test_policy_loss_of_a_broken_record_is_finite(policy_loss: Function) -> None:
    """A log ratio of 1000, from a record that does not fit its token, gives a large loss and not inf or NaN."""
    function = lambda p: policy_loss(p, reals([-1001, -1]), reals([-1, 1]), bits("11"), **CLIP)
    p = reals([-1, -1])
    for found in (function(p), *gradients(function, p)):
        assert bool(torch.isfinite(found).all()), f"got {found.tolist()}"


def test_policy_loss_of_one_token(policy_loss: Function) -> None:
    """An answer of one token, alone in its batch."""
    close(policy_loss(reals([-1]), reals([-1]), reals([3]), bits("1"), **CLIP), -3.0)


def test_policy_loss_of_nothing(policy_loss: Function) -> None:
    """With nothing to train the loss is 0, not NaN."""
    close(policy_loss(reals([-1]), reals([-1]), reals([3]), bits("0"), **CLIP), 0.0)


def test_policy_loss_ignores_rubbish(policy_loss: Function) -> None:
    """NaN log-probs and advantages in padding reach neither the loss nor the gradient."""
    mask = bits("110", "100")
    p, old = reals([-1, -2, -3], [-1, -1, -1]), reals([-1.1, -2, -3], [-1, -1, -1])
    advantages = reals([1, -1, 1], [2, 1, 1])
    loss = lambda a, b, c: policy_loss(a, b.detach(), c.detach(), mask, **CLIP)
    ignores_rubbish(loss, mask, p, old, advantages)


def test_value_loss_golden(value_loss: Function) -> None:
    """Half the squared error, of the worse of value and clipped value; by hand."""
    values, old, returns = reals([1, 2, 9]), reals([0, 0, 9]), reals([0, 3, 7])
    close(value_loss(values, old, returns, bits("110"), clip=0.5), (1 / 2 + 6.25 / 2) / 2)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_the_loop(value_loss: Function, clip: float | None) -> None:
    """Random values, against a loop in float64, with and without clipping."""
    for batch in batches(holes=True):
        values, old, returns, mask = batch.real(), batch.real(), batch.real(), batch.mask
        loss = lambda v, o, r: references.value_loss(v, o, r, clip)
        expected = references.table(loss, mask, values, old, returns).sum() / mask.sum()
        close(value_loss(values, old, returns, mask, clip=clip), expected)


def test_value_gradient_is_zero_where_clipped(value_loss: Function) -> None:
    """A value that has moved further than the clip towards its return gets no gradient; one that moved away does."""
    function = lambda v: value_loss(v, reals([0, 0]), reals([2, -2]), bits("11"), clip=0.5)
    close(gradients(function, reals([1, 1]))[0], reals([0, 3]) / 2)


def test_value_loss_ignores_rubbish(value_loss: Function) -> None:
    """NaN values and returns in padding reach neither the loss nor the gradient."""
    mask = bits("110", "100")
    values, old, returns = (reals([1, 2, 3], [4, 5, 6]) * k for k in (1, 0.9, 1.5))
    loss = lambda v, o, r: value_loss(v, o.detach(), r.detach(), mask, clip=0.5)
    ignores_rubbish(loss, mask, values, old, returns)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weights_equal_the_loop(importance_weights: Function, level: str, kind: str) -> None:
    """Ratios of each token, or their product over the tokens that count, cut at 2; against a loop in float64."""
    for batch in batches(holes=True):
        p, q, mask = batch.logprobs(), batch.logprobs(), batch.mask
        log_ratio = p - q if level == "token" else references.sequence_log_ratios(p, q, mask, reduce="sum")
        expected = references.table(lambda x: references.importance(x, kind, 0.0, 2.0), mask, log_ratio)
        if bool(expected.any()):
            close(importance_weights(p, q, mask, level=level, kind=kind, high=2.0), expected, mask)


def test_importance_weights_may_all_be_masked(importance_weights: Function) -> None:
    """A batch in which every weight is beyond the limit gets 0 everywhere, not an error."""
    got = importance_weights(reals([-1, -1]), reals([-3, -3]), bits("11"), level="sequence", kind="mask", high=2.0)
    close(got, reals([0, 0]))


def test_importance_weights_have_no_gradient(importance_weights: Function) -> None:
    """The weights change the measure, not the objective."""
    function = lambda p: importance_weights(p, reals([-1]), bits("1"), level="token", kind="truncate", high=2.0)
    close(gradients(function, reals([-1.1]))[0], reals([0]))


def test_importance_weights_ignore_rubbish(importance_weights: Function) -> None:
    """A NaN log-prob in padding does not reach the product over its sequence."""
    mask, p, q = bits("110"), reals([-1, -2, -3]), reals([-1.1, -1.9, torch.nan])
    got = importance_weights(p, q, mask, level="sequence", kind="truncate", high=2.0)
    close(got, reals([1, 1, 0]), mask)


def test_entropy_golden(entropy: Function) -> None:
    """log 4 for four equal choices, 0 for one; random ones against a loop in float64."""
    logits = torch.cat([torch.zeros(1, 1, 4), torch.tensor([[[100.0, 0, 0, 0]]])]).double()
    close(entropy(logits, torch.ones(2, 1, dtype=torch.bool)), reals([math.log(4)], [0]))
    expected = [[references.entropy(row) for row in rows] for rows in LOGITS.tolist()]
    close(entropy(LOGITS, torch.ones(2, 4, dtype=torch.bool)), reals(*expected))


def test_entropy_of_forbidden_choices(entropy: Function) -> None:
    """A choice with logit -inf (a forbidden token or action) adds 0, not NaN, to value and gradient."""
    logits, mask = reals([[0, 0, -torch.inf]]), bits("1")
    close(entropy(logits, mask), reals([math.log(2)]))
    close(gradients(lambda x: entropy(x, mask), logits)[0], torch.zeros(1, 1, 3))


def test_dpo_golden(dpo_loss: Function) -> None:
    """log 2 where policy and reference agree; a margin of 2 with beta 0.5 gives log(1 + 1/e)."""
    same = reals(-1, -2)
    close(dpo_loss(same, same, same, same, beta=0.5), math.log(2))
    close(dpo_loss(reals(-1), reals(-3), reals(-2), reals(-2), beta=0.5), math.log(1 + math.exp(-1)))
