"""Losses of Q-learning and PPO on episodes: against loops, and against what must not change them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from recorded import episode_lists, pymarl_mask, pymarl_targets, recorded

from rolecall.marl.episodes import EpisodeBatch
from rolecall.marl.moments import RunningMoments
from rolecall.marl.nets import (
    UNAVAILABLE,
    Agents,
    AgentShape,
    Critic,
    MonotonicMixer,
    SumMixer,
    load_agents,
    save_agents,
)
from rolecall.marl.ppo import ActorCritic, ppo_loss, prepare
from rolecall.marl.q_learning import QNetworks, follow, q_loss
from rolecall.marl.scoring import action_scores, available

SHAPE = {"agents": 2, "obs": 4, "actions": 3, "hidden": 8, "recurrent": False, "shared": True, "last_action": False}
SHAPES = [{}, {"recurrent": True}, {"shared": False}, {"recurrent": True, "shared": False, "last_action": True}]
Q = {"gamma": 0.9, "lam": 0.0, "double": True}
PPO = {"clip": 0.2, "clip_value": 0.2, "vf_coef": 0.5, "entropy_coef": 0.01}


def q_networks(algo="vdn", seed=0, **shape):
    agents = Agents(AgentShape(**{**SHAPE, **shape}), seed=seed)
    mixers = {"iql": lambda: None, "vdn": SumMixer, "qmix": lambda: MonotonicMixer(2, 8, embed=5, hidden=7, seed=seed)}
    return QNetworks(agents, mixers[algo]()).double()


def actor_critic(view="state", **shape):
    agents = Agents(AgentShape(**{**SHAPE, **shape}), seed=0)
    return ActorCritic(agents, Critic((8 if view == "state" else 4) + 2, 8, seed=1), view=view).double()


def doubled(batch):
    return EpisodeBatch(**{n: t.double() if t.is_floating_point() else t for n, t in batch.tensors().items()})


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("algo", ["iql", "vdn", "qmix"])
@pytest.mark.parametrize("shape", [{}, {"recurrent": True, "last_action": True}])
def test_the_loss_is_pymarls_on_what_pymarl_can_record(algo, double, shape):
    """Episodes that end, and one that the limit cuts off at the batch's width; PyMARL's formula in loops."""
    batch = doubled(recorded([3, 8, 6, 8], ["end", "silent", "end", "end"], time=9))
    live, target = q_networks(algo, **shape), q_networks(algo, seed=5, **shape)
    ours = q_loss(live, target, batch, **{**Q, "double": double})
    scores, theirs = (action_scores(n.agents, batch).detach() for n in (live, target))
    chooser = scores if double else theirs
    mask = pymarl_mask(batch.filled, batch.terminated)

    def mixed(net, values, b, t):
        return values if net.mixer is None else net.mixer(values[None], batch.state[b, t][None]).detach()

    total = count = 0.0
    columns = 2 if algo == "iql" else 1
    for column in range(columns):
        done, ahead = torch.zeros(4, 9), torch.zeros(4, 9)
        for b in range(4):
            for t in range(int(batch.filled[b].sum())):
                acts = batch.actions[b, t, :, 0]
                best = chooser[b, t].argmax(-1)
                done[b, t] = mixed(live, scores[b, t][range(2), acts], b, t)[column]
                ahead[b, t] = mixed(target, theirs[b, t][range(2), best], b, t)[column]
        targets = pymarl_targets(batch, ahead, gamma=0.9)
        for b in range(4):
            for t in range(8):
                total += mask[b][t] * (float(done[b, t]) - targets[b][t]) ** 2
                count += mask[b][t]
    assert float(ours.loss.detach()) == pytest.approx(total / count, rel=1e-5)


@settings(max_examples=15)
@given(episode_lists(most=4))
@pytest.mark.parametrize("algo", ["iql", "qmix"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_padding_and_order_change_neither_loss_nor_gradient(algo, recurrent, episodes):
    lengths, ends = episodes
    live, target = q_networks(algo, recurrent=recurrent), q_networks(algo, seed=5, recurrent=recurrent)
    narrow = doubled(recorded(lengths, ends, time=9))
    poisoned = {}
    for name, tensor in narrow.tensors().items():  # four slots more, and whatever there can be behind the episodes
        wide = torch.zeros(len(tensor), 13, *tensor.shape[2:], dtype=tensor.dtype)
        wide[:, :9] = tensor
        poisoned[name] = wide
    for b, length in enumerate(lengths):
        poisoned["reward"][b, length:] = torch.nan
        poisoned["obs"][b, length + 1 :] = torch.nan
        poisoned["terminated"][b, length + 1 :] = True
    wide = EpisodeBatch(**poisoned).rows(list(reversed(range(len(lengths)))))
    for lam in (0.0, 0.7):
        a, b = (q_loss(live, target, batch, **{**Q, "lam": lam}).loss for batch in (narrow, wide))
        ga, gb = gradients(live, a), gradients(live, b)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        for name in ga:
            torch.testing.assert_close(ga[name], gb[name], rtol=1e-9, atol=1e-11)


def test_td_lambda_of_one_is_the_discounted_return():
    batch = doubled(recorded([3], ["end"], time=5))
    found = q_loss(q_networks("vdn"), q_networks("vdn", seed=3), batch, gamma=0.5, lam=1.0, double=True)
    r = batch.reward[0, :3, 0]
    returns = [r[0] + 0.5 * r[1] + 0.25 * r[2], r[1] + 0.5 * r[2], r[2]]
    assert float(found.target) == pytest.approx(float(sum(returns)) / 3)


@pytest.mark.parametrize("algo", ["iql", "vdn", "qmix"])
def test_an_absent_agent_gets_no_gradient_and_adds_nothing(algo):
    batch = doubled(recorded([4, 4], ["end", "cut"], time=6))
    batch.present[:, :, 1] = False
    live, target = q_networks(algo, shared=False), q_networks(algo, seed=5, shared=False)
    found = gradients(live, q_loss(live, target, batch, **Q).loss)
    assert any(g.abs().sum() > 0 for name, g in found.items() if name.startswith("agents.nets.0"))
    assert all(g.abs().sum() == 0 for name, g in found.items() if name.startswith("agents.nets.1"))
    before = q_loss(live, target, batch, **Q).loss.detach()
    with torch.no_grad():
        for parameter in live.agents.nets[1].parameters():
            parameter.add_(7.0)
    torch.testing.assert_close(q_loss(live, target, batch, **Q).loss.detach(), before)


def test_a_fresh_mixture_is_the_sum_and_its_parts_differ():
    mixer = MonotonicMixer(3, 5, embed=4, hidden=6, seed=0)
    draw = torch.Generator().manual_seed(0)
    values, state = torch.rand(40, 3, generator=draw), 10 * torch.randn(40, 5, generator=draw)
    torch.testing.assert_close(mixer(values, state), values.sum(1))
    optimiser = torch.optim.Adam(mixer.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        (mixer(values, state) - state[:, 0]).square().mean().backward()
        optimiser.step()
    weights = mixer.weights1(state).view(40, 3, 4)
    assert (weights[..., 1:] - weights[..., :1]).abs().min() > 1e-4  # no hidden unit is a copy of another
    assert (weights.std(0) > 1e-4).all()  # they depend on the state


def test_a_mixture_rises_with_every_agents_value():
    mixer = MonotonicMixer(3, 5, embed=4, hidden=6, seed=0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter))
    values = torch.randn(40, 3, requires_grad=True)
    mixer(values, torch.randn(40, 5)).sum().backward()
    assert (values.grad >= 0).all()
    assert SumMixer()(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 0)).tolist() == [3.0]


def test_target_networks_follow():
    live, target = q_networks("qmix"), q_networks("qmix", seed=5)
    first = next(target.parameters()).clone()
    follow(list(target.parameters()), list(live.parameters()), share=0.25)
    torch.testing.assert_close(next(target.parameters()), 0.75 * first + 0.25 * next(live.parameters()))
    follow(list(target.parameters()), list(live.parameters()), share=1.0)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), live.parameters(), strict=True))
    assert not any(p.requires_grad for p in live.target().parameters())


def test_weights_of_prioritised_episodes_weigh_them():
    batch = doubled(recorded([3, 3], ["end", "end"], time=5))
    live, target = q_networks(), q_networks(seed=5)
    both, one = (q_loss(live, target, batch, **Q, weights=torch.tensor(w)) for w in ([1.0, 1.0], [1.0, 0.0]))
    alone = q_loss(live, target, batch.rows([0]), **Q)
    torch.testing.assert_close(one.loss, alone.loss / 2)
    torch.testing.assert_close(both.loss, q_loss(live, target, batch, **Q).loss)
    assert both.errors.shape == (2,)


@pytest.mark.parametrize("view", ["own", "state"])
@pytest.mark.parametrize("shape", SHAPES)
def test_before_the_first_update_the_ratio_is_one(shape, view):
    module = actor_critic(view, **shape)
    steps, _ = prepare(module, RunningMoments(), doubled(recorded([3, 8], ["end", "cut"], time=9)), gamma=0.9, lam=0.9)
    found = ppo_loss(module, steps, **PPO)
    assert float(found.measured["policy/approx_kl"]) == pytest.approx(0, abs=1e-12)
    assert float(found.terms["policy"].detach()) == pytest.approx(0, abs=1e-9), "whitened advantages have mean 0"


def test_a_step_that_is_worth_nothing_is_not_counted_as_clipped():
    module = actor_critic("own")
    steps, _ = prepare(module, None, doubled(recorded([3, 8], ["end", "cut"], time=9)), gamma=0.9, lam=0.9)
    moved = replace(steps, old_logprobs=steps.old_logprobs - 1)
    worthless = replace(moved, advantages=torch.zeros_like(steps.advantages))
    assert float(ppo_loss(module, moved, **PPO).measured["clip_ratio/region_mean"]) > 0
    assert float(ppo_loss(module, worthless, **PPO).measured["clip_ratio/region_mean"]) == 0


@pytest.mark.parametrize("embed", [4, 64])
def test_a_fresh_mixture_begins_with_weights_of_the_size_that_torch_would_give(embed):
    weights = MonotonicMixer(3, 5, embed=embed, hidden=6, seed=0).weights1(torch.zeros(1, 5)).detach()
    assert float(weights.min()) * embed**0.5 >= 0.5
    assert float(weights.max()) * embed**0.5 <= 1.5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_pass_over_everything_finds_the_old_log_probs(shape):
    batch = doubled(recorded([3, 8], ["end", "cut"], time=9))
    module = actor_critic("state", **shape)
    given, _ = prepare(module, None, batch, gamma=0.9, lam=0.9)
    without, _ = prepare(module, None, batch, gamma=0.9, lam=0.9, logprobs=False)
    assert without.old_logprobs is None
    found = ppo_loss(module, without, **PPO)
    torch.testing.assert_close(found.logprobs[given.mask], given.old_logprobs[given.mask])
    expected = gradients(module, ppo_loss(module, given, **PPO).loss)
    for name, gradient in gradients(module, found.loss).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("view", ["own", "state"])
@pytest.mark.parametrize("shape", [{}, {"recurrent": True}])
def test_ppos_loss_against_a_loop(shape, view):
    """After the policy has moved: GAE backwards in time, ratio and value clipped, agent by agent and step by step."""
    module, gamma, lam = actor_critic(view, **shape), 0.9, 0.8
    lengths, ends = [3, 6], ["end", "cut"]
    batch = doubled(recorded(lengths, ends, time=9))
    batch.avail_actions[1, 2, 0, 1] = False
    batch.actions[1, 2, 0] = 2
    steps, _ = prepare(module, None, batch, gamma=gamma, lam=lam)

    def said():
        with torch.no_grad():
            scores = available(action_scores(module.agents, batch), batch.avail_actions).log_softmax(-1)
            return scores, module.critic(module.critic_inputs(batch))

    old, old_values = said()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double())
    new, values = said()

    rows = []
    for b, (length, how) in enumerate(zip(lengths, ends, strict=True)):
        for a in range(2):
            behind, advantage = (float(old_values[b, length, a]) if how == "cut" else 0.0), 0.0
            for t in reversed(range(length)):
                value = float(old_values[b, t, a])
                advantage = float(batch.reward[b, t, 0]) + gamma * behind - value + gamma * lam * advantage
                behind = value
                rows.append((b, t, a, advantage))
    raw = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    white = (raw - raw.mean()) / raw.std(correction=0)
    policy = value_loss = bonus = 0.0
    for (b, t, a, own), advantage in zip(rows, white.tolist(), strict=True):
        action = int(batch.actions[b, t, a])
        ratio = float((new[b, t, a, action] - old[b, t, a, action]).exp())
        policy += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)) / len(rows)
        before, now = float(old_values[b, t, a]), float(values[b, t, a])
        goal = own + before
        value_loss += 0.5 * max((now - goal) ** 2, (min(max(now, before - 0.2), before + 0.2) - goal) ** 2) / len(rows)
        bonus -= float((new[b, t, a].exp() * new[b, t, a]).nan_to_num().sum()) / len(rows)
    found = ppo_loss(module, steps, **PPO)
    assert {name: float(term.detach()) for name, term in found.terms.items()} == pytest.approx(
        {"policy": policy, "value": value_loss, "entropy": bonus}, rel=1e-6
    )
    assert float(found.loss.detach()) == pytest.approx(policy + 0.5 * value_loss - 0.01 * bonus, rel=1e-6)


@pytest.mark.parametrize("shape", [{}, {"recurrent": True}])
def test_padding_and_order_change_no_gradient_of_ppo(shape):
    module = actor_critic(**shape)
    lengths, ends = [2, 7, 5], ["end", "cut", "silent"]
    found = []
    for time, order in ((9, [0, 1, 2]), (14, [2, 0, 1])):
        batch = doubled(recorded(lengths, ends, time=9))
        wide = {n: torch.zeros(3, time, *t.shape[2:], dtype=t.dtype) for n, t in batch.tensors().items()}
        for name, tensor in batch.tensors().items():
            wide[name][:, :9] = tensor
        if time == 14:
            for b, length in enumerate(lengths):
                wide["reward"][b, length:] = wide["obs"][b, length + 1 :] = torch.nan
        steps, measured = prepare(module, RunningMoments(), EpisodeBatch(**wide).rows(order), gamma=0.9, lam=0.9)
        found.append((gradients(module, ppo_loss(module, steps, **PPO).loss), measured))
    for name, gradient in found[0][0].items():
        torch.testing.assert_close(gradient, found[1][0][name], rtol=1e-8, atol=1e-11)
    assert found[0][1] == pytest.approx(found[1][1])


def test_single_steps_are_those_at_which_an_agent_chose():
    module, batch = actor_critic(), doubled(recorded([3, 8], ["end", "cut"], time=9))
    batch.present[0, 1, 1] = False
    steps, _ = prepare(module, None, batch, gamma=0.9, lam=0.9)
    assert len(steps) == int(batch.eligible.sum()) == 2 * 11 - 1
    assert steps.mask.all()
    assert int((steps.agent == 1).sum()) == 10


@pytest.mark.parametrize("shape", [{}, {"recurrent": True}, {"shared": False}])
def test_mini_batches_add_up_to_the_whole(shape):
    module = actor_critic(**shape)
    batch = doubled(recorded([4] * 4, ["end"] * 4, time=6))
    steps, _ = prepare(module, None, batch, gamma=0.9, lam=0.9)
    whole = gradients(module, ppo_loss(module, steps, **PPO).loss)
    index = torch.arange(len(steps))
    parts = [gradients(module, ppo_loss(module, steps.part(i), **PPO).loss) for i in index.chunk(2)]
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, (parts[0][name] + parts[1][name]) / 2, rtol=1e-8, atol=1e-12)


def test_an_absent_agents_policy_gets_no_gradient():
    module = actor_critic(shared=False)
    batch = doubled(recorded([4, 4], ["end", "cut"], time=6))
    batch.present[:, :, 1] = False
    steps, _ = prepare(module, None, batch, gamma=0.9, lam=0.9)
    found = gradients(module, ppo_loss(module, steps, **PPO).loss)
    assert all(g.abs().sum() == 0 for name, g in found.items() if name.startswith("agents.nets.1"))
    assert any(g.abs().sum() > 0 for name, g in found.items() if name.startswith("agents.nets.0"))


def test_value_normalisation_does_not_change_what_is_advantageous():
    """The critic's scale moves, what it says in rewards' units is the same, so advantages are too."""
    module, batch = actor_critic(), doubled(recorded([5, 8], ["end", "cut"], time=9))
    moments = RunningMoments()
    moments.update(torch.tensor([10.0, 30.0]), torch.ones(2, dtype=torch.bool))
    with torch.no_grad():  # the critic of the plain run says what the other one means
        plain = actor_critic()
        plain.critic.body[-1].weight.mul_(moments.std)
        plain.critic.body[-1].bias.mul_(moments.std).add_(moments.mean)
    scaled, _ = prepare(module, moments, batch, gamma=0.9, lam=0.9)
    raw, _ = prepare(plain, None, batch, gamma=0.9, lam=0.9)
    torch.testing.assert_close(scaled.advantages, raw.advantages)
    torch.testing.assert_close(moments.restore(scaled.returns), raw.returns)


def test_unavailable_actions_have_no_chance_and_no_gradient():
    scores = torch.randn(5, 3, requires_grad=True)
    avail = torch.tensor([True, False, True]).expand(5, 3)
    logprobs = available(scores, avail).log_softmax(-1)
    assert (logprobs[:, 1].exp() == 0).all()
    logprobs[:, 0].sum().backward()
    assert (scores.grad[:, 1] == 0).all()
    assert torch.isfinite(scores.grad).all()
    assert (available(scores, torch.zeros(5, 3, dtype=torch.bool)) > UNAVAILABLE).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_step_by_step_and_all_at_once_say_the_same(shape):
    """Acting carries a memory from step to step; learning walks the episode in one go."""
    agents = Agents(AgentShape(**{**SHAPE, **shape}), seed=0)
    batch = recorded([6, 6], ["cut", "cut"], time=7)
    at_once = action_scores(agents, batch)
    memory, last = None, None
    for t in range(7):
        scores, memory = agents(agents.inputs(batch.obs[:, t], last)[None], memory)
        torch.testing.assert_close(scores[0], at_once[:, t])
        last = batch.actions_onehot[:, t]


@pytest.mark.parametrize("shape", SHAPES)
def test_agents_come_back_from_disk(shape, tmp_path):
    agents = Agents(AgentShape(**{**SHAPE, **shape}), seed=4)
    save_agents(agents, tmp_path / "model", {"env": "climbing"})
    again, about = load_agents(tmp_path / "model")
    assert about == {"env": "climbing"}
    assert again.shape == agents.shape
    assert all(torch.equal(a, b) for a, b in zip(agents.parameters(), again.parameters(), strict=True))


def test_moments_count_what_is_masked_in_only():
    moments = RunningMoments()
    rewards = torch.zeros(4, 10)
    rewards[:, :1] = 1.0
    mask = rewards > 0
    moments.update(torch.where(mask, rewards, torch.nan), mask)
    assert (float(moments.mean), float(moments.std)) == (1.0, 1.0), "a constant is not divided by 0"
    moments.update(torch.tensor([[3.0]]), torch.tensor([[True]]))
    everything = torch.tensor([1.0, 1, 1, 1, 3])
    assert float(moments.mean) == pytest.approx(float(everything.mean()))
    assert float(moments.std) == pytest.approx(float(everything.std(correction=0)))
    moments.update(torch.full((2, 2), torch.inf), torch.ones(2, 2, dtype=torch.bool))
    assert float(moments.mean) == pytest.approx(1.4)


def test_moments_that_forget():
    moments = RunningMoments(decay=0.5)
    for value in (1.0, 3.0):
        moments.update(torch.tensor([value]), torch.tensor([True]))
    assert float(moments.mean) == pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)
    x = torch.randn(5)
    torch.testing.assert_close(moments.restore(moments.normalise(x)), x)


def test_moments_keep_small_differences_of_large_numbers():
    moments = RunningMoments()
    for i in range(10):
        moments.update(torch.tensor([1e9 + i], dtype=torch.float64), torch.tensor([True]))
    assert float(moments.mean) == pytest.approx(1e9 + 4.5, rel=1e-12)
