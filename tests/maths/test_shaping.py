import random

import pytest
import torch

from rolecall.conformance.compare import bits
from rolecall.maths.shaping import (
    clip_scores,
    last_eligible,
    missing_stop_penalty,
    overlong_penalty,
    place_scores,
    shape_rewards,
    untrainable,
)

NAN, INF = float("nan"), float("inf")


#   mask     0 1 1 0 1 0      the score sits on the last 1
#            0 0 0 0 0 0      nowhere to put it
#            1 0 0 0 0 0
MASK = bits("011010", "000000", "100000")


# --- goldens -------------------------------------------------------------------------------------------------------


def test_last_eligible_and_untrainable_by_hand():
    assert last_eligible(MASK).equal(bits("000010", "000000", "100000"))
    assert untrainable(MASK).tolist() == [False, True, False]


def test_scores_sit_on_the_last_eligible_position():
    rewards = place_scores(torch.tensor([5.0, NAN, -2.0]), MASK)
    assert rewards.tolist() == [[0, 0, 0, 0, 5, 0], [0] * 6, [-2, 0, 0, 0, 0, 0]]


def test_a_score_that_failed_is_not_zero():
    # The caller leaves such rows out; until then NaN stays visible where the score belongs.
    assert place_scores(torch.tensor([NAN]), bits("11")).isnan().tolist() == [[False, True]]


def test_shaped_rewards_by_hand():
    # rewards = - 0.5 kl, plus the score at the end
    kl = torch.tensor([[NAN, 2, 4, INF, 6, NAN], [NAN] * 6, [8, NAN, NAN, NAN, NAN, NAN]])
    rewards = shape_rewards(torch.tensor([5.0, 3.0, -2.0]), kl, MASK, kl_coef=0.5)
    assert rewards.tolist() == [[0, -1, -2, 0, 2, 0], [0] * 6, [-6, 0, 0, 0, 0, 0]]


def test_without_kl_or_with_coefficient_zero_it_is_the_score_alone():
    scores = torch.tensor([5.0, 3.0, -2.0])
    expected = place_scores(scores, MASK)
    assert shape_rewards(scores, None, MASK, kl_coef=0.5).equal(expected)
    assert shape_rewards(scores, torch.full((3, 6), INF), MASK, kl_coef=0.0).equal(expected)


def test_overlong_penalty_by_hand():
    # max 10, buffer 4: free up to 6, then a quarter a token, and no more than 1
    lengths = torch.tensor([0, 5, 6, 7, 8, 10, 11, 50])
    assert overlong_penalty(lengths, max_length=10, buffer=4).tolist() == [0, 0, 0, -0.25, -0.5, -1, -1, -1]
    assert overlong_penalty(torch.tensor([0, 5, 10]), max_length=10, buffer=10).tolist() == [0, -0.5, -1]


def test_missing_stop_penalty_by_hand():
    got = missing_stop_penalty(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), penalty=3.0)
    assert got.tolist() == [1, -2]


def test_clipped_scores_by_hand():
    assert clip_scores(torch.tensor([-9.0, -1, 0, 2, 9]), limit=2.0).tolist() == [-2, -1, 0, 2, 2]


# --- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_placing_is_that_of_a_loop(seed):
    generator = random.Random(seed)
    time = generator.randint(1, 9)
    masks = [[generator.random() < 0.4 for _ in range(time)] for _ in range(4)]
    scores = [generator.gauss(0, 1) for _ in masks]
    mask, expected = torch.tensor(masks), [[0.0] * time for _ in masks]
    for row, score, counts in zip(expected, scores, masks, strict=True):
        if any(counts):
            row[max(t for t in range(time) if counts[t])] = score
    tensor = torch.tensor(scores, dtype=torch.float64)
    assert place_scores(tensor, mask).tolist() == expected

    kl = torch.tensor([[generator.gauss(0, 1) for _ in range(time)] for _ in masks], dtype=torch.float64)
    shaped = shape_rewards(tensor, kl, mask, kl_coef=0.3)
    for i, row in enumerate(expected):
        expected_row = [
            r - 0.3 * k if counts else 0.0 for r, k, counts in zip(row, kl[i].tolist(), masks[i], strict=True)
        ]
        assert shaped[i].tolist() == pytest.approx(expected_row)


def test_penalties_are_those_of_a_loop():
    generator = random.Random(0)
    for _ in range(20):
        limit = generator.randint(2, 30)
        buffer = generator.randint(1, limit)
        lengths = [generator.randint(0, 2 * limit) for _ in range(6)]
        scores = [generator.gauss(0, 2) for _ in lengths]
        stopped = [generator.random() < 0.5 for _ in lengths]
        tensor = torch.tensor(scores, dtype=torch.float64)

        free = limit - buffer
        soft = [0 if n <= free else -1 if n >= limit else -(n - free) / buffer for n in lengths]
        assert overlong_penalty(torch.tensor(lengths), max_length=limit, buffer=buffer).tolist() == pytest.approx(soft)
        less = [s if ended else s - 0.7 for s, ended in zip(scores, stopped, strict=True)]
        assert missing_stop_penalty(tensor, torch.tensor(stopped), penalty=0.7).tolist() == pytest.approx(less)
        assert clip_scores(tensor, limit=1.5).tolist() == [max(-1.5, min(1.5, s)) for s in scores]


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    kl = torch.randn(3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    check = torch.autograd.gradcheck
    check(lambda s, k: shape_rewards(s, k, MASK, kl_coef=0.3), [scores, kl])
    check(lambda s: place_scores(s, MASK), scores)
    check(lambda s: missing_stop_penalty(s, torch.tensor([True, False, True]), penalty=0.5), scores)
    check(lambda s: clip_scores(s, limit=0.5), scores)


# --- wrong calls ---------------------------------------------------------------------------------------------------

SCORES = torch.ones(3)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: untrainable(MASK.float()), "mask must be a bool tensor"),
        (lambda: last_eligible(MASK.long()), "mask must be a bool tensor .*torch.int64"),
        (lambda: place_scores(SCORES, MASK.float()), "mask must be a bool tensor"),
        (lambda: place_scores(SCORES[:2], MASK), r"scores has shape \(2,\) but the batch has shape \(3,\)"),
        (
            lambda: shape_rewards(SCORES, torch.ones(3, 5), MASK, kl_coef=0.0),
            r"kl has shape \(3, 5\) but mask has shape \(3, 6\)",
        ),
        (lambda: overlong_penalty(torch.tensor([1]), max_length=4, buffer=5), "buffer=5, max_length=4"),
        (lambda: overlong_penalty(torch.tensor([1]), max_length=4, buffer=0), "buffer=0, max_length=4"),
        (
            lambda: missing_stop_penalty(SCORES, torch.tensor([True]), penalty=1.0),
            r"stopped has shape \(1,\) but scores",
        ),
        (lambda: missing_stop_penalty(SCORES, SCORES, penalty=1.0), "stopped must be a bool tensor"),
        (lambda: clip_scores(SCORES, limit=0.0), "limit must be positive, got 0"),
    ],
)
def test_wrong_calls_get_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
