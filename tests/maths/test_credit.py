"""Credit by turns: values worked out by hand, loops in float64, limit cases, properties, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.maths import advantages
from rolecall.maths.credit import adca, at_positions, by_turn, gigpo, turn_grpo, turn_rewards

F = torch.float64
ALL = torch.ones(2, dtype=torch.bool)


def t(rows, dtype=F):
    return torch.tensor(rows, dtype=dtype)


def bits(*rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_positions_to_turns_and_back():
    turns = t([[-1, 0, 0, -1, 1, 1], [0, -1, -1, -1, -1, -1]], torch.long)
    mask, x = bits("011011", "100000"), t([[9, 5, 5, 9, 7, 7], [3, 9, 9, 9, 9, 9]])
    found, steps = by_turn(x, turns, mask)
    assert found.tolist() == [[5, 7], [3, 0]]
    assert steps.equal(bits("11", "10"))
    assert at_positions(found, turns, mask).tolist() == [[0, 5, 5, 0, 7, 7], [3, 0, 0, 0, 0, 0]]


def test_the_rewards_of_turns_add_up_to_the_score():
    steps = bits("111", "100")
    found = turn_rewards(t([5, 2]), t([[1, 0, 2], [0, math.nan, math.nan]]), steps)
    assert found.tolist() == [[1, 0, 4], [2, 0, 0]]


def test_turns_by_hand():
    # One group. Returns: 4 2 | 0, so means of episodes 3 and 0, the group's mean 1.5.
    # Squares: (2.5^2 + 0.5^2) / 2 = 3.25 and 1.5^2 = 2.25, their sum / (2 - 1) = 5.5.
    rewards, steps = t([[2, 2], [0, 0]]), bits("11", "10")
    groups = torch.tensor([7, 7])
    found = turn_grpo(rewards, steps, groups, gamma=1.0, include=ALL)
    std = 5.5**0.5 + 1e-4
    torch.testing.assert_close(found, t([[2.5 / std, 0.5 / std], [-1.5 / std, 0]]))
    assert turn_grpo(rewards, steps, groups, gamma=1.0, scale=None, include=ALL).tolist() == [[2.5, 0.5], [-1.5, 0]]
    # With a discount of a half the first turn's return is 3: means 2.5 and 0, the group's 1.25.
    halved = turn_grpo(rewards, steps, groups, gamma=0.5, scale=None, include=ALL)
    assert halved.tolist() == [[1.75, 0.75], [-1.25, 0]]


def test_adca_by_hand():
    # Marks 1 -1 | -1: means 0 and -1, the group's -0.5; variance ((1.5^2 + 0.5^2) / 2 + 0.5^2) / 2 = 0.75.
    # Scores 1 0: mean 0.5, deviation 0.5, so z is 1 and -1.
    found = adca(t([1, 0]), torch.tensor([0, 0]), t([[1, -1], [-1, 0]]), bits("11", "10"), alpha=0.1, include=ALL)
    sd = 0.75**0.5
    z = [1.5 / sd, -0.5 / sd, -0.5 / sd]
    torch.testing.assert_close(found, t([[1 + 0.1 * (z[0] + z[1]), 1 + 0.1 * z[1]], [-1 + 0.1 * z[2], 0]]))


def test_allocation_by_hand():
    # A success with a good and a bad step: 1 / 1.2 and 0.2 / 1.2. A failure with a bad one: -1.
    # Means of episodes 0.5 and -1, the group's -0.25.
    shares = [1 / 1.2, 0.2 / 1.2, -1.0]
    mean = ((shares[0] + shares[1]) / 2 + shares[2]) / 2
    variance = (((shares[0] - mean) ** 2 + (shares[1] - mean) ** 2) / 2 + (shares[2] - mean) ** 2) / 2
    z = [(x - mean) / variance**0.5 for x in shares]
    found = adca(
        t([1, 0]), torch.tensor([0, 0]), t([[1, -1], [-1, 0]]), bits("11", "10"), alpha=1.0, allocate=True, include=ALL
    )
    torch.testing.assert_close(found, t([[1 + z[0] + z[1], 1 + z[1]], [-1 + z[2], 0]]))


def test_gigpo_by_hand():
    # Both begin in state 5: returns 1 and 0 are compared there. State 6 is met once: no comparison.
    found = gigpo(
        *(t([1, 0]), torch.tensor([0, 0]), t([[0, 1], [0, 0]]), torch.tensor([[5, 6], [5, 0]]), bits("11", "10")),
        gamma=1.0, weight=0.5, scale=None, include=ALL,
    )  # fmt: skip
    assert found.tolist() == [[0.75, 0.5], [-0.75, 0]]


def test_states_of_other_groups_are_not_compared():
    found = gigpo(
        *(t([1, 0]), torch.tensor([0, 1]), t([[1], [0]]), torch.tensor([[5], [5]]), bits("1", "1")),
        gamma=1.0, weight=1.0, include=ALL,
    )  # fmt: skip
    assert found.tolist() == [[0], [0]]


# -- a loop over episodes and turns, in float64 ------------------------------------------------------------------------


def loop_standardised(x, lengths, groups, include, *, lost, eps, scale=True):
    out = [[0.0] * len(row) for row in x]
    for group in set(groups):
        own = [i for i in range(len(x)) if groups[i] == group and include[i] and lengths[i]]
        if not own:
            continue
        values = {x[i][k] for i in own for k in range(lengths[i])}
        mean = sum(sum(x[i][: lengths[i]]) / lengths[i] for i in own) / len(own)
        mean = values.pop() if len(values) == 1 else mean
        squares = sum(sum((v - mean) ** 2 for v in x[i][: lengths[i]]) / lengths[i] for i in own)
        variance = squares / max(1, len(own) - lost)
        for i in own:
            for k in range(lengths[i]):
                out[i][k] = (x[i][k] - mean) / ((variance**0.5 if variance > 0 else 1) + eps if scale else 1)
    return out


@st.composite
def episodes(draw):
    count, width = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    number = st.integers(-3, 3).map(float)
    lengths = [draw(st.integers(1, width)) for _ in range(count)]
    rows = [[draw(number) for _ in range(width)] for _ in range(count)]
    marks = [[draw(number) for _ in range(width)] for _ in range(count)]
    states = [[draw(st.integers(0, 2)) for _ in range(width)] for _ in range(count)]
    scores = [draw(number) for _ in range(count)]
    groups = [draw(st.integers(0, 1)) for _ in range(count)]
    include = [draw(st.booleans()) for _ in range(count)]
    return rows, marks, states, scores, groups, include, lengths, width


def tensors(made):
    rows, marks, states, scores, groups, include, lengths, width = made
    steps = torch.arange(width) < torch.tensor(lengths)[:, None]
    return t(rows), t(marks), torch.tensor(states), t(scores), torch.tensor(groups), torch.tensor(include), steps


def suffix(row, length, gamma):
    out, total = [0.0] * len(row), 0.0
    for k in reversed(range(length)):
        total = row[k] + gamma * total
        out[k] = total
    return out


@given(episodes(), st.sampled_from([0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_all_three_are_their_definitions(made, gamma):
    rows, marks, states, scores, groups, include, lengths, _ = made
    r, m, s, sc, g, inc, steps = tensors(made)
    returns = [suffix(row, n, gamma) for row, n in zip(rows, lengths, strict=True)]
    expected = loop_standardised(returns, lengths, groups, include, lost=1, eps=1e-4)
    torch.testing.assert_close(turn_grpo(r, steps, g, gamma=gamma, include=inc), t(expected))

    z = loop_standardised(marks, lengths, groups, include, lost=0, eps=0)
    outcome = loop_standardised([[x] for x in scores], [1] * len(scores), groups, include, lost=0, eps=0)
    to_come = [suffix([0.3 * v for v in row], n, 1.0) for row, n in zip(z, lengths, strict=True)]
    expected = [
        [v + outcome[i][0] if include[i] and k < lengths[i] else 0.0 for k, v in enumerate(row)]
        for i, row in enumerate(to_come)
    ]
    torch.testing.assert_close(adca(sc, g, m, steps, alpha=0.3, include=inc), t(expected))

    whole = advantages.grpo(sc, g, include=inc)
    expected = [[0.0] * len(row) for row in rows]
    for i in range(len(rows)):
        for k in range(lengths[i] if include[i] else 0):
            peers = [
                returns[j][q]
                for j in range(len(rows))
                for q in range(lengths[j])
                if include[j] and groups[j] == groups[i] and states[j][q] == states[i][k]
            ]
            mean = peers[0] if len(set(peers)) == 1 else sum(peers) / len(peers)
            variance = sum((v - mean) ** 2 for v in peers) / max(1, len(peers) - 1)
            step = (returns[i][k] - mean) / ((variance**0.5 if variance > 0 else 1) + 1e-4)
            expected[i][k] = float(whole[i]) + 2.0 * step
    found = gigpo(sc, g, r, s, steps, gamma=gamma, weight=2.0, include=inc)
    torch.testing.assert_close(found, t(expected))


@given(episodes())
@settings(max_examples=40, deadline=None)
def test_order_and_padding_change_nothing_and_what_does_not_count_may_be_anything(made):
    r, m, s, sc, g, inc, steps = tensors(made)
    dirty = lambda x: torch.where(steps, x, math.nan)
    for credit in (
        lambda r, m, s, sc, g, inc, steps: turn_grpo(r, steps, g, gamma=0.9, include=inc),
        lambda r, m, s, sc, g, inc, steps: adca(sc, g, m, steps, alpha=0.3, include=inc),
        lambda r, m, s, sc, g, inc, steps: adca(sc, g, m, steps, alpha=0.3, allocate=True, include=inc),
        lambda r, m, s, sc, g, inc, steps: gigpo(sc, g, r, s, steps, gamma=0.9, weight=1.0, include=inc),
    ):
        plain = credit(r, m, s, sc, g, inc, steps)
        assert plain.isfinite().all()
        assert (plain[~(steps & inc[:, None])] == 0).all()
        torch.testing.assert_close(credit(dirty(r), dirty(m), s, sc, g, inc, steps), plain)
        flipped = credit(*(x.flip(0) for x in (r, m, s, sc, g, inc, steps)))
        torch.testing.assert_close(flipped.flip(0), plain)
        wide = [torch.nn.functional.pad(x, (0, 2)) for x in (r, m, s)]
        padded = credit(*wide, sc, g, inc, torch.nn.functional.pad(steps, (0, 2)))
        torch.testing.assert_close(padded[:, : r.shape[1]], plain)


def test_limit_cases():
    scores, groups, every = t([3, 1, 0, 7]), torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)
    steps = bits("111", "100", "110", "100")
    at_the_end = turn_rewards(scores, torch.zeros(4, 3, dtype=F), steps)
    plain = advantages.grpo(scores, groups)
    spread = torch.where(steps, plain[:, None], 0)
    torch.testing.assert_close(turn_grpo(at_the_end, steps, groups, gamma=1.0, include=every), spread)
    states = torch.arange(12).reshape(4, 3)  # no state is met twice
    torch.testing.assert_close(
        gigpo(scores, groups, at_the_end, states, steps, gamma=1.0, weight=5.0, include=every), spread
    )
    marks = torch.zeros(4, 3, dtype=F)
    flat = adca(scores, groups, marks, steps, alpha=1.0, include=every)
    n = torch.tensor([3.0, 3, 3, 1]).double()
    torch.testing.assert_close(flat, spread * (n / (n - 1).clamp(min=1)).sqrt()[:, None], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-9])
def test_where_nothing_differs_the_advantage_is_exactly_zero(value):
    steps, groups, every = bits("111", "110", "100"), torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    scores, same = torch.full((3,), value, dtype=F), torch.full((3, 3), value, dtype=F)
    states = torch.zeros(3, 3, dtype=torch.long)
    assert not turn_grpo(torch.zeros(3, 3, dtype=F), steps, groups, gamma=0.9, include=every).any()
    assert not adca(scores, groups, same, steps, alpha=1.0, include=every).any()
    zero = torch.zeros(3, 3, dtype=F)
    assert not gigpo(scores, groups, zero, states, steps, gamma=1.0, weight=1.0, include=every).any()


def test_gradients():
    steps, groups, every = bits("11", "10", "11"), torch.tensor([0, 0, 0]), torch.ones(3, dtype=torch.bool)
    rewards = t([[1, 2], [0.5, 0], [-1, 0.25]]).requires_grad_()
    scores = t([1, 0.2, -0.4]).requires_grad_()
    states = torch.tensor([[1, 2], [1, 0], [1, 2]])
    assert torch.autograd.gradcheck(lambda r: turn_grpo(r, steps, groups, gamma=0.9, include=every), (rewards,))
    assert torch.autograd.gradcheck(lambda s, m: adca(s, groups, m, steps, alpha=0.3, include=every), (scores, rewards))
    assert torch.autograd.gradcheck(
        lambda s, r: gigpo(s, groups, r, states, steps, gamma=0.9, weight=0.5, include=every), (scores, rewards)
    )


def test_a_scale_over_the_batch_is_refused():
    steps, groups = bits("11", "10"), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="unknown scale 'batch'"):
        turn_grpo(torch.zeros(2, 2), steps, groups, gamma=1.0, scale="batch", include=ALL)
