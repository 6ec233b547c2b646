import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masking import assert_rubbish_has_no_effect
from strategies import masked, masks, rubbish

from rolecall.conformance import references
from rolecall.conformance.compare import padded
from rolecall.maths.reduce import (
    MODES,
    aggregate,
    denominator_of,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_var,
    masked_whiten,
    sequence_count,
    token_count,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
TO_ONE = {
    "sum": masked_sum,
    "mean": masked_mean,
    "var": masked_var,
    "moments": lambda x, m: torch.stack(masked_moments(x, m)),
    **{mode: lambda x, m, mode=mode: aggregate(x, m, mode=mode, norm=norm_for(mode)) for mode in MODES},
}
FUNCTIONS = {
    **TO_ONE,
    "row mean": lambda x, m: masked_mean(x, m, 1),
    "row var": lambda x, m: masked_var(x, m, 1),
    "whiten": masked_whiten,
    "scale": lambda x, m: masked_whiten(x, m, shift_mean=False),
}


def norm_for(mode):
    return 5.0 if mode.endswith("-norm") else None


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=50)
@given(data=st.data())
def test_rubbish_where_nothing_counts_has_no_effect(name, data):
    mask, x = data.draw(masked(tensors=1))
    assert_rubbish_has_no_effect(lambda x: FUNCTIONS[name](x, mask), mask, data.draw(rubbish(mask)), x)


@pytest.mark.parametrize("name", TO_ONE)
@settings(max_examples=50)
@given(case=masked(tensors=1), columns=st.integers(1, 5))
def test_padding_and_row_order_change_nothing(name, case, columns):
    mask, x = case
    expected = TO_ONE[name](x, mask)
    torch.testing.assert_close(TO_ONE[name](padded(x, columns), padded(mask, columns)), expected, **CLOSE)
    torch.testing.assert_close(TO_ONE[name](x.flip(0), mask.flip(0)), expected, **CLOSE)
    torch.testing.assert_close(TO_ONE[name](x.flip(1), mask.flip(1)), expected, **CLOSE)


@given(case=masked(tensors=1), columns=st.integers(1, 5))
def test_whitening_does_not_see_padding_or_order(case, columns):
    mask, x = case
    white = masked_whiten(x, mask)
    torch.testing.assert_close(masked_whiten(padded(x, columns), padded(mask, columns))[:, :-columns], white, **CLOSE)
    torch.testing.assert_close(masked_whiten(x.flip(0), mask.flip(0)), white.flip(0), **CLOSE)


@pytest.mark.parametrize("mode", MODES)
@given(case=masked(tensors=1), data=st.data())
def test_pieces_add_up_to_the_whole(mode, case, data):
    """Micro-batches of any sizes, divided by the denominator summed over them, give the whole and its gradient."""
    mask, x = case
    cuts = sorted(data.draw(st.sets(st.integers(1, len(mask)))) | {len(mask)})
    pieces = [slice(start, end) for start, end in zip([0, *cuts], cuts, strict=False)]
    denominator = sum(denominator_of(mask[piece], mode=mode) for piece in pieces)
    assert denominator == denominator_of(mask, mode=mode)

    x.requires_grad_()
    whole = aggregate(x, mask, mode=mode, norm=norm_for(mode))
    parts = sum(
        aggregate(x[piece], mask[piece], mode=mode, norm=norm_for(mode), denominator=denominator) for piece in pieces
    )
    torch.testing.assert_close(parts, whole, **CLOSE)
    (expected,), (got,) = torch.autograd.grad(whole, x), torch.autograd.grad(parts, x)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert (got[~mask] == 0).all()


@given(masks())
def test_counts_are_those_of_a_loop(mask):
    rows = mask.tolist()
    assert token_count(mask) == sum(sum(row) for row in rows)
    assert sequence_count(mask) == sum(any(row) for row in rows)


@given(case=masked(tensors=1), shift=st.floats(-5, 5), scale=st.floats(0.5, 4))
def test_shift_and_scale(case, shift, scale):
    mask, x = case
    moved = scale * x + shift
    some = bool(mask.any())
    mean, var = masked_moments(x, mask)
    moved_mean, moved_var = masked_moments(moved, mask)
    torch.testing.assert_close(moved_mean, scale * mean + (shift if some else 0), **CLOSE)
    torch.testing.assert_close(moved_var, scale**2 * var, rtol=1e-8, atol=1e-8)
    for mode in MODES:
        norm = norm_for(mode)
        torch.testing.assert_close(
            aggregate(scale * x, mask, mode=mode, norm=norm), scale * aggregate(x, mask, mode=mode, norm=norm), **CLOSE
        )


@given(case=masked(tensors=1))
def test_white_means_mean_zero_and_variance_one(case):
    mask, x = case
    mean, var = references.moments(x, mask)
    white_mean, white_var = references.moments(masked_whiten(x, mask), mask)
    assert white_mean == pytest.approx(0, abs=1e-8)
    assert white_var == pytest.approx(var / (var + 1e-8), abs=1e-8)
    assert references.moments(masked_whiten(x, mask, shift_mean=False), mask)[0] == pytest.approx(mean, abs=1e-8)
