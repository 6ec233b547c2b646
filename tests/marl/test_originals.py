"""Eight faults of PyMARL and EPyMARL, each beside what happens here."""

import subprocess
import sys

import pytest
import torch
from recorded import pymarl_mask, recorded

from rolecall.marl.acting import Actor
from rolecall.marl.buffer import EpisodeBuffer
from rolecall.marl.envs import open_envs
from rolecall.marl.nets import Agents, AgentShape, RunningMoments
from rolecall.marl.runner import Runner
from rolecall.maths.returns import nstep_targets, td_lambda_targets


def played(name, limit=None):
    envs = open_envs(name, 3, limit=limit)
    shape = AgentShape(
        agents=len(envs.spec.agents), obs=envs.spec.obs_size, actions=envs.spec.n_actions, hidden=4,
        recurrent=False, shared=True, last_action=False,
    )  # fmt: skip
    return (
        Runner(envs, rewards="team", seed=0).run(Actor(Agents(shape, seed=0), how="sample"), phase=0, step=0).episodes
    )


@pytest.mark.parametrize("name", ["lbf:8x8-2p-2f-coop", "lbforaging:8x8-2p-2f-coop", "mpe:speaker-listener"])
def test_1_a_time_limit_is_not_stored_as_an_end(name):
    """EPyMARL's wrapper ORs `truncated` into done and names no limit: 1 terminated step per episode."""
    episodes = played(name)
    assert episodes.terminated.sum() == 0
    assert episodes.truncated.sum() == len(episodes)
    assert episodes.bootstrap.all()


def epymarl_nstep(rewards, values, mask, *, gamma, n):
    """Its `nstep_returns`: no look at `terminated`, and an unmasked value at the batch's last step."""
    time = rewards.shape[1]
    out = torch.zeros_like(rewards)
    for t in range(time):
        total = 0.0
        for k in range(n + 1):
            if t + k >= time:
                break
            if k == n:
                total += gamma**k * values[:, t + k] * mask[:, t + k]
            elif t + k == time - 1:
                total += gamma**k * rewards[:, t + k] * mask[:, t + k] + gamma ** (k + 1) * values[:, t + k + 1]
            else:
                total += gamma**k * rewards[:, t + k] * mask[:, t + k]
        out[:, t] = total
    return out


def test_2_no_value_behind_an_end_enters_a_target():
    batch = recorded([3], ["end"], time=6)
    batch.reward[0, :3, 0] = torch.tensor([0.0, 0.0, 1.0])
    values = torch.full((1, 6), 7.0)
    theirs = epymarl_nstep(batch.reward[..., 0][:, :5], values, batch.valid[:, :5].float(), gamma=1.0, n=5)
    assert float(theirs[0, 0]) > 7, "the value of padding leaks in"
    rewards, valid = batch.paid(1)[..., 0], batch.valid
    behind = batch.behind(values)
    for targets in (
        nstep_targets(rewards, values, valid, gamma=1.0, n=5, bootstrap=behind),
        td_lambda_targets(rewards, values, valid, gamma=1.0, lam=1.0, bootstrap=behind),
    ):
        assert targets[0, :3].tolist() == [1.0, 1.0, 1.0]


def test_3_padding_does_not_enter_the_moments_of_rewards():
    batch = recorded([1, 1], ["end", "end"], time=11)
    batch.reward[:, 0] = 1.0
    theirs = batch.reward[:, :-1]
    assert float(theirs.mean()) == pytest.approx(0.1)
    moments = RunningMoments()
    moments.update(batch.reward, batch.valid[..., None])
    assert float(moments.mean) == 1.0


def test_4_the_slot_behind_an_early_cut_does_not_train():
    batch = recorded([3], ["cut"], time=9)
    assert pymarl_mask(batch.filled, batch.terminated)[0] == [1, 1, 1, 1, 0, 0, 0, 0], "the slot at 3 is no action"
    assert batch.valid[0].int().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_5_a_shorter_episode_leaves_no_stale_tail():
    ring = torch.zeros(1, 9)
    for episode in (torch.ones(1, 8), torch.ones(1, 3)):  # `update` of a slice: what was longer stays
        ring[:, : episode.shape[1]] = episode
    assert ring.sum() == 8
    buffer = EpisodeBuffer(1, seed=0)
    for length in (7, 2):
        buffer.add(recorded([length], ["end"], time=9).trimmed())
    assert buffer.sample(1).episodes.filled.sum() == 3


def test_6_drawing_all_episodes_gives_no_view_of_the_buffer():
    held = torch.zeros(2, 3)
    held[:2].fill_(1)  # `self[:batch_size]`
    assert held.sum() == 6
    buffer = EpisodeBuffer(2, seed=0)
    buffer.add(recorded([3, 3], ["end", "end"], time=5))
    buffer.sample(2).episodes.obs.fill_(99)
    assert not (buffer.sample(2).episodes.obs == 99).any()


def test_7_no_indexing_that_torch_deprecates():
    """Lists of slices as an index; warnings are errors under pytest, so drawing and cutting must give none."""
    with pytest.warns(UserWarning, match="indexing"):
        torch.zeros(2, 2)[[slice(0, 1), slice(0, 1)]]
    buffer = EpisodeBuffer(4, seed=0)
    buffer.add(recorded([3, 4], ["end", "cut"], time=6))
    assert len(buffer.sample(2).episodes.rows([0]).trimmed()) == 1


def test_8_one_environment_needs_no_other_and_a_hung_one_has_a_deadline():
    """There `import envs` needs smaclite; and pettingzoo.mpe, which is gone. Deadlines: test_marl_envs.py."""
    hidden = ["smaclite", "pettingzoo", "mpe2", "lbforaging", "gymnasium"]
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from rolecall.marl.envs import open_envs; open_envs('climbing', 1); open_envs('lbf:8x8-2p-2f-coop', 1)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
