"""Episodes as a recorder leaves them, and PyMARL's own formulas on them, written as loops."""

import torch
from hypothesis import strategies as st

from rolecall.marl.episodes import EpisodeBatch


def recorded(lengths, ends, *, time, agents=2, actions=3, obs=4, seed=0, garbage=False, team=True):
    """Episodes of the given lengths; `ends` says "end", "cut" or "silent" (cut off, and not flagged) for each.

    With `garbage`, slots behind each episode hold NaN and random flags' worth of numbers, but are not filled.
    """
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    filled = torch.zeros(batch, time, 1, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(filled), torch.zeros_like(filled)
    for b, (length, how) in enumerate(zip(lengths, ends, strict=True)):
        assert 0 < length < time
        filled[b, : length + 1] = True
        terminated[b, length - 1] = how == "end"
        truncated[b, length - 1] = how == "cut"
    observed = torch.randn(batch, time, agents, obs, generator=g)
    reward = torch.randn(batch, time, 1 if team else agents, generator=g)
    for b, length in enumerate(lengths):
        observed[b, length + 1 :] = torch.nan if garbage else 0
        reward[b, length:] = torch.nan if garbage else 0
    return EpisodeBatch(
        obs=observed,
        actions=torch.randint(actions, (batch, time, agents, 1), generator=g),
        avail_actions=torch.ones(batch, time, agents, actions, dtype=torch.bool),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        filled=filled,
        present=torch.ones(batch, time, agents, dtype=torch.bool),
    )


def pymarl_mask(filled, terminated):
    """`mask = filled[:, :-1]; mask[:, 1:] *= 1 - terminated[:, :-1]`, in loops; [batch][time - 1]."""
    rows = []
    for b in range(len(filled)):
        row = []
        for t in range(filled.shape[1] - 1):
            value = int(filled[b, t, 0])
            if t > 0 and terminated[b, t - 1, 0]:
                value = 0
            row.append(value)
        rows.append(row)
    return rows


def pymarl_targets(batch, next_values, *, gamma):
    """y = r + gamma (1 - terminated) V of the next slot, in loops; [batch][time - 1]."""
    return [
        [
            float(batch.reward[b, t, 0] + gamma * (1 - int(batch.terminated[b, t, 0])) * next_values[b, t + 1])
            for t in range(batch.obs.shape[1] - 1)
        ]
        for b in range(len(batch))
    ]


@st.composite
def episode_lists(draw, *, ends=("end", "cut", "silent"), most=6, time=9):
    """(lengths, ends) of a few episodes."""
    count = draw(st.integers(1, most))
    lengths = draw(st.lists(st.integers(1, time - 1), min_size=count, max_size=count))
    how = draw(st.lists(st.sampled_from(ends), min_size=count, max_size=count))
    return lengths, how
