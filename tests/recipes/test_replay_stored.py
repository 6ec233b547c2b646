"""Training and scoring from what a run has stored, without sampling."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.experience.parquet import StoreError
from rolecall.experience.store import read_rollouts, write_rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.experience.updates import read_updates
from rolecall.jobs import rl as job
from rolecall.maths.roles import Verdict
from rolecall.recipes.stored_answers import StoredAnswers
from rolecall.rollout.native import NativeEngine
from rolecall.train.ranks import Ranks

SMALL = {"steps": 3, "prompts": 2, "samples": 4, "sampling.max_new_tokens": 6, "optim.lr": 1e-3, "quiet": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of three steps on a task whose answers score nothing, so that another reward is wanted."""
    place = tmp_path_factory.mktemp("source") / "first"
    with pytest.raises(UserError, match="nothing has trained in 3 steps"):
        rolecall.rl(model="tiny", rows="sorting", out=str(place), **SMALL)
    return place


def letters(completions, **columns):
    return [len(set(text)) / 6 for text in completions]


@pytest.fixture(scope="module")
def scored(source):
    """The same answers under a reward that tells them apart."""
    return rolecall.rescore(source, reward=letters, out=str(source.parent / "scored"), quiet=True)


@pytest.fixture
def copied(scored, tmp_path):
    return Path(shutil.copytree(scored.path, tmp_path / "copied"))


def train(place, out, **settings):
    return rolecall.rl(**{"model": "tiny", "from_run": str(place), "out": str(out), **SMALL, **settings})


def rewritten(run: Path, change) -> None:
    """Every file of a run, written again with other trajectories."""
    for path in sorted((run / "rollouts").iterdir()):
        old = read_rollouts(path)
        path.unlink()
        trajectories = [change(t) for t in old.trajectories]
        batch = dataclasses.replace(
            old.batch,
            behaviour_logprobs=torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(t.behaviour_logprobs or (float("nan"),) * len(t.ids)) for t in trajectories],
                batch_first=True,
                padding_value=float("nan"),
            ),
        )
        if all(t.behaviour_logprobs is None for t in trajectories):
            batch = dataclasses.replace(batch, behaviour_logprobs=None)
        write_rollouts(
            path,
            trajectories,
            batch,
            step=old.step,
            details=old.details,
            model=old.model,
            tokenizer=old.tokenizer,
        )


def with_tokenizer(run: Path, name: str) -> None:
    for path in (run / "rollouts").iterdir():
        table = pq.read_table(path)
        metadata = dict(table.schema.metadata) | {b"rolecall.tokenizer": name.encode()}
        pq.write_table(table.replace_schema_metadata(metadata), path)


# -- rescore -----------------------------------------------------------------------------------------------------


def test_another_reward_is_applied_to_the_same_behaviour(source, scored):
    assert (scored.steps, scored.answers, scored.failed) == (3, 24, 0)
    for old, new in zip(RolloutStore(source), RolloutStore(scored.path), strict=True):
        assert [t.ids for t in new.trajectories] == [t.ids for t in old.trajectories]
        assert torch.equal(new.batch.ids, old.batch.ids)
        assert torch.equal(new.batch.behaviour_logprobs.nan_to_num(), old.batch.behaviour_logprobs.nan_to_num())
        assert [d.total for d in new.details] == letters([d.answer_text for d in old.details])
        assert [t.scores for t in new.trajectories] == [{"letters": d.total} for d in new.details]
        assert (new.model, new.tokenizer, new.step) == (old.model, old.tokenizer, old.step)
        assert new.batch.advantages is None, "it was made from the old score"
        assert new.batch.rewards is None
    assert scored.after == pytest.approx(
        sum(d.total for r in RolloutStore(scored.path) for d in r.details) / scored.answers
    )


def test_the_columns_of_the_rows_reach_the_reward(source, tmp_path):
    asked = []

    def right(completions, answer, **columns):
        asked.extend(answer)
        return [None if i == 0 else 1.0 for i, _ in enumerate(completions)]

    found = rolecall.rescore(source, reward=right, out=str(tmp_path / "right"), quiet=True)
    assert found.failed == 3, "None in every step is no score, and no zero"
    details = RolloutStore(found.path).read(0).details
    assert details[0].total is None


def test_a_run_that_is_there_is_never_written_over(source, scored):
    before = {path: path.read_bytes() for path in scored.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="not empty"):
        rolecall.rescore(source, reward=letters, out=str(scored.path), quiet=True)
    with pytest.raises(UserError, match="not empty"):
        rolecall.rescore(source, reward=letters, out=str(source), quiet=True)
    assert before == {path: path.read_bytes() for path in scored.path.rglob("*") if path.is_file()}


def test_without_a_name_the_new_run_lies_beside_the_old_one(copied):
    first = rolecall.rescore(copied, reward=letters, quiet=True)
    second = rolecall.rescore(copied, reward=letters, quiet=True)
    assert [first.path.name, second.path.name] == ["copied-rescored-1", "copied-rescored-2"]
    assert first.path.parent == copied.parent


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}", "--reward", "no-such"], "there is no built-in reward 'no-such'"),
        (["{run}/nowhere"], "there is no run"),
        ([], "`run` is missing"),
        (["{run}", "{run}"], "unexpected"),
        (["{run}", "--rows", "reversal", "--reward", "exact"], "give the run's own rows with --rows"),
    ],
)
def test_wrong_calls_are_one_sentence_and_make_nothing(copied, arguments, sentence, capsys):
    beside = set(copied.parent.iterdir())
    assert main(["rescore", *(word.format(run=copied) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert set(copied.parent.iterdir()) == beside


def test_rows_that_came_from_python_are_asked_for(tmp_path):
    rows = [{"prompt": "go:", "answer": "x"}, {"prompt": "on:", "answer": "y"}]
    rolecall.rl(model="tiny", rows=rows, reward=letters, out=str(tmp_path / "run"), **{**SMALL, "steps": 1})
    with pytest.raises(UserError, match="came from Python"):
        rolecall.rescore(tmp_path / "run", reward=letters, quiet=True)
    assert rolecall.rescore(tmp_path / "run", reward=letters, rows=rows, quiet=True).answers == 8


# -- rl --from ---------------------------------------------------------------------------------------------------


@pytest.fixture
def silent(monkeypatch):
    """An engine that samples nothing, and rewards that are never opened."""

    def refuse(*args, **kwargs):
        raise AssertionError("sampled or scored")

    monkeypatch.setattr(NativeEngine, "generate", refuse)
    monkeypatch.setattr(NativeEngine, "stream", refuse)
    monkeypatch.setattr(job, "open_training_reward", refuse)
    monkeypatch.setattr(job, "prompt_rows", refuse)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("grpo", {}),
        ("ppo", {"algorithm.kl_coef": 0.01}),
        ("reinforce", {"replay.weights": "truncate"}),
        ("grpo", {"replay.weights": "mask", "replay.weights_level": "sequence", "algorithm.kl_coef": 0.01}),
    ],
)
def test_another_algorithm_trains_on_stored_rollouts_and_nothing_is_sampled(scored, tmp_path, silent, preset, settings):
    run = train(scored.path, tmp_path / "run", preset=preset, steps=4, **settings)
    lines = [line for line in run.metrics if "loss" in line]
    assert len(lines) == 4, "three files, and the first again"
    assert lines[0]["reward"] == lines[3]["reward"] != lines[1]["reward"]
    assert all(line["weights_moved"] for line in lines)
    if preset == "grpo":  # the first file was sampled by the weights that training starts from
        assert lines[0]["policy/ratio"] == pytest.approx(1, abs=1e-3)


def test_the_ratio_is_to_the_policy_that_sampled(scored, tmp_path):
    run = train(scored.path, tmp_path / "run", **{"optim.lr": 3e-3})
    old = RolloutStore(scored.path).read(2)
    for row in read_updates(run.path / "updates" / "step-000003.parquet"):
        mask = row.verdicts == Verdict.TRAINED
        behaviour = old.batch.behaviour_logprobs[row.trajectory, : len(row.verdicts)]
        torch.testing.assert_close(row.ratio[mask], (row.logprobs - behaviour).exp()[mask], rtol=1e-4, atol=1e-5)
    assert abs(run.metrics[-1]["policy/ratio"] - 1) > 1e-4


def test_evaluation_still_asks_rows_and_rewards(scored, tmp_path):
    run = train(scored.path, tmp_path / "run", rows="sorting", steps=1, **{"eval.every": 1, "eval.rows": 4})
    assert "eval_reward" in run.evaluations[-1]


def test_a_run_on_stored_rollouts_is_resumed_exactly_and_other_files_are_refused(copied, tmp_path):
    train(copied, tmp_path / "whole", steps=4, **{"save.every": 1})
    train(copied, tmp_path / "broken", steps=2, **{"save.every": 1})
    train(copied, tmp_path / "broken", steps=4, resume=True)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert weights[0] == weights[1]
    (copied / "rollouts" / "step-000001.parquet").unlink()
    with pytest.raises(UserError, match="does not hold the rollouts that the run began with"):
        train(copied, tmp_path / "broken", steps=5, resume=True)


def test_groups_are_shared_out_over_ranks(scored):
    store = RolloutStore(scored.path)
    parts = [StoredAnswers(store, ranks=Ranks(number=rank, count=2)).collect(0) for rank in range(2)]
    groups = [{t.group for t in part.trajectories} for part in parts]
    assert groups[0] & groups[1] == set()
    assert groups[0] | groups[1] == {t.group for t in store.read(0).trajectories}
    with pytest.raises(UserError, match="fewer groups than there are processes"):
        StoredAnswers(store, ranks=Ranks(number=2, count=3)).collect(0)


# -- stores that cannot be trained on ----------------------------------------------------------------------------


def refused(place, out, **settings) -> str:
    with pytest.raises(UserError) as caught:
        train(place, out, **settings)
    assert not out.exists(), "nothing was made"
    return str(caught.value)


def test_a_store_of_another_tokenizer_is_refused(copied, tmp_path):
    with_tokenizer(copied, "f00dcafe" * 8)
    sentence = refused(copied, tmp_path / "run")
    assert "another tokenizer (f00dcafef00d" in sentence
    assert "step-000001.parquet" in sentence


def test_a_store_of_other_weights_is_named_and_trained_on(copied, tmp_path, caplog):
    for path in (copied / "rollouts").iterdir():
        table = pq.read_table(path)
        metadata = dict(table.schema.metadata) | {b"rolecall.model": b"0" * 64}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    train(copied, tmp_path / "run", steps=1)
    assert "none of the rollouts was sampled by the weights that training starts from" in caplog.text


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"vocabulary": 100}, "row 0: an id lies outside the model's vocabulary of 100; use another model"),
        ({"context": 12}, r"row 0: \d+ tokens do not fit the model's context of 12; use another model"),
    ],
)
def test_a_store_of_another_model_whose_answers_it_cannot_read_is_refused(scored, limits, sentence):
    store = RolloutStore(scored.path)
    known = {"tokenizer": store.read(0).tokenizer, "vocabulary": 300, "temperature": 1.0, "context": 1024}
    assert store.check(**known).answers == 24
    with pytest.raises(StoreError, match=sentence):
        store.check(**{**known, **limits})


def test_another_temperature_is_refused_with_the_setting_to_change(copied, tmp_path):
    sentence = refused(copied, tmp_path / "run", **{"sampling.temperature": 0.5})
    assert "sampled at temperature 1, but log-probs would be computed at 0.5; set sampling.temperature 1" in sentence


def test_a_file_from_the_future_is_refused_with_both_versions(copied, tmp_path):
    path = copied / "rollouts" / "step-000002.parquet"
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata) | {b"rolecall.schema_version": b"9", b"rolecall.version": b"9.9"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    assert "in version 9, written by rolecall 9.9" in refused(copied, tmp_path / "run")


def test_a_torn_file_is_refused_by_name(copied, tmp_path):
    path = copied / "rollouts" / "step-000003.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    assert "step-000003.parquet is not a whole Parquet file" in refused(copied, tmp_path / "run")


def test_log_probs_that_are_missing_everywhere_are_refused_and_single_ones_left_out_and_counted(
    copied, tmp_path, caplog
):
    def spoilt(t):
        if t.episode:
            return t
        return dataclasses.replace(t, behaviour_logprobs=(*t.behaviour_logprobs[:-1], float("inf")))

    rewritten(copied, spoilt)
    run = train(copied, tmp_path / "run", **{"algorithm.kl_coef": 0.1})
    assert "6 of" in caplog.text
    assert "no finite behaviour log-prob and are left out" in caplog.text
    assert [line["untrained_tokens/bad_record"] for line in run.metrics] == [2, 2, 2]
    assert all(line["skipped"] == 0 and line["weights_moved"] for line in run.metrics)

    rewritten(copied, lambda t: dataclasses.replace(t, behaviour_logprobs=None))
    assert "no token in" in refused(copied, tmp_path / "other")


def test_a_token_that_is_not_among_those_it_could_be_drawn_from_is_refused(copied, tmp_path):
    other = np.array([1], np.int32).tobytes()
    rewritten(copied, lambda t: dataclasses.replace(t, supports=(b"",) * (len(t.ids) - 1) + (other,)))
    assert "is not among those it could be drawn from" in refused(copied, tmp_path / "run")


def test_answers_of_a_cut_vocabulary_that_was_not_recorded_are_warned_of(tmp_path, caplog):
    """They can be trained on as they are, if they say that their log-probs are of the whole vocabulary."""
    small = {"prompts": 2, "samples": 2, "steps": 1, "sampling.max_new_tokens": 3, "sampling.top_k": 5, "quiet": True}
    with pytest.warns(UserWarning, match="top_k=5"):
        rolecall.rl(rows="addition", reward=letters, out=str(tmp_path / "a"), **small, **{"sampling.logprobs": "full"})
    train(tmp_path / "a", tmp_path / "b")
    assert "4 of 4 answers were drawn from a part of the vocabulary that was not recorded" in caplog.text
    caplog.clear()
    rolecall.rl(rows="addition", reward=letters, out=str(tmp_path / "c"), **small)
    train(tmp_path / "c", tmp_path / "d")
    assert "not recorded" not in caplog.text


def test_a_directory_without_rollouts_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no rollouts" in refused(tmp_path / "empty", tmp_path / "run")
    assert "is not a run" in refused(tmp_path / "nowhere", tmp_path / "run")


def test_an_algorithm_without_a_ratio_needs_weights(copied, tmp_path):
    with pytest.raises(UserError, match=r"set replay.weights truncate"):
        train(copied, tmp_path / "run", preset="reinforce")


def test_the_plan_says_that_nothing_is_sampled(capsys, scored):
    assert main(["rl", "--from", str(scored.path), "--dry-run"]) == 0
    assert "nothing is sampled" in capsys.readouterr().out
    assert main(["rl", "--replay.share", "0.5", "--dry-run"]) == 0
    assert "replay: 16 groups beside 16 fresh ones" in capsys.readouterr().out


def test_the_config_says_where_the_answers_came_from(scored, tmp_path):
    run = train(scored.path, tmp_path / "run", steps=1)
    assert json.loads((run.path / "config.json").read_text())["from_run"] == str(scored.path)
