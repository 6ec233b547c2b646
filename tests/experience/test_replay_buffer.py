"""The replay buffer: its limits hold whatever happens, it says what it cannot find, and it comes back exactly."""

from dataclasses import replace
from itertools import combinations
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.experience.replay import (
    SAMPLERS,
    Known,
    Limits,
    ReplayBuffer,
    StoredGroup,
    answers_of,
    difficulty,
    widest,
)
from rolecall.train.state import read_state, write_state
from rolecall.types import Finish, Trajectory

NAMES = [*SAMPLERS, "version_decay"]


def trajectory(group: int, episode: int = 0, *, version: int = 0, logprob: float = -1.0, **more) -> Trajectory:
    return Trajectory(
        ids=(5, 6, 2),
        roles=(1, 2, 3),
        behaviour_logprobs=(nan, logprob, -0.5),
        group=group,
        episode=episode,
        policy_version=version,
        **more,
    )


def stored(group: int, totals=(0.0, 1.0), *, version: int = 0, row: int = 0, logprobs=None) -> StoredGroup:
    logprobs = logprobs or (-1.0,) * len(totals)
    return StoredGroup(
        step=version + 1,
        places=tuple(range(len(totals))),
        row=row,
        trajectories=tuple(trajectory(group, i, version=version, logprob=p) for i, p in enumerate(logprobs)),
        totals=tuple(totals),
    )


def buffer(sampler="recent", *, size=8, max_staleness=5, max_uses=2, **more) -> ReplayBuffer:
    limits = Limits(size=size, max_staleness=max_staleness, max_uses=max_uses)
    return ReplayBuffer(limits, sampler=sampler, seed=0, **more)


def numbers(drawn) -> list[int]:
    return [group.group for group in drawn.groups]


# -- limits ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_limits_are_never_exceeded_in_any_history(data):
    limits = Limits(
        size=data.draw(st.integers(1, 6)),
        max_staleness=data.draw(st.integers(1, 4)),
        max_uses=data.draw(st.integers(1, 3)),
    )
    held = ReplayBuffer(limits, sampler=data.draw(st.sampled_from(NAMES)), seed=data.draw(st.integers(0, 3)))
    drawn_times: dict[int, int] = {}
    number = version = 0
    for step in range(data.draw(st.integers(1, 15))):
        version += data.draw(st.integers(0, 3))
        wanted = data.draw(st.integers(0, 5))
        drawn = held.draw(wanted, version=version, step=step)
        assert len(drawn.groups) + drawn.missing == wanted
        assert len(set(numbers(drawn))) == len(drawn.groups), "a group is drawn once for a step"
        assert bool(drawn.why) == bool(drawn.missing)
        for group in drawn.groups:
            drawn_times[group.group] = drawn_times.get(group.group, 0) + 1
            assert version - group.version <= limits.max_staleness
            assert drawn_times[group.group] <= limits.max_uses
        fresh = data.draw(st.integers(0, 4))
        held.add([stored(number + i, version=max(0, version - i % 2)) for i in range(fresh)])
        number += fresh
        assert len(held) <= limits.size


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_found_is_said_and_never_waited_for(name):
    held = buffer(name, max_uses=1)
    assert held.draw(3, version=0, step=0).why.startswith("0 of 3 groups found: 0 were held")
    held.add([stored(1, version=0), stored(2, version=4)])
    drawn = held.draw(3, version=6, step=1)
    assert numbers(drawn) == [2]
    assert drawn.missing == 2
    assert "2 were held, of which 1 were older than 5 versions and 0 used 1 times" in drawn.why
    drawn = held.draw(1, version=6, step=2)
    assert (drawn.groups, drawn.missing) == ((), 1)
    assert "1 used 1 times" in drawn.why


def test_a_group_is_used_up_to_its_limit_of_age_and_not_beyond():
    """Sampled by version 0 and allowed 5 versions: version 5 may still replay it."""
    for version, expected in ((4, [1]), (5, [1]), (6, [])):
        held = buffer(max_staleness=5)
        held.add([stored(1, version=0)])
        assert numbers(held.draw(1, version=version, step=0)) == expected
        assert len(held) == len(expected)


def test_the_oldest_make_room():
    held = buffer(size=3)
    held.add([stored(i) for i in range(5)])
    assert [group.group for group in held.groups] == [2, 3, 4]


def test_groups_without_anything_to_compare_are_not_held_unless_asked():
    flat, failed, one = stored(1, (1.0, 1.0)), stored(2, (None, None)), stored(3, (1.0,))
    partly = stored(4, (1.0, None))
    held = buffer()
    held.add([flat, failed, one, partly])
    assert [group.group for group in held.groups] == [3]
    held = buffer(keep_flat=True)
    held.add([flat, failed, one, partly])
    assert [group.group for group in held.groups] == [1, 3, 4]


# -- samplers ----------------------------------------------------------------------------------------------------


def test_samplers_take_what_they_say():
    groups = [
        stored(0, (0.0, 1.0), version=3),
        stored(1, (1.0, 0.9), version=1),
        stored(2, (-1.0, 1.0), version=2),
    ]

    def first(name):
        held = buffer(name)
        held.add(groups)
        return numbers(held.draw(3, version=3, step=0))

    assert first("recent") == [0, 2, 1]
    assert first("highest") == [1, 0, 2]
    assert first("max_variance") == [2, 0, 1]
    assert sorted(first("random")) == [0, 1, 2]


def test_a_use_counts_as_versions_under_version_decay():
    held = buffer("version_decay", max_uses=9, version_decay=2.0)
    held.add([stored(0, version=0), stored(1, version=1)])
    assert [numbers(held.draw(1, version=1, step=s))[0] for s in range(4)] == [1, 0, 1, 0]


def test_groups_with_equal_worth_are_no_error():
    held = buffer("highest")
    held.add([stored(i) for i in range(4)])
    assert numbers(held.draw(4, version=0, step=0)) == [3, 2, 1, 0]


def test_difficulty_draws_buckets_as_a_normal_around_half():
    """8 answers, k solved: the chance of a bucket is proportional to exp(-(k - 4)^2 / 2), whatever it holds."""
    groups = [Known(version=0, uses=0, scores=[0.0] * 8, solved=k) for k in (1, 4, 4, 4, 6)]
    rng = np.random.default_rng(0)
    first = [groups[difficulty(groups, rng)[0]].solved for _ in range(4000)]
    raw = {k: np.exp(-((k - 4) ** 2) / 2) for k in (1, 4, 6)}
    for k, chance in raw.items():
        assert first.count(k) / 4000 == pytest.approx(chance / sum(raw.values()), abs=0.02)
    lopsided = [Known(version=0, uses=0, scores=[0.0] * 200, solved=200)]
    assert difficulty(lopsided, rng) == [0], "a bucket whose chance underflows is still a bucket"


def test_a_total_at_the_bound_is_solved(monkeypatch):
    known = []
    monkeypatch.setitem(SAMPLERS, "random", lambda groups, rng: known.extend(groups) or [])
    held = buffer("random", solved_at=0.5)
    held.add([stored(1, (0.5, 0.6, 0.4, None))])
    held.draw(1, version=0, step=0)
    assert [group.solved for group in known] == [2]


def test_chance_depends_on_the_seed_and_the_step_alone():
    def draw(step, seed=0, before=0):
        held = ReplayBuffer(Limits(size=50, max_staleness=9, max_uses=9), sampler="random", seed=seed)
        held.add([stored(i) for i in range(30)])
        for other in range(before):
            held.draw(2, version=0, step=100 + other)
        return numbers(held.draw(10, version=0, step=step))

    assert draw(3) == draw(3) == draw(3, before=5)
    assert draw(3) != draw(4)
    assert draw(3) != draw(3, seed=1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=8), st.integers(1, 8))
def test_the_widest_subset_is_that_of_all_combinations(scores, k):
    k = min(k, len(scores))
    chosen = widest(scores, range(len(scores)), k)
    assert len(set(chosen)) == k
    best = max(float(np.var([scores[i] for i in some])) for some in combinations(range(len(scores)), k))
    assert float(np.var([scores[i] for i in chosen])) == pytest.approx(best)


def test_some_answers_of_a_group():
    scores, sure = [0.0, 1.0, None, 0.4], [-3.0, -1.0, 0.0, -0.2]
    rng = np.random.default_rng(0)

    def chosen(sampler, k=2):
        return answers_of(scores, sure, k, sampler=sampler, rng=rng)

    assert chosen("highest") == [1, 3]
    assert chosen("max_variance") == [0, 1]
    assert chosen("difficulty") == [1, 3], "the surest of those that have a score"
    assert len(chosen("recent")) == 2
    assert 2 not in chosen("recent", 3), "a failed one comes last"
    assert chosen("highest", 9) == [0, 1, 2, 3]


def test_the_trajectories_of_an_episode_stay_together():
    parts = tuple(trajectory(1, episode) for episode in (0, 0, 1, 2, 2))
    group = StoredGroup(step=1, places=(0, 1, 2, 3, 4), row=0, trajectories=parts, totals=(0.0, 0.0, 0.5, 1.0, 1.0))
    held = buffer("highest", answers=1)
    held.add([group])
    (drawn,) = held.draw(1, version=0, step=0).groups
    assert drawn.places == (3, 4)


# -- state -------------------------------------------------------------------------------------------------------


def test_a_buffer_comes_back_from_disk_exactly(tmp_path):
    held = buffer(keep_flat=True, max_uses=3)
    odd = replace(
        stored(7, (0.1, None)),
        trajectories=(
            trajectory(7, 0, finish=Finish.LENGTH, scores={"a": None, "b": 0.1}, turns=((1, 3),)),
            replace(trajectory(7, 1), behaviour_logprobs=None, author="other", behaviour_prompt_ids=(9, 9)),
        ),
    )
    held.add([stored(1, version=2), odd])
    held.draw(1, version=2, step=0)
    write_state(tmp_path, "replay", held.state_dict())
    back = buffer(keep_flat=True, max_uses=3)
    back.load_state_dict(read_state(tmp_path, "replay"))
    for was, now in zip(held.groups, back.groups, strict=True):
        assert replace(now, trajectories=was.trajectories) == was
        for a, b in zip(was.trajectories, now.trajectories, strict=True):
            assert replace(a, behaviour_logprobs=None) == replace(b, behaviour_logprobs=None)
            assert (a.behaviour_logprobs is None) == (b.behaviour_logprobs is None)
            pairs = zip(a.behaviour_logprobs or (), b.behaviour_logprobs or (), strict=True)
            assert all(x == y or (isnan(x) and isnan(y)) for x, y in pairs)
    assert [g.uses for g in back.groups] == [g.uses for g in held.groups] != [0, 0]
    assert numbers(back.draw(2, version=3, step=1)) == numbers(held.draw(2, version=3, step=1))


def test_an_empty_buffer_comes_back_empty(tmp_path):
    write_state(tmp_path, "replay", buffer().state_dict())
    back = buffer()
    back.load_state_dict(read_state(tmp_path, "replay"))
    assert len(back) == 0


def test_a_buffer_that_comes_back_keeps_to_the_limits_of_now():
    held = buffer(size=5)
    held.add([stored(i) for i in range(5)])
    back = buffer(size=2)
    back.load_state_dict(held.state_dict())
    assert [group.group for group in back.groups] == [3, 4]


def test_a_group_whose_parts_do_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        replace(stored(1), totals=(1.0,))
