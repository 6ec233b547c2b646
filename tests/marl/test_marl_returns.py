"""Time of agents: gamma and lambda count environment steps, whether or not an agent could choose at them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import episode_lists, recorded
from test_learners import PPO, actor_critic, doubled, q_networks

from rolecall.marl.ppo import ppo_loss, prepare
from rolecall.marl.q_learning import q_loss
from rolecall.marl.returns import advantages_and_returns

ALGOS = ["iql", "vdn", "qmix"]


def forced(batch, steps, *, agent=0, action=0):
    """One action is all that this agent may do at these steps."""
    batch.avail_actions[:, steps, agent, :] = False
    batch.avail_actions[:, steps, agent, action] = True
    batch.actions[:, steps, agent, 0] = action
    return batch


def one_reward(how="end", *, length=5):
    """One agent, a reward of 1 at the last step."""
    batch = doubled(recorded([length], [how], time=length + 2, agents=1))
    batch.reward[:] = 0
    batch.reward[0, length - 1] = 1
    return batch


def returns_of(batch, values=0.0, *, gamma=0.9, lam=1.0):
    """(advantages, returns) as [time] of the first episode's first agent."""
    shape = batch.present.shape
    values = torch.full(shape, values, dtype=torch.float64) if isinstance(values, float) else values
    found = advantages_and_returns(batch, batch.paid(shape[2]), values, batch.there, gamma=gamma, lam=lam)
    return tuple(x.view(len(batch), shape[2], -1)[0, 0] for x in found)


@pytest.mark.parametrize("steps", [[1, 2, 3], [2, 3, 4], [0, 2, 4]])
def test_a_discount_counts_steps_without_a_choice(steps):
    _, returns = returns_of(forced(one_reward(), steps))
    assert returns[:5].tolist() == pytest.approx([0.9**4, 0.9**3, 0.9**2, 0.9, 1.0])


def test_what_is_paid_while_an_agent_is_absent_reaches_its_last_step_with_the_discount_between():
    """There at 0, 1 and 4; 2 and 3 pay 10 and 100; at 4 the critic expects 7."""
    batch = one_reward()
    batch.reward[0, 2, 0], batch.reward[0, 3, 0] = 10.0, 100.0
    batch.present[0, 2:4, 0] = False
    values = torch.tensor([2.0, 3.0, 99.0, 99.0, 7.0, 99.0, 99.0], dtype=torch.float64).view(1, 7, 1)
    advantages, returns = returns_of(batch, values, lam=0.5)
    last = 1 - 7.0
    second = 0.9 * (10 + 0.9 * (100 + 0.9 * 7)) - 3 + 0.45**3 * last
    first = 0.9 * 3 - 2 + 0.45 * second
    assert advantages[[0, 1, 4]].tolist() == pytest.approx([first, second, last])
    assert returns[[0, 1, 4]].tolist() == pytest.approx([first + 2, second + 3, 1.0])


@pytest.mark.parametrize("how", ["end", "cut"])
def test_an_agent_that_died_has_nothing_to_expect(how):
    """It was there at 0 and 1; the team earns 1 at step 4, which its deeds may have brought about."""
    batch = one_reward(how)
    batch.present[0, 2:, 0] = False
    advantages, returns = returns_of(batch, 10.0)
    assert returns[:2].tolist() == pytest.approx([0.9**4, 0.9**3])
    assert advantages[:2].tolist() == pytest.approx([0.9**4 - 10, 0.9**3 - 10])


@pytest.mark.parametrize("how", ["end", "cut"])
def test_behind_a_cut_stands_the_value_also_of_an_agent_that_may_do_one_thing_only(how):
    batch = forced(one_reward(how), [5])
    _, returns = returns_of(batch, 10.0)
    assert float(returns[4]) == pytest.approx(1 + (0.9 * 10 if how == "cut" else 0))


def test_the_values_that_are_given_stay_as_they_are():
    batch = one_reward("cut")
    batch.present[0, 2:4, 0] = False
    values = torch.rand(batch.present.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = values.clone()
    returns_of(batch, values)
    assert torch.equal(values, before)


def in_loops(batch, values, *, gamma, lam):
    """{(episode, step, agent): (advantage, return)}, agent by agent and backwards in time."""
    found = {}
    for b, length in enumerate(batch.lengths.tolist()):
        for a in range(values.shape[2]):
            cut = bool(batch.bootstrap[b]) and bool(batch.there[b, length, a])
            ahead, advantage = (float(values[b, length, a]) if cut else 0.0), 0.0
            for t in reversed(range(length)):
                reward = float(batch.reward[b, t, min(a, batch.reward.shape[2] - 1)])
                value = float(values[b, t, a]) if batch.present[b, t, a] else reward + gamma * ahead
                advantage = reward + gamma * ahead - value + gamma * lam * advantage
                ahead = value
                found[b, t, a] = advantage, advantage + value
    return found


absences = st.integers(0, 2**18 - 1)


@given(episode_lists(), absences, st.booleans(), st.sampled_from([(0.9, 0.8), (1.0, 1.0), (0.5, 0.0)]))
def test_returns_against_a_loop(episodes, absent, team, discounts):
    gamma, lam = discounts
    batch = doubled(recorded(*episodes, time=9, garbage=True, team=team))
    batch.present[:] = ~torch.tensor([(absent >> i) & 1 for i in range(18)]).bool().view(9, 2)
    values = torch.randn(len(batch), 9, 2, generator=torch.Generator().manual_seed(absent), dtype=torch.float64)
    found = advantages_and_returns(batch, batch.paid(2), values, batch.there, gamma=gamma, lam=lam)
    advantages, returns = (x.view(len(batch), 2, 9).transpose(1, 2) for x in found)
    for place, (advantage, goal) in in_loops(batch, values, gamma=gamma, lam=lam).items():
        if batch.present[place]:
            assert float(advantages[place]) == pytest.approx(advantage, abs=1e-9)
            assert float(returns[place]) == pytest.approx(goal, abs=1e-9)


@given(st.integers(1, 7), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_one_more_forced_step_costs_one_discount(length, gamma, lam):
    """What comes after it is gamma lambda less of an advantage, and gamma less of a return (lambda 1)."""
    near, far = (
        float(returns_of(forced(one_reward(length=n), [n - 1]), gamma=gamma, lam=lam)[0][0])
        for n in (length, length + 1)
    )
    assert far == pytest.approx(gamma * lam * near)


# -- the learners --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_q_learning_takes_steps_without_a_choice_for_time(algo):
    """With lambda 1 and a true end targets are returns: of five steps, whoever may choose at which."""
    batch = doubled(recorded([5], ["end"], time=7))
    batch.reward[:] = 0
    batch.reward[0, 4] = 1
    for agent in (0, 1):
        forced(batch, [1, 2, 3], agent=agent)
    found = q_loss(q_networks(algo), q_networks(algo, seed=5), batch, gamma=0.9, lam=1.0, double=True)
    assert float(found.target) == pytest.approx(sum(0.9**k for k in range(5)) / 5)


@pytest.mark.parametrize("algo", ALGOS)
def test_q_learning_bootstraps_from_agents_that_may_do_one_thing_only(algo):
    batch = doubled(recorded([2], ["cut"], time=4))
    for agent in (0, 1):
        forced(batch, [2], agent=agent, action=1)
    live, target = q_networks(algo), q_networks(algo, seed=5)
    before = q_loss(live, target, batch, gamma=0.9, lam=1.0, double=True)
    with torch.no_grad():  # the agents' values rise by 10, the team's by 20 (a fresh mixture is their sum)
        for net in target.agents.nets:
            list(net.parameters())[-1].add_(10.0)
    after = q_loss(live, target, batch, gamma=0.9, lam=1.0, double=True)
    rise = (0.9 + 0.9**2) / 2 * (10 if algo == "iql" else 20)
    assert float(after.target - before.target) == pytest.approx(rise, rel=1e-6)


@pytest.mark.parametrize("shape", [{}, {"recurrent": True}])
def test_ppos_critic_learns_where_the_policy_has_no_choice(shape):
    batch = forced(doubled(recorded([4, 3], ["end", "cut"], time=6)), [1, 2])
    module = actor_critic("own", **shape)
    steps, measured = prepare(module, None, batch, gamma=0.9, lam=0.8)
    with torch.no_grad():
        values = module.critic(module.critic_inputs(batch))
    found = in_loops(batch, values, gamma=0.9, lam=0.8)
    chosen = torch.tensor([found[p][0] for p in found if batch.eligible[p]])
    assert measured["policy/advantage_abs"] == pytest.approx(float(chosen.abs().mean()))
    assert len(chosen) == len(found) - 4
    loss = ppo_loss(module, steps, **{**PPO, "clip_value": None})
    errors = [0.5 * (goal - float(values[p])) ** 2 for p, (_, goal) in found.items()]
    assert float(loss.terms["value"].detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-6)
    scores = torch.stack([values.new_tensor(found[p][0]) for p in sorted(found) if batch.eligible[p]])
    assert float(steps.advantages[steps.mask].std(correction=0)) == pytest.approx(1, rel=1e-6)
    assert sorted(steps.advantages[steps.mask].tolist()) == pytest.approx(
        sorted(((scores - scores.mean()) / scores.std(correction=0)).tolist()), rel=1e-6
    )
