"""Best-of-k from n answers, against all subsets."""

from itertools import combinations, pairwise
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.maths.best_of import best_of_kl, expected_best

NUMBERS = st.integers(-3, 3)


def by_subsets(scores, values, k):
    """The mean over all subsets of the mean value of those that score highest in it."""
    found = []
    for subset in combinations(range(len(scores)), k):
        top = max(scores[i] for i in subset)
        best = [values[i] for i in subset if scores[i] == top]
        found.append(sum(best) / len(best))
    return sum(found) / len(found)


def test_by_hand():
    """Of 1, 2, 4 two are drawn: the best is 2 once and 4 twice."""
    scores = torch.tensor([4.0, 1.0, 2.0])
    assert float(expected_best(scores, k=2)) == pytest.approx((2 + 4 + 4) / 3)
    assert float(expected_best(scores, k=1)) == pytest.approx(7 / 3)
    assert float(expected_best(scores, k=3)) == 4


def test_pass_at_k():
    """2 of 5 are right: 1 - C(3, 2) / C(5, 2)."""
    assert float(expected_best(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), k=2)) == pytest.approx(1 - 3 / 10)


def test_another_judge_may_get_less_from_more():
    """The score prefers what is worth least."""
    scores, worth = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 6.0, 0.0])
    found = [float(expected_best(scores, k=k, values=worth)) for k in (1, 2, 3)]
    assert found == pytest.approx([5.0, 2.0, 0.0])


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), st.data())
def test_equals_the_mean_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    scores, values = [float(s) for s, _ in answers], [float(v) for _, v in answers]
    found = expected_best(torch.tensor(scores), k=k, values=torch.tensor(values))
    assert float(found) == pytest.approx(by_subsets(scores, values, k), abs=1e-9)
    assert float(expected_best(torch.tensor(scores), k=k)) == pytest.approx(by_subsets(scores, scores, k), abs=1e-9)


@given(st.lists(NUMBERS, min_size=2, max_size=8))
def test_more_answers_are_never_worse_by_their_own_score(scores):
    found = [float(expected_best(torch.tensor(scores).double(), k=k)) for k in range(1, len(scores) + 1)]
    assert all(b >= a - 1e-12 for a, b in pairwise(found))


@pytest.mark.parametrize("k", [0, 4])
def test_k_must_be_possible(k):
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.3"):
        expected_best(torch.zeros(3), k=k)


def test_the_kl_bound():
    assert best_of_kl(1) == 0
    assert best_of_kl(4) == pytest.approx(log(4) - 0.75)
    with pytest.raises(ValueError, match="at least 1"):
        best_of_kl(0)
