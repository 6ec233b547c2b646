"""A file of an older version loads, and other programs read today's."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import duckdb
import pandas
import polars
import pyarrow.parquet as pq
import pytest
import torch
from test_store import batch_of, two, write_two

from rolecall.experience.store import RolloutDetails, read_rollouts, write_rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.files import TMP_MARK
from rolecall.types import Sampling

OLD = Path(__file__).parent / "data" / "rollouts-v1.parquet"
"""Written by the first version: two prompts, three answers each, one of which has no score."""
SECOND = OLD.with_name("rollouts-v2.parquet")
"""Written by version 2: two episodes each of two prompts of the guessing game."""


def test_a_file_of_version_1_loads_and_its_score_stands_for_the_total():
    assert pq.read_schema(OLD).metadata[b"rolecall.schema_version"] == b"1"
    assert "total" not in pq.read_schema(OLD).names
    back = read_rollouts(OLD)
    assert [(t.group, t.episode) for t in back.trajectories] == [(g, e) for g in (2, 3) for e in range(3)]
    scores = back.batch.scores.double().tolist()
    assert [d.total is None for d in back.details] == [False, True, False, False, False, False]
    assert [d.total for i, d in enumerate(back.details) if i != 1] == [s for i, s in enumerate(scores) if i != 1]
    assert back.batch.advantages is not None
    assert back.trajectories[0].scores == {"even": 0.4, "constant": 0.25}


def test_a_file_of_version_2_loads_and_has_no_messages():
    assert pq.read_schema(SECOND).metadata[b"rolecall.schema_version"] == b"2"
    assert "messages" not in pq.read_schema(SECOND).names
    back = read_rollouts(SECOND)
    assert [(t.group, t.episode, len(t.turns)) for t in back.trajectories] == [
        (g, e, 2) for g in (0, 1) for e in (0, 1)
    ]
    assert {who for t in back.trajectories for _, _, who in t.authors} == {"prompt", "policy", "template", "user"}
    assert [d.total for d in back.details] == [0.0] * 4
    assert [d.messages for d in back.details] == [None] * 4


@pytest.mark.parametrize("old", [OLD, SECOND])
def test_what_is_read_from_an_old_file_is_written_as_a_new_one(tmp_path, old):
    old = read_rollouts(old)
    path = tmp_path / "step-000002.parquet"
    write_rollouts(
        path, old.trajectories, old.batch, step=old.step, details=old.details, model=old.model, tokenizer=old.tokenizer
    )
    assert pq.read_schema(path).metadata[b"rolecall.schema_version"] == b"3"  # no vocabulary was cut
    again = read_rollouts(path)
    assert again.details == old.details
    assert (again.batch.ids == old.batch.ids).all()


@pytest.fixture
def file(tmp_path):
    write_two(tmp_path / "step-000012.parquet")
    return tmp_path / "step-000012.parquet"


def test_pandas_reads_it(file):
    frame = pandas.read_parquet(file)
    assert frame["answer_text"].tolist() == ["4", "five"]
    assert frame["ids"][0].tolist() == [5, 6, 2]
    assert frame["score"].isna().tolist() == [False, True]
    assert frame["behaviour_logprobs"][1] is None
    assert frame.groupby("group")["score"].mean().tolist() == [1.0]


def test_polars_reads_it(file):
    frame = polars.read_parquet(file)
    assert frame["ids"].to_list() == [[5, 6, 2], [5, 8]]
    assert frame["behaviour_logprobs"].to_list()[0][0] is None
    assert frame.select(polars.col("old_logprobs").list.sum()).to_series().to_list() == [-2.125, -1.0]


def test_duckdb_reads_it(file):
    found = duckdb.sql(
        f"select answer_text, len(ids), score, scores[1].part from '{file}' order by len(ids)"
    ).fetchall()
    assert found == [("five", 2, None, None), ("4", 3, 1.0, "right")]
    assert duckdb.sql(f"select avg(score) from '{file.parent}/step-*.parquet'").fetchall() == [(1.0,)]


def test_datasets_reads_it(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
    assert rows["ids"][:] == [[5, 6, 2], [5, 8]]
    assert rows[0]["sampling"]["stop_ids"] == [2]
    assert rows.filter(lambda row: row["score"] is not None)["answer_text"][:] == ["4"]


def test_the_prompt_that_the_behaviour_saw_is_kept_beside_the_one_that_is_trained(tmp_path):
    """The behaviour had a hint in its prompt; training leaves it out."""
    trajectories, _, details = two()
    seen = replace(trajectories[0], behaviour_prompt_ids=(5, 77, 78))
    write_rollouts(
        tmp_path / "x.parquet", [seen], batch_of([seen]), step=1, details=details[:1], model="m", tokenizer="t"
    )
    (back,) = read_rollouts(tmp_path / "x.parquet").trajectories
    assert back.behaviour_prompt_ids == (5, 77, 78)
    assert back.ids == (5, 6, 2)
    assert pq.read_table(tmp_path / "x.parquet")["behaviour_prompt_ids"].to_pylist() == [[5, 77, 78]]


def big(step: int):
    trajectories, _, _ = two()
    many = [replace(trajectories[0], group=g, behaviour_logprobs=None) for g in range(400)]
    held = [RolloutDetails(prompt_text="x" * 200, answer_text=str(step), seed=0, sampling=Sampling())] * 400
    return many, batch_of(many, advantages=torch.rand(400, 3)), held


@pytest.mark.parametrize("delay", [0.01, 0.03, 0.08])
def test_whoever_reads_while_a_writer_is_killed_never_sees_a_torn_file(tmp_path, delay):
    child = os.fork()
    if child == 0:
        try:
            for step in range(1, 10_000):
                many, batch, held = big(step)
                path = tmp_path / f"step-{step:06d}.parquet"
                write_rollouts(path, many, batch, step=step, details=held, model="m", tokenizer="t")
        finally:
            os._exit(0)
    import time

    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("step-000002.parquet")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = RolloutStore(tmp_path)
    assert len(store) >= 2
    assert [rollouts.step for rollouts in store] == list(range(1, len(store) + 1))
    assert all(len(rollouts.trajectories) == 400 for rollouts in store)
    assert not any(TMP_MARK in name for name in store.names)


def test_what_a_killed_writer_left_is_not_taken_for_a_file(tmp_path, file):
    (tmp_path / f"step-000013.parquet{TMP_MARK}abc").write_bytes(file.read_bytes()[:500])
    (tmp_path / "notes.txt").write_text("hello")
    assert RolloutStore(tmp_path).names == ["step-000012.parquet"]
