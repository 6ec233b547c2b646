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
from rolecall.recipes.collect import Asker
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.recipes.sft import nll
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows
from rolecall.train.optim import make_optimizer
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.train.timing import Timer
from rolecall.types import Finish

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


def uneven(sample):
    """The first prompt's answers are all too bad; the second's are as above, but the last has no score."""
    return 0.5 if sample.prompt_index == 0 else {**SCORES, "bbbb": None}[sample.completion]


def test_numbers_and_the_record(tmp_path):
    learner = learner_of(uneven, **{"save.rollouts": 1})
    with RunDir(tmp_path, "run") as run:
        learner.run = run
        found = [learner.collect(step) for step in range(2)]
        learner.update(found[1])
        assert [path.name for path in run.rollouts.iterdir()] == ["step-000002.parquet"]
        held = read_rollouts(run.rollouts / "step-000002.parquet")
    m = dict(learner.metrics())
    trained = {name: m.pop(name) for name in ("loss", "grad_norm", "entropy")}
    assert min(trained.values()) > 0
    assert m == {
        "reward": pytest.approx((4 * 0.5 + 1 + 2 + 1) / 7),
        "rewards/plain/mean": pytest.approx((4 * 0.5 + 1 + 2 + 1) / 7),
        "rewards/failed": 1 / 8,
        "kept/answers": 2,
        "kept/share": 2 / 8,
        "kept/prompts": 1 / 2,
        "kept/reward": 1.5,
        "completions/mean_length": (2 + 3 + 2 + 4) / 4,
        "completions/clipped_ratio": 1 / 4,
        "num_tokens": 8 * 3 + 2 * 11,
        "learning_rate": pytest.approx(1e-3),
        "skipped": 0,
        "optimizer_steps": 1,
        "policy_version": 1,
        "records_lost": 0,
    }
    assert learner.explain() == f"reward 0.857, kept 2 (25%), loss {trained['loss']:.4f}"
    assert unknown({*m, *trained}, "Expert iteration") == set()
    assert [d.extras["kept"] for d in held.details] == [False] * 4 + [True, True, False, False]
    assert [d.total for d in held.details] == [0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 1.0, None]
    assert [(d.prompt, d.sample) for d in held.details] == [(g.row, i) for g in found[1].groups for i in range(4)]
    assert [d.reward_failure for d in held.details] == [None] * 7 + ["failed"]
    assert held.batch.scores[:7].tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 1.0]


def test_a_prompt_counts_as_kept_by_its_own_answers():
    learner = learner_of(uneven, keep="best", threshold=1.0)
    found = learner.collect(0)
    learner.update(found)
    assert found.kept == [5]
    assert learner.metrics()["kept/prompts"] == 1 / 2


def test_an_answer_that_was_broken_off_is_never_kept():
    learner = learner_of()
    (group, *_) = learner.collect(0).groups
    broken = dataclasses.replace(group.completions[1], finish=Finish.ABORT)
    assert learner._chosen(
        dataclasses.replace(group, completions=[group.completions[0], broken, *group.completions[2:]])
    ) == [0]


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
