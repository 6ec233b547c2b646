"""Expert iteration: which answers are kept, that they and nothing else are imitated, and what is logged."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator
from learners import ROWS, STOP, Plain
from test_metrics_docs import unknown

from rolecall.config.merge import make
from rolecall.config.training import ExpertIterationOptions
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.recipes.ask import Asker
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.recipes.sft import nll
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows
from rolecall.train.optim import make_optimizer
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

A, B = ord("a"), ord("b")
ANSWERS = [(A, STOP), (A, B, STOP), (A, STOP), (B, B, B, B)]
SCORES = {"a": 1.0, "ab": 2.0, "bbbb": 0.5}


def learner_of(reward=lambda s: SCORES[s.completion], **settings):
    policy = load("tiny")
    defaults = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 4, "optim.lr": 1e-3, "epochs": 1, "batch": 64}
    options = make(ExpertIterationOptions, {**defaults, **settings})
    module = PolicyModel(policy.model)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, options.optim))
    updater = Updater(accelerator, wrapped, optimizer, token_budget=4096, max_grad_norm=None)
    asker = Asker(
        policy=policy,
        engine=ScriptedEngine(lambda request, sample: ANSWERS[sample], stop_ids=(STOP,)),
        reward=Plain(reward),
        rows=ListRows(ROWS),
        chat=options.chat,
        sampling=options.sampling,
        timer=Timer(),
    )
    return ExpertIterationLearner(options, policy=policy, updater=updater, asker=asker, tokenizer="bytes")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1]),
        ({"unique": False}, [0, 1, 2]),
        ({"threshold": 1.5}, [1]),
        ({"threshold": 0.0}, [0, 1, 3]),
        ({"keep": "best"}, [1]),
        ({"keep": "best", "threshold": 3.0}, []),
    ],
)
def test_which_answers_are_kept(settings, kept):
    """Scores 1, 2, 1 (the first again) and 0.5, for both prompts."""
    assert learner_of(**settings).collect(0).kept == [*kept, *(4 + i for i in kept)]


def test_failed_rewards_are_never_kept():
    learner = learner_of(lambda s: None if s.completion == "ab" else SCORES[s.completion], keep="best")
    assert learner.collect(0).kept == [0, 4]


def test_the_kept_answers_and_nothing_else_are_imitated():
    learner, other = learner_of(), learner_of()
    found = learner.collect(0)
    learner.update(found)
    chosen = [found.trajectories[i] for i in found.kept]
    batch = other._batch(dataclasses.replace(found, trajectories=chosen), torch.arange(4))
    result = other.updater.step(batch, nll, temperature=1.0)
    assert learner.metrics()["loss"] == pytest.approx(result.loss, rel=1e-6)
    for a, b in zip(learner.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_round_makes_passes_in_batches_and_the_engine_gets_the_weights():
    learner = learner_of(epochs=3, batch=2)
    learner.update(learner.collect(0))
    assert learner.metrics()["optimizer_steps"] == 3 * 2
    assert learner.metrics()["policy_version"] == learner.asker.engine.version == 1


def test_where_nothing_is_good_enough_the_policy_stays():
    learner = learner_of(threshold=9.0)
    before = [p.clone() for p in learner.policy.model.parameters()]
    learner.update(learner.collect(0))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.model.parameters(), strict=True))
    assert "no answer was good enough" in learner.explain()
    assert learner.metrics()["kept/answers"] == 0


def test_numbers_and_the_record(tmp_path):
    learner = learner_of()
    with RunDir(tmp_path, "run") as run:
        learner.run = run
        learner.update(learner.collect(0))
    m = learner.metrics()
    assert m["reward"] == pytest.approx(4.5 / 4)
    assert (m["kept/answers"], m["kept/share"], m["kept/prompts"], m["kept/reward"]) == (4, 0.5, 1.0, 1.5)
    assert unknown(set(m), "Expert iteration") == set()
    held = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert [d.extras["kept"] for d in held.details] == [True, True, False, False] * 2
    assert held.batch.scores.tolist() == [1.0, 2.0, 1.0, 0.5] * 2


def test_it_goes_on_from_its_state():
    learner, other = learner_of(), learner_of()
    first = learner.collect(0)
    other.load_state_dict(learner.state_dict())
    assert [g.row for g in other.collect(1).groups] == [g.row for g in learner.collect(1).groups]
    assert [g.row for g in first.groups] != [g.row for g in learner.collect(2).groups]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epochs": 0}, "epochs must be at least 1"), ({"sampling.temperature": 0.0}, "nothing to choose")],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        make(ExpertIterationOptions, settings)
