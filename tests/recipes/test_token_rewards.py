"""Advantages made of rewards at tokens, against loops in float64: no transformation loses a score.

Roles are drawn at random, and so is what does not train of what is eligible (a blacked-out text, a failed reward).
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.config.rl import AlgorithmOptions
from rolecall.maths.roles import Role, TrainRule
from rolecall.maths.shaping import shape_rewards
from rolecall.recipes.algorithms import Coefficients, algorithm_of
from rolecall.train.step import trained
from rolecall.types import Batch

CHOSEN = (Role.CONTENT, Role.STOP)


def batch_of(roles, blackout, scores, *, kl=None, values=None, failed=None):
    """One answer per row; its score on the last token it chose, less a KL at every one."""
    roles, blackout = torch.tensor(roles, dtype=torch.uint8), torch.tensor(blackout)
    kl, values = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (kl, values))
    scores = torch.tensor(scores, dtype=torch.float64)
    failed = torch.zeros(len(scores), dtype=torch.bool) if failed is None else torch.tensor(failed)
    rule = TrainRule()
    placed = shape_rewards(scores, kl, rule.eligible(roles), kl_coef=1.0)
    return Batch(
        ids=torch.zeros(roles.shape, dtype=torch.long),
        roles=roles,
        groups=torch.zeros(len(scores), dtype=torch.long),
        scores=torch.where(failed, torch.nan, scores),
        rewards=placed,
        values=torch.zeros_like(placed) if values is None else values,
        verdicts=rule.verdicts(roles, blackout=blackout, reward_failed=failed),
    )


def ppo(batch, **more):
    options = AlgorithmOptions(**{"name": "ppo", "critic": "shared", "whiten_rewards": True, **more})
    return algorithm_of(options, Coefficients(max_new_tokens=4)).advantage(batch)


def moments_of(numbers):
    mean = sum(numbers) / max(1, len(numbers))
    return mean, sum((x - mean) ** 2 for x in numbers) / max(1, len(numbers))


def by_loops(batch, *, gamma, lam):
    """(advantages, returns) of PPO with whitened rewards, by position; the rules in words:

    The score sits on the last token the policy chose. Rewards are scaled around their mean over the chosen tokens of
    answers of which something trains. GAE steps from chosen token to chosen token. Advantages are whitened over the
    trained tokens alone.
    """
    roles, rewards, values = batch.roles.tolist(), batch.rewards.tolist(), batch.values.tolist()
    learns = trained(batch).tolist()
    chosen = [[t for t, role in enumerate(row) if role in CHOSEN] for row in roles]
    counted = [rewards[i][t] for i, row in enumerate(chosen) if any(learns[i]) for t in row]
    mean, variance = moments_of(counted)
    raw, returns = {}, {}
    for i, row in enumerate(chosen):
        advantage = ahead = 0.0
        for t in reversed(row):
            reward = (rewards[i][t] - mean) / math.sqrt(variance + 1e-8) + mean
            advantage = reward + gamma * ahead - values[i][t] + gamma * lam * advantage
            ahead = values[i][t]
            raw[i, t], returns[i, t] = advantage, advantage + ahead
    centre, spread = moments_of([a for (i, t), a in raw.items() if learns[i][t]])
    return {place: (a - centre) / math.sqrt(spread + 1e-8) for place, a in raw.items()}, returns


def test_a_score_on_a_blacked_out_token_reaches_the_tokens_before_it():
    """Two answers of two tokens, scored 1 and 3, whose last token never trains."""
    roles = [[Role.PROMPT, Role.CONTENT, Role.STOP]] * 2
    batch = batch_of(roles, [[False, False, True]] * 2, [1.0, 3.0])
    _, returns = ppo(batch, gamma=1.0, lam=1.0)
    # Rewards 0 1 0 3: mean 1, variance 1.5. Each return is both of its answer's rewards.
    scaled = [(x - 1) / math.sqrt(1.5) + 1 for x in (0, 1, 3)]
    assert returns[:, 1].tolist() == pytest.approx([scaled[0] + scaled[1], scaled[0] + scaled[2]])
    assert float(returns[1, 1] - returns[0, 1]) == pytest.approx(2 / math.sqrt(1.5))


@st.composite
def tables(draw):
    """What `batch_of` takes."""
    rows, time = draw(st.integers(1, 4)), draw(st.integers(1, 6))

    def table(entry):
        return draw(st.lists(st.lists(entry, min_size=time, max_size=time), min_size=rows, max_size=rows))

    number = st.floats(-4, 4, width=32)
    return {
        "roles": table(st.sampled_from([*CHOSEN, Role.CONTENT, Role.PROMPT, Role.OBSERVATION, Role.PAD])),
        "blackout": table(st.booleans()),
        "scores": draw(st.lists(number, min_size=rows, max_size=rows)),
        "kl": table(number),
        "values": table(number),
        "failed": draw(st.lists(st.sampled_from([False, False, True]), min_size=rows, max_size=rows)),
    }


@given(tables(), st.sampled_from([(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)]))
def test_ppo_against_loops(drawn, discounts):
    batch = batch_of(**drawn)
    gamma, lam = discounts
    advantages, returns = ppo(batch, gamma=gamma, lam=lam)
    expected, goals = by_loops(batch, gamma=gamma, lam=lam)
    learns = trained(batch)
    for i, t in expected:
        assert float(returns[i, t]) == pytest.approx(goals[i, t], rel=1e-5, abs=1e-5)
        if learns[i, t]:
            assert float(advantages[i, t]) == pytest.approx(expected[i, t], rel=1e-4, abs=1e-4)
    assert (advantages[~learns] == 0).all()


@given(tables())
def test_no_answer_loses_its_score_by_whitening(drawn):
    """With gamma = lam = 1 the return of an answer's first token is the sum of its rewards, scaled like all others."""
    batch = batch_of(**drawn)
    chosen = TrainRule().eligible(batch.roles)
    _, returns = ppo(batch, gamma=1.0, lam=1.0)
    mean, variance = moments_of(batch.rewards[chosen & trained(batch).any(1, keepdim=True)].tolist())
    scale = 1 / math.sqrt(variance + 1e-8)
    for row in chosen.any(1).nonzero()[:, 0].tolist():
        around = float((batch.rewards[row] - mean)[chosen[row]].sum())
        found = float(returns[row, int(chosen[row].nonzero()[0])]) - int(chosen[row].sum()) * mean
        assert found == pytest.approx(scale * around, rel=1e-5, abs=1e-5 * scale)


@given(tables(), st.sampled_from([1.0, 0.9]))
def test_reinforce_pp_against_loops(drawn, gamma):
    """Returns reach the tokens that train over those that do not, and are whitened over the former alone."""
    batch = batch_of(**drawn)
    options = AlgorithmOptions(name="reinforce++", gamma=gamma)
    advantages = algorithm_of(options, Coefficients(max_new_tokens=4)).advantage(batch)
    learns, found = trained(batch).tolist(), {}
    for i, row in enumerate(batch.roles.tolist()):
        ahead = 0.0
        for t in reversed(range(len(row))):
            if row[t] in CHOSEN:
                ahead = float(batch.rewards[i, t]) + gamma * ahead
                found[i, t] = ahead
    mean, variance = moments_of([x for (i, t), x in found.items() if learns[i][t]])
    for i, t in found:
        expected = (found[i, t] - mean) / math.sqrt(variance + 1e-8) if learns[i][t] else 0.0
        assert float(advantages[i, t]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
