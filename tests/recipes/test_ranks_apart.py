"""Processes that train together ask and draw what one process would; an evaluation draws nothing.

Ranks are numbers that collectors are given: no process is started.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from learners import STOP, Plain, options_of

from rolecall.agents.episodes import Arena, EnvOnly, EpisodeEvaluator, Episodes
from rolecall.agents.pool import LocalEnvs
from rolecall.config.agents import AgentOptions
from rolecall.config.merge import resolve
from rolecall.config.parts import ChatOptions
from rolecall.config.training import SFTOptions
from rolecall.jobs import evaluators
from rolecall.policy.load import load
from rolecall.recipes.collect import Answers, Asker
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.env import Move
from rolecall.tasks.rows import ListRows
from rolecall.train.ranks import Ranks
from rolecall.train.timing import Timer
from rolecall.types import Sampling

ROWS = [{"prompt": f"{i:02d}:"} for i in range(24)]
ALIKE = [{"prompt": "go:"}] * 24
RANKS, PROMPTS = 3, 6


@pytest.fixture(scope="module")
def policy():
    return load("tiny")


@pytest.fixture(scope="module")
def engine(policy):
    return NativeEngine(policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=policy.context_length)


class Once:
    """One question, one answer."""

    players = ("agent",)

    def reset(self, row, seed):
        return Move(speaker="agent", messages={"agent": [{"role": "user", "content": row["prompt"]}]})

    def step(self, message):
        return Move(speaker="agent", rewards={"agent": 1.0}, done=True)


def arena(policy, engine):
    return Arena(
        policy=policy, engine=engine, envs=LocalEnvs(Once), reward=EnvOnly(), options=AgentOptions(), chat=ChatOptions()
    )


def collectors(kind, policy, engine, rows, *, ranks=RANKS, **more):
    """One for each rank, as the processes of a run would have them."""
    settings = {name: more.pop(name) for name in list(more) if "." in name}
    options = options_of(prompts=PROMPTS, samples=2, **{"sampling.max_new_tokens": 6}, **settings)
    for rank in range(ranks):
        place = Ranks(number=rank, count=ranks, **more)
        if kind is Episodes:
            yield Episodes(options, arena(policy, engine), rows=ListRows(rows), ranks=place)
        else:
            parts = {"engine": engine, "reward": Plain(lambda s: 1.0), "rows": ListRows(rows), "timer": Timer()}
            yield Answers(options, policy=policy, **parts, ranks=place)


def silent():
    return ScriptedEngine(lambda request, sample: (ord("a"), STOP), stop_ids=(STOP,))


@pytest.mark.parametrize("kind", [Answers, Episodes])
def test_ranks_share_out_what_one_process_would_ask(kind, policy):
    (alone,) = collectors(kind, policy, silent(), ROWS, ranks=1)
    together = list(collectors(kind, policy, silent(), ROWS))
    for step in range(3):
        whole = alone.collect(step)
        parts = [collector.collect(step) for collector in together]
        asked = [set(part.rows) for part in parts]
        assert [len(rows) for rows in asked] == [PROMPTS // RANKS] * RANKS
        assert set.union(*asked) == set(whole.rows), "nobody asks what another asks, and nothing is left out"
        numbers = [{t.group for t in part.trajectories} for part in parts]
        assert set.union(*numbers) == {t.group for t in whole.trajectories}


def noting(asked):
    """`Asker.ask`, which also notes the rows by their prompts' numbers."""
    ask = Asker.ask
    return lambda self, rows, **how: asked.update(rows) or ask(self, rows, **how)


def test_ranks_share_out_what_they_ask_in_place_of_flat_groups(policy):
    """Every group is flat here, so each of two rounds asks for as many prompts again as there are."""
    each = torch.full((RANKS,), float(PROMPTS // RANKS), dtype=torch.float64)
    asked = {}
    for collector in collectors(Answers, policy, silent(), ROWS, all_sum=lambda x: each, **{"algorithm.resample": 2}):
        with mock.patch.object(Asker, "ask", noting(asked)):
            assert collector.collect(0).drawn.prompts == 2 * PROMPTS // RANKS
    assert sorted(asked) == list(range(2 * PROMPTS)), "every prompt has a number of its own"
    (alone,) = collectors(Answers, policy, silent(), ROWS, ranks=1)
    assert [asked[number] for number in sorted(asked)] == alone.order.take(2 * PROMPTS)


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("kind", [Answers, Episodes])
def test_ranks_draw_what_one_process_draws(kind, policy, engine, ranks):
    """All prompts are the same: the number of the prompt tells their answers apart, on whichever rank it is."""
    (alone,) = collectors(kind, policy, engine, ALIKE, ranks=1)
    whole = {(t.group, t.episode): t.ids for t in alone.collect(1).trajectories}
    parts = [collector.collect(1).trajectories for collector in collectors(kind, policy, engine, ALIKE, ranks=ranks)]
    assert {(t.group, t.episode): t.ids for part in parts for t in part} == whole
    assert len(set(whole.values())) == len(whole) == 2 * PROMPTS


def test_an_evaluation_of_episodes_plays_what_is_likeliest_whatever_training_samples_with(policy, engine):
    def said(**sampling):
        how = {"rows": ListRows(ROWS[:3]), "sampling": Sampling(max_new_tokens=6, **sampling)}
        return [EpisodeEvaluator(arena(policy, engine), **how, seed=seed).run().answers for seed in (0, 1)]

    first, again = said()
    assert first == again == said(temperature=0.0)[0]


def test_all_numbers_of_an_evaluation_of_episodes_and_the_scores_of_their_records(policy):
    how = {"rows": ListRows(ROWS[:1]), "sampling": Sampling(max_new_tokens=6), "samples": 2}
    numbers = EpisodeEvaluator(arena(policy, silent()), **how).run().numbers
    assert numbers == {
        "reward": 1.0,
        "accuracy": 1.0,
        "mean_length": 2.0,
        "mean_turns": 1.0,
        "clipped_ratio": 0.0,
        "failed": 0.0,
        "avg@2": 1.0,
        "pass@2": 1.0,
    }
    (collector,) = collectors(Episodes, policy, silent(), ROWS, ranks=1)
    found = collector.collect(0)
    assert [dict(t.scores) for t in found.trajectories] == [{"env": 1.0}] * 2 * PROMPTS


def test_held_out_episodes_of_a_job_that_does_not_play_are_shared_out_too(policy, monkeypatch):
    how = resolve(SFTOptions, [("test", {"rows": "guessing", "eval": {"every": 1, "rows": 4}})]).options
    given, ranks = {}, Ranks(number=1, count=2)
    monkeypatch.setattr(evaluators, "EpisodeEvaluator", lambda arena, **parts: given.update(parts))
    with ExitStack() as stack:
        assert evaluators.task_evaluator(how, policy, "guessing", stack, ranks) is not None
    assert given["ranks"] is ranks


def test_the_time_of_episodes_is_counted_as_that_of_answers(policy):
    (collector,) = collectors(Episodes, policy, silent(), ROWS, ranks=1)
    collector.collect(0)
    assert collector.arena.timer.take().keys() == {"generate", "reward"}
