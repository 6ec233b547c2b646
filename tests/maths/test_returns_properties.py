import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masking import assert_rubbish_has_no_effect
from strategies import DISCOUNTS, like, masked, rubbish

from rolecall.conformance.compare import padded
from rolecall.maths.returns import discounted_returns, gae, nstep_targets, td_lambda_targets

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
FUNCTIONS = {
    "advantages": lambda r, v, m, b: gae(r, v, m, gamma=0.9, lam=0.8, bootstrap=b)[0],
    "returns": lambda r, v, m, b: gae(r, v, m, gamma=0.9, lam=0.8, bootstrap=b)[1],
    "undiscounted": lambda r, v, m, b: gae(r, v, m, gamma=1.0, lam=0.95)[0],
    "td_lambda": lambda r, v, m, b: td_lambda_targets(r, v, m, gamma=0.9, lam=0.5, bootstrap=b),
    "nstep": lambda r, v, m, b: nstep_targets(r, v, m, gamma=0.9, n=2, bootstrap=b),
    "all steps": lambda r, v, m, b: nstep_targets(r, v, m, gamma=0.9, n=99, bootstrap=b),
    "discounted": lambda r, v, m, b: discounted_returns(r, m, gamma=0.9) + 0 * torch.where(m, v, 0),
}


@st.composite
def cases(draw):
    mask, rewards, values = draw(masked(tensors=2))
    return rewards, values, mask, draw(like(mask, per_row=True))


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30)
@given(data=st.data())
def test_rubbish_where_nothing_counts_has_no_effect(name, data):
    rewards, values, mask, bootstrap = data.draw(cases())
    function = lambda r, v: FUNCTIONS[name](r, v, mask, bootstrap)
    assert_rubbish_has_no_effect(function, mask, data.draw(rubbish(mask)), rewards, values)
    assert (function(rewards, values)[~mask] == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30)
@given(case=cases(), columns=st.integers(1, 70))
def test_padding_and_row_order_change_nothing(name, case, columns):
    rewards, values, mask, bootstrap = case
    function, expected = FUNCTIONS[name], FUNCTIONS[name](*case)
    wide = function(padded(rewards, columns), padded(values, columns), padded(mask, columns), bootstrap)
    torch.testing.assert_close(wide, padded(expected, columns), **CLOSE)
    flipped = function(rewards.flip(0), values.flip(0), mask.flip(0), bootstrap.flip(0))
    torch.testing.assert_close(flipped, expected.flip(0), **CLOSE)
    for i in range(len(mask)):
        alone = function(*(t[i : i + 1] for t in case))
        torch.testing.assert_close(alone, expected[i : i + 1], **CLOSE)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30)
@given(case=cases(), data=st.data())
def test_spans_that_do_not_count_come_and_go_without_effect(name, case, data):
    rewards, values, mask, bootstrap = case
    function, expected = FUNCTIONS[name], FUNCTIONS[name](*case)

    # Insertion: a span of rubbish at any place.
    at, width = data.draw(st.integers(0, mask.shape[1])), data.draw(st.integers(1, 4))
    insert = lambda t, fill: torch.cat([t[:, :at], t.new_full((len(t), width), fill), t[:, at:]], dim=1)
    longer = function(insert(rewards, torch.nan), insert(values, torch.inf), insert(mask, False), bootstrap)
    torch.testing.assert_close(longer, insert(expected, 0.0), **CLOSE)

    # Removal: only the positions that count are left.
    for i in range(len(mask)):
        kept = mask[i]
        if kept.any():
            short = function(
                rewards[i : i + 1, kept], values[i : i + 1, kept], mask[i : i + 1, kept], bootstrap[i : i + 1]
            )
            torch.testing.assert_close(short[0], expected[i, kept], **CLOSE)


@given(case=cases(), gamma=DISCOUNTS, lam=DISCOUNTS, scale=st.floats(-3, 3))
def test_scaling_rewards_and_values_scales_the_result(case, gamma, lam, scale):
    rewards, values, mask, bootstrap = case
    plain = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    scaled = gae(scale * rewards, scale * values, mask, gamma=gamma, lam=lam, bootstrap=scale * bootstrap)
    for got, expected in zip(scaled, plain, strict=True):
        torch.testing.assert_close(got, scale * expected, **CLOSE)


@given(case=cases(), lam=DISCOUNTS, shift=st.floats(-3, 3))
def test_a_shift_of_all_values_cancels_when_nothing_is_discounted(case, lam, shift):
    """With gamma = 1, V + c everywhere (behind the end too) leaves every advantage and moves every return by c."""
    rewards, values, mask, bootstrap = case
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=lam, bootstrap=bootstrap)
    moved, moved_returns = gae(rewards, values + shift, mask, gamma=1.0, lam=lam, bootstrap=bootstrap + shift)
    torch.testing.assert_close(moved, advantages, **CLOSE)
    torch.testing.assert_close(moved_returns, torch.where(mask, returns + shift, 0), **CLOSE)


@given(case=cases(), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_lambda_returns_mix_nstep_targets(case, gamma, lam):
    """G^lam = (1 - lam) (G^1 + lam G^2 + …) + lam^(T-1) G^T, with T the number of steps there are."""
    rewards, values, mask, bootstrap = case
    time = mask.shape[1]
    nstep = [nstep_targets(rewards, values, mask, gamma=gamma, n=n, bootstrap=bootstrap) for n in range(1, time + 1)]
    mixed = sum((1 - lam) * lam**k * target for k, target in enumerate(nstep[:-1])) + lam ** (time - 1) * nstep[-1]
    got = td_lambda_targets(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(got, mixed, rtol=1e-9, atol=1e-9)
