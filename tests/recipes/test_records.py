"""What a run writes about its steps: all of it, checkable against the metrics, and never at the price of the run."""

import dataclasses
import errno
import logging
from math import nan
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from short_runs import GRPO, GRPO_KL, PPO, REINFORCE, Evenness, learner_of, run

from rolecall.config.parts import SaveOptions
from rolecall.experience import parquet
from rolecall.experience.store import read_rollouts
from rolecall.experience.updates import loss_terms, read_updates
from rolecall.maths.roles import Role, Verdict
from rolecall.recipes.experience import MiniStep, Rollout
from rolecall.recipes.records import Records
from rolecall.recipes.rl import RLLearner
from rolecall.train.rundir import RunDir


class Keep:
    """Remembers what the learner handed to its watches."""

    def rolled_out(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def updated(self, rollout: Rollout, steps: list[MiniStep]) -> None:
        self.steps = steps


def recorded(learner: RLLearner, run_dir: RunDir, **save: int) -> Keep:
    """Records on the learner, and a watch that keeps the same in memory."""
    options = dataclasses.replace(learner.options, save=SaveOptions(**save))
    keep = Keep()
    learner.watches = [Records(run_dir, options, model=learner.engine.hash, tokenizer="bytes"), keep]
    return keep


@pytest.fixture
def run_dir(tmp_path: Path):
    with RunDir(tmp_path, "short") as opened:
        yield opened


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rollouts_file_holds_what_was_sampled_and_computed(run_dir):
    reward = Evenness(failing=frozenset({(1, 2)}))
    learner = learner_of(dataclasses.replace(PPO, train_stop=False), reward=reward)
    weights = learner.engine.hash()
    keep = recorded(learner, run_dir)
    run(learner, 1)

    held, rollout = read_rollouts(run_dir.rollouts / "step-000001.parquet"), keep.rollout
    assert (held.step, held.model, held.tokenizer) == (1, weights, "bytes")
    assert repr(held.trajectories) == repr(tuple(rollout.trajectories))  # NaN is not equal to itself
    assert [d.prompt for d in held.details] == list(rollout.rows)
    assert [learner.collector.rows[d.prompt]["prompt"] for d in held.details] == list(rollout.prompts)
    assert [d.answer_text for d in held.details] == list(rollout.answers)
    assert [d.sample for d in held.details] == [0, 1, 2, 3] * 3
    assert {(d.seed, d.sampling) for d in held.details} == {(0, learner.sampling)}
    assert held.details[6].reward_failure == "even failed on prompt 1 sample 2"
    assert held.trajectories[6].scores == {"even": None, "constant": 0.25}
    assert held.details[0].extras == {
        "length": len(rollout.trajectories[0].ids) - len(learner.collector.rows[0]["prompt"])
    }
    assert held.batch.scores is not None
    assert held.batch.scores.isnan().tolist() == [i == 6 for i in range(12)]
    assert set(held.batch.verdicts[6].tolist()) <= {
        *(Verdict.PADDING, Verdict.GIVEN, Verdict.REWARD_FAILED, Verdict.STOP_UNTRAINED)
    }
    eligible = held.batch.roles == Role.CONTENT
    for name in ("old_logprobs", "ref_logprobs", "values"):
        computed = getattr(held.batch, name)
        assert torch.equal(~computed.isnan(), eligible), name  # null where nobody scored, not 0
        assert torch.equal(computed[eligible], getattr(rollout.batch, name)[eligible])
    inside = held.batch.roles != Role.PAD
    for name in ("rewards", "advantages", "returns"):
        assert torch.equal(getattr(held.batch, name)[inside], getattr(rollout.batch, name)[inside])


@pytest.mark.parametrize("algorithm", [GRPO, GRPO_KL, PPO, REINFORCE], ids=["grpo", "grpo-kl", "ppo", "reinforce"])
def test_contributions_add_up_to_the_logged_loss(run_dir, algorithm):
    """Read with nothing but pyarrow, and compared with nothing but the metrics."""
    learner = learner_of(dataclasses.replace(algorithm, aggregate="seq-mean-token-mean"))
    recorded(learner, run_dir)
    run(learner, 2)
    table, metrics = pq.read_table(run_dir.updates / "step-000002.parquet"), learner.metrics()
    shares = {
        name.removeprefix("contribution_"): [share for row in table[name].to_pylist() for share in row]
        for name in table.column_names
        if name.startswith("contribution_")
    }
    slack = 1e-6 * sum(abs(share) for part in shares.values() for share in part)
    steps = metrics["optimizer_steps"]
    assert sum(map(sum, shares.values())) / steps == pytest.approx(metrics["loss"], abs=slack, rel=0)
    coefs = {"policy": 1.0, "value": 0.5, "entropy": -0.01, "kl": 0.05}
    for term, part in shares.items():
        assert sum(part) / steps == pytest.approx(coefs[term] * metrics[f"loss/{term}"], abs=slack, rel=0)


def test_an_updates_file_says_what_each_mini_batch_did(run_dir):
    learner = learner_of(PPO)
    keep = recorded(learner, run_dir)
    run(learner, 1)
    rows = read_updates(run_dir.updates / "step-000001.parquet")
    assert len(rows) == 2 * 12  # epochs x answers
    for epoch in (0, 1):
        assert sorted(row.trajectory for row in rows if row.epoch == epoch) == list(range(12))
    sums = loss_terms(rows)
    for mini in keep.steps:
        assert sum(sums[mini.epoch, mini.minibatch].values()) == pytest.approx(mini.result.loss, rel=1e-6)
    for row in rows:
        trains = row.verdicts == Verdict.TRAINED
        assert row.logprobs is not None
        assert row.ratio is not None
        assert torch.equal(~row.logprobs.isnan(), trains)
        assert torch.equal(~row.ratio.isnan(), trains)
        if (row.epoch, row.minibatch) == (0, 0):
            assert torch.allclose(row.ratio[trains], torch.ones(()), atol=1e-4)


def test_a_mini_batch_in_which_nothing_trains_is_recorded_without_contributions(run_dir):
    learner = learner_of(dataclasses.replace(GRPO, drop_truncated=True, minibatches=12))
    keep = recorded(learner, run_dir)
    run(learner, 1)
    rows = read_updates(run_dir.updates / "step-000001.parquet")
    idle = {mini.minibatch for mini in keep.steps if not mini.result.terms}
    assert idle
    assert {row.minibatch for row in rows if not row.contributions} == idle


def test_the_newest_files_and_every_50th_stay(run_dir):
    learner = learner_of(prompts=1, samples=2, new_tokens=1)
    recorded(learner, run_dir, rollouts=3, updates=1)
    for step in (47, 48, 49, 50, 51, 52):
        learner.update(learner.collect(step))
    assert names(run_dir.rollouts) == [f"step-{step:06d}.parquet" for step in (50, 51, 52, 53)]
    assert names(run_dir.updates) == [f"step-{step:06d}.parquet" for step in (50, 53)]


def test_with_0_to_keep_only_every_50th_is_written(run_dir):
    learner = learner_of(prompts=1, samples=2, new_tokens=1)
    recorded(learner, run_dir, rollouts=0, updates=0)
    for step in (48, 49, 50):
        learner.update(learner.collect(step))
    assert names(run_dir.rollouts) == names(run_dir.updates) == ["step-000050.parquet"]


def test_a_full_disk_is_counted_and_said_and_the_run_goes_on(run_dir, monkeypatch, caplog):
    def full(table, path, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    learner = learner_of()
    recorded(learner, run_dir)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(parquet.pq, "write_table", full)
        run(learner, 1)
    assert learner.metrics()["records_lost"] == 2
    assert len([r for r in caplog.records if "the record of step 1 was not written" in r.message]) == 2
    learner.update(learner.collect(1))
    assert learner.metrics()["records_lost"] == 2
    assert names(run_dir.rollouts) == names(run_dir.updates) == ["step-000002.parquet"]


def test_whatever_a_reward_says_beside_its_score_can_be_recorded(run_dir):
    class Talkative(Evenness):
        def _one(self, sample):
            return dataclasses.replace(super()._one(sample), extras={"odd": object, "not a number": nan, "fine": [1]})

    learner = learner_of(reward=Talkative())
    recorded(learner, run_dir)
    run(learner, 1)
    extras = read_rollouts(run_dir.rollouts / "step-000001.parquet").details[0].extras
    assert extras == {"odd": "<class 'object'>", "not a number": "nan", "fine": [1]}
