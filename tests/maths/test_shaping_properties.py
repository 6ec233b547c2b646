import torch
from hypothesis import given
from hypothesis import strategies as st
from masking import assert_rubbish_has_no_effect
from strategies import like, masked, masks, rubbish

from rolecall.conformance.compare import padded
from rolecall.maths.shaping import (
    clip_scores,
    last_eligible,
    missing_stop_penalty,
    overlong_penalty,
    place_scores,
    shape_rewards,
    untrainable,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def scored(draw):
    """(mask, kl, scores)"""
    mask, kl = draw(masked(tensors=1))
    return mask, kl, draw(like(mask, per_row=True))


@given(scored(), st.floats(0, 2))
def test_rewards_sum_to_the_score_and_the_kl_part(case, kl_coef):
    mask, kl, scores = case
    rewards = shape_rewards(scores, kl, mask, kl_coef=kl_coef)
    expected = torch.where(untrainable(mask), 0, scores) - kl_coef * torch.where(mask, kl, 0).sum(dim=1)
    torch.testing.assert_close(rewards.sum(dim=1), expected, **CLOSE)
    assert (rewards[~mask] == 0).all()


@given(scored(), st.data())
def test_rubbish_where_nothing_counts_has_no_effect(case, data):
    mask, kl, scores = case
    shape = lambda kl: shape_rewards(scores, kl, mask, kl_coef=0.3)
    assert_rubbish_has_no_effect(shape, mask, data.draw(rubbish(mask)), kl)

    # A row without an eligible position may carry any score, and gives none a gradient.
    trains = ~untrainable(mask)
    wild = torch.where(trains, scores, torch.nan).requires_grad_()
    rewards = place_scores(wild, mask)
    assert rewards.equal(place_scores(scores, mask))
    (gradient,) = torch.autograd.grad(rewards.sum(), wild)
    assert gradient.equal(trains.double())


@given(scored(), st.integers(1, 4))
def test_padding_and_row_order_change_nothing(case, columns):
    mask, kl, scores = case
    rewards = shape_rewards(scores, kl, mask, kl_coef=0.3)
    wide = shape_rewards(scores, padded(kl, columns), padded(mask, columns), kl_coef=0.3)
    assert wide.equal(padded(rewards, columns))
    flipped = shape_rewards(scores.flip(0), kl.flip(0), mask.flip(0), kl_coef=0.3)
    assert flipped.equal(rewards.flip(0))


@given(masks())
def test_there_is_one_last_position_unless_the_row_is_untrainable(mask):
    last = last_eligible(mask)
    assert last.sum(dim=1).equal((~untrainable(mask)).long())
    assert not (last & ~mask).any()
    behind = last.cumsum(dim=1) - last.long()
    assert not (mask & (behind > 0)).any()


@given(scored(), st.floats(0.1, 4))
def test_scores_shift_and_scale_into_rewards(case, factor):
    mask, _, scores = case
    placed = place_scores(scores, mask)
    torch.testing.assert_close(place_scores(factor * scores, mask), factor * placed, **CLOSE)
    torch.testing.assert_close(
        place_scores(scores + factor, mask), placed + factor * last_eligible(mask).double(), **CLOSE
    )


@given(scored(), st.data())
def test_penalties_only_ever_take_away(case, data):
    mask, _, scores = case
    size = len(mask)
    stopped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    less = missing_stop_penalty(scores, stopped, penalty=0.5)
    torch.testing.assert_close(scores - less, torch.where(stopped, 0.0, 0.5).double(), **CLOSE)

    lengths = torch.arange(40)
    penalty = overlong_penalty(lengths, max_length=30, buffer=data.draw(st.integers(1, 30)))
    assert (penalty.diff() <= 0).all()
    assert penalty[0] == 0
    assert (penalty[30:] == -1).all()

    limit = data.draw(st.floats(0.1, 10))
    clipped = clip_scores(scores, limit=limit)
    assert (clipped.abs() <= limit).all()
    assert clipped.equal(torch.where(scores.abs() <= limit, scores, limit * scores.sign()))
    assert clip_scores(clipped, limit=limit).equal(clipped)
