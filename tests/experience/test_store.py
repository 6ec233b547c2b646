"""The record of a training step: what goes in comes out, and a file is whole or not there."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rolecall
from rolecall.experience import parquet
from rolecall.experience.parquet import Format, StoreError, read_table, write_table
from rolecall.experience.store import ROLLOUTS, RolloutDetails, read_rollouts, write_rollouts
from rolecall.experience.updates import UPDATES, MiniBatch, UpdateRow, loss_terms, read_updates, write_updates
from rolecall.files import TMP_MARK, DiskError, write_atomically
from rolecall.types import Batch, Finish, Sampling, Trajectory

DOCS = Path(__file__).parents[2] / "docs" / "files.md"
COMPUTED = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns", "weights")


def rectangle(rows: list, width: int, fill: float, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def batch_of(trajectories: list[Trajectory], *, padding: int = 0, **computed: Tensor) -> Batch:
    width = max(len(t.ids) for t in trajectories) + padding
    sampled = any(t.behaviour_logprobs is not None for t in trajectories)
    behaviour = rectangle([t.behaviour_logprobs for t in trajectories], width, nan, torch.float32)
    return Batch(
        ids=rectangle([t.ids for t in trajectories], width, 7, torch.int64),
        roles=rectangle([t.roles for t in trajectories], width, 0, torch.uint8),
        groups=torch.tensor([t.group for t in trajectories]),
        behaviour_logprobs=behaviour if sampled else None,
        policy_versions=torch.tensor([t.policy_version for t in trajectories]),
        **computed,
    )


def two() -> tuple[list[Trajectory], Batch, list[RolloutDetails]]:
    """Two trajectories of three and two tokens, the second a demonstration without a score."""
    trajectories = [
        Trajectory(
            ids=(5, 6, 2),
            roles=(1, 2, 3),
            behaviour_logprobs=(nan, -0.1, -2.0),
            turns=((1, 3),),
            scores={"right": 1.0, "judge": None},
            group=4,
            policy_version=11,
        ),
        Trajectory(ids=(5, 8), roles=(1, 2), author="demonstrator", finish=Finish.LENGTH, group=4, episode=1),
    ]
    batch = batch_of(
        trajectories,
        verdicts=torch.tensor([[2, 1, 1], [2, 9, 0]], dtype=torch.uint8),
        old_logprobs=torch.tensor([[nan, -0.125, -2.0], [nan, -1.0, nan]]),
        scores=torch.tensor([1.0, nan]),
        baselines=torch.tensor([0.5, nan]),
    )
    details = [
        RolloutDetails(
            prompt_text="2 + 2?",
            answer_text="4",
            seed=1,
            sampling=Sampling(top_k=5, stop_ids=(2,)),
            prompt=30,
            sample=0,
        ),
        RolloutDetails(
            prompt_text="2 + 2?", answer_text="five", seed=None, sampling=None, reward_failure="no answer in the box"
        ),
    ]
    return trajectories, batch, details


def write_two(path: Path) -> None:
    trajectories, batch, details = two()
    write_rollouts(path, trajectories, batch, step=12, details=details, model="m-1", tokenizer="t-1")


def with_facts(path: Path, **facts: str) -> None:
    """Write the file again with other facts in its metadata."""
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata) | {f"rolecall.{k}".encode(): v.encode() for k, v in facts.items()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def bits(numbers) -> list[int]:
    """Float32 bit patterns, every NaN alike."""
    held = np.asarray(numbers, np.float32)
    return np.where(np.isnan(held), np.float32(nan), held).view(np.int32).tolist()


float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
small = st.integers(0, 2**31 - 1)


def as_bytes(ids) -> bytes:
    return np.array(sorted(ids), np.int32).tobytes()


@st.composite
def drawn_trajectories(draw) -> Trajectory:
    n = draw(st.integers(1, 6))

    def per_token(entries):
        return draw(st.lists(entries, min_size=n, max_size=n).map(tuple))

    start = draw(st.integers(0, n))
    return Trajectory(
        ids=per_token(small),
        roles=per_token(st.integers(1, 6)),
        behaviour_logprobs=draw(st.none() | st.just(per_token(float32))),
        author=draw(text),
        agent=draw(text),
        episode=draw(small),
        group=draw(small),
        turns=draw(st.sampled_from([(), ((start, n),), ((0, start), (start, n))])),
        scores=draw(st.dictionaries(text, st.none() | st.floats(allow_nan=False), max_size=3)),
        finish=draw(st.sampled_from(Finish)),
        policy_version=draw(small),
        behaviour_prompt_ids=draw(st.none() | st.lists(small, max_size=3).map(tuple)),
        supports=draw(st.none() | st.just(per_token(st.sets(small, max_size=3).map(as_bytes))).filter(any)),
    )


samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_k=st.none() | st.integers(1, 99),
    top_p=st.none() | st.floats(0.1, 1),
    min_p=st.none() | st.floats(0, 1),
    logprobs=st.just("drawn"),
    max_new_tokens=st.integers(1, 999),
    stop_ids=st.none() | st.lists(small, max_size=2).map(tuple),
    stop_strings=st.lists(text, max_size=2).map(tuple),
)
drawn_details = st.builds(
    RolloutDetails,
    prompt_text=text,
    answer_text=text,
    seed=st.none() | st.integers(0, 2**63 - 1),
    sampling=st.none() | samplings,
    prompt=st.none() | small,
    sample=st.none() | small,
    reward_failure=st.none() | text,
    messages=st.none()
    | st.lists(
        st.fixed_dictionaries({"role": text, "content": text}, optional={"author": text, "name": text}), max_size=3
    ).map(tuple),
    extras=st.dictionaries(text, st.none() | text | small | st.lists(small, max_size=2), max_size=2),
)


@settings(max_examples=30)
@given(data=st.data())
def test_what_goes_in_comes_out(data, tmp_path_factory):
    trajectories = data.draw(st.lists(drawn_trajectories(), min_size=1, max_size=4))
    rows, width = len(trajectories), max(len(t.ids) for t in trajectories)
    padding = data.draw(st.integers(0, 2))
    computed = {}
    for name in data.draw(st.sets(st.sampled_from(COMPUTED))):
        flat = data.draw(st.lists(float32, min_size=rows * (width + padding), max_size=rows * (width + padding)))
        computed[name] = torch.tensor(flat).view(rows, width + padding)
    if data.draw(st.booleans()):
        computed["scores"] = torch.tensor(data.draw(st.lists(float32, min_size=rows, max_size=rows)))
    if data.draw(st.booleans()):
        computed["verdicts"] = (torch.arange(rows * (width + padding)).view(rows, -1) % 13).to(torch.uint8)
    batch = batch_of(trajectories, padding=padding, **computed)
    details = data.draw(st.lists(drawn_details, min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        details[0] = replace(details[0], pieces=tuple(data.draw(st.binary(max_size=3)) for _ in trajectories[0].ids))
    path = tmp_path_factory.mktemp("run") / "step-000003.parquet"

    write_rollouts(path, trajectories, batch, step=3, details=details, model="m", tokenizer="t")
    back = read_rollouts(path)

    assert (back.step, back.model, back.tokenizer, back.version) == (3, "m", "t", rolecall.__version__)
    assert back.details == tuple(details)
    for was, now in zip(trajectories, back.trajectories, strict=True):
        assert replace(now, behaviour_logprobs=None) == replace(was, behaviour_logprobs=None)
        assert (now.behaviour_logprobs is None) == (was.behaviour_logprobs is None)
        assert bits(now.behaviour_logprobs or ()) == bits(was.behaviour_logprobs or ())
    assert {name for name, _ in back.batch.tensors()} == {name for name, _ in batch.tensors()}
    for name, was in batch.tensors():
        now = getattr(back.batch, name)
        assert now.dtype == was.dtype
        for row, trajectory in enumerate(trajectories):
            end = len(trajectory.ids)
            held, given = (t[row, :end] if t.dim() == 2 else t[row] for t in (now, was))
            assert (bits(held) == bits(given)) if was.is_floating_point() else torch.equal(held, given)


def test_every_field_of_the_records_has_a_column():
    columns = set(ROLLOUTS.schema.names)
    assert {f.name for f in fields(Trajectory)} <= columns
    assert {f.name for f in fields(RolloutDetails)} <= columns
    renamed = {"groups": "group", "policy_versions": "policy_version", "scores": "score", "episodes": "episode"}
    renamed["baselines"] = "baseline"
    elsewhere = {
        "replayed",  # a file holds what was sampled in its step
        "guided",  # behaviour_prompt_ids says it
        *("turn_rewards", "turn_states", "turn_marks"),  # in extras, turn by turn
    }
    assert {renamed.get(f.name, f.name) for f in fields(Batch)} - elsewhere <= columns
    assert {f.name for f in fields(Sampling)} == {f.name for f in ROLLOUTS.schema.field("sampling").type}


def test_every_column_is_documented_with_its_type_and_whether_it_may_be_null():
    documented = DOCS.read_text()
    for column in (*ROLLOUTS.schema, *UPDATES.schema):
        assert f"| `{column.name}` | {spoken(column.type)}{', null' if column.nullable else ''} |" in documented


def spoken(kind: pa.DataType) -> str:
    """A type in the words of the page."""
    if pa.types.is_list(kind):
        return f"list of {spoken(kind.value_type)}"
    return {"double": "float64", "float": "float32"}.get(str(kind), "struct" if pa.types.is_struct(kind) else str(kind))


def test_the_fields_of_structs_are_what_readers_of_files_rely_on():
    def of(name):
        kind = ROLLOUTS.schema.field(name).type
        return [f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in getattr(kind, "value_type", kind)]

    assert of("turns") == ["start: int32 not null", "end: int32 not null"]
    assert of("authors") == [*of("turns"), "author: string not null"]
    assert of("messages") == ["role: string not null", "content: string not null", "name: string", "author: string"]
    assert of("scores") == ["part: string not null", "score: double"]
    limits = ["temperature: double not null", "top_k: int64", "top_p: double", "min_p: double"]
    stops = ["stop_ids: list<element: int32 not null>", "stop_strings: list<element: string not null> not null"]
    assert of("sampling") == [*limits, "max_new_tokens: int64 not null", *stops, "logprobs: string"]


def test_a_plain_reader_sees_lists_cut_to_length_and_null_for_nan(tmp_path):
    trajectories, batch, details = two()
    said = ({"role": "user", "content": "2 + 2?", "name": "Ada"}, {"role": "tool", "content": "4", "author": "given"})
    details[0] = replace(details[0], messages=said)
    path = tmp_path / "rollouts.parquet"
    write_rollouts(path, trajectories, batch, step=12, details=details, model="m-1", tokenizer="t-1")
    first, second = pq.read_table(path).to_pylist()
    assert first["messages"] == [{"name": None, "author": None} | message for message in said]
    assert second["messages"] is None
    assert read_rollouts(path).details[0].messages == said
    assert first["ids"] == [5, 6, 2]
    assert second["ids"] == [5, 8]
    assert first["behaviour_logprobs"] == [None, pytest.approx(-0.1), -2.0]
    assert second["behaviour_logprobs"] is None
    assert second["old_logprobs"] == [None, -1.0]
    assert (first["values"], second["values"]) == (None, None)
    assert first["turns"] == [{"start": 1, "end": 3}]
    assert first["scores"] == [{"part": "right", "score": 1.0}, {"part": "judge", "score": None}]
    assert (first["score"], second["score"]) == (1.0, None)
    assert (first["baseline"], second["baseline"]) == (0.5, None)
    assert read_rollouts(tmp_path / "rollouts.parquet").batch.baselines.tolist()[0] == 0.5
    assert (first["sampling"]["top_k"], first["sampling"]["stop_ids"], second["sampling"]) == (5, [2], None)
    assert (second["finish"], second["author"], second["step"]) == ("length", "demonstrator", 12)
    assert second["reward_failure"] == "no answer in the box"
    schema = pq.read_schema(tmp_path / "rollouts.parquet")
    assert str(schema.field("roles").type) == "list<element: uint8 not null>"
    assert str(schema.field("old_logprobs").type) == "list<element: float>"
    span = "struct<start: int32 not null, end: int32 not null>"
    assert str(schema.field("turns").type) == f"list<element: {span} not null>"
    metadata = schema.metadata
    assert metadata[b"rolecall.schema"] == b"rollouts"
    assert metadata[b"rolecall.schema_version"] == b"4"
    assert metadata[b"rolecall.model"] == b"m-1"


def test_the_same_step_makes_the_same_bytes(tmp_path):
    write_two(tmp_path / "a.parquet")
    write_two(tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_file_read_back_is_of_the_schema_without_a_cast(tmp_path):
    """Of the newest, if tokens are of several versions of the weights; of the one before if not."""
    write_two(tmp_path / "one.parquet")
    kinds = [
        kind for name, kind in zip(ROLLOUTS.schema.names, ROLLOUTS.schema.types, strict=True) if name != "versions"
    ]
    assert pq.read_schema(tmp_path / "one.parquet").types == kinds
    trajectories, batch, details = two()
    spans = ((1, 2, trajectories[0].policy_version), (2, 3, trajectories[0].policy_version + 1))
    several = (replace(trajectories[0], versions=spans), trajectories[1])
    path = tmp_path / "several.parquet"
    write_rollouts(path, several, batch, step=1, details=details, model="m", tokenizer="t")
    assert pq.read_schema(path).types == ROLLOUTS.schema.types
    assert pq.read_schema(path).metadata[b"rolecall.schema_version"] == b"5"
    assert [t.versions for t in read_rollouts(path).trajectories] == [spans, None]


def test_a_file_says_what_could_be_drawn_only_where_the_vocabulary_was_cut(tmp_path):
    """Without a cut it is, byte for byte, a file that earlier versions read."""
    trajectories, batch, details = two()
    whole = [replace(d, sampling=Sampling(stop_ids=(2,))) for d in details]
    cut = (replace(trajectories[0], supports=(b"", as_bytes([3, 6]), as_bytes([2, 6, 9]))), trajectories[1])

    def written(name, trajectories, details):
        path = tmp_path / f"{name}.parquet"
        write_rollouts(path, trajectories, batch, step=1, details=details, model="m", tokenizer="t")
        return path, pq.read_schema(path)

    path, schema = written("whole", trajectories, whole)
    assert schema.metadata[b"rolecall.schema_version"] == b"3"
    assert "supports" not in schema.names
    assert "logprobs" not in [f.name for f in schema.field("sampling").type]
    assert read_rollouts(path).details[0].sampling == whole[0].sampling

    path, schema = written("cut", cut, details)
    assert schema.metadata[b"rolecall.schema_version"] == b"4"
    assert pq.read_table(path)["supports"].to_pylist() == [[[], [3, 6], [2, 6, 9]], None]
    assert read_rollouts(path).trajectories[0].supports == cut[0].supports
    assert read_rollouts(path).trajectories[1].supports is None

    full = [replace(d, sampling=Sampling(top_k=5, logprobs="full")) for d in details]
    path, _ = written("full", trajectories, full)
    assert read_rollouts(path).details[0].sampling == full[0].sampling


def test_a_file_from_before_supports_with_a_cut_vocabulary_has_log_probs_of_the_whole_of_it(tmp_path):
    write_two(tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet").drop_columns(["supports"])
    old = pa.struct([f for f in table.schema.field("sampling").type if f.name != "logprobs"])
    table = table.set_column(table.schema.get_field_index("sampling"), "sampling", table["sampling"].cast(old))
    pq.write_table(
        table.replace_schema_metadata(table.schema.metadata | {b"rolecall.schema_version": b"3"}),
        tmp_path / "old.parquet",
    )
    assert read_rollouts(tmp_path / "new.parquet").details[0].sampling.logprobs == "drawn"
    assert read_rollouts(tmp_path / "old.parquet").details[0].sampling.logprobs == "full"


def test_scores_in_float64_keep_their_type_and_every_bit(tmp_path):
    trajectories, batch, details = two()
    batch = replace(batch, scores=torch.tensor([0.1, nan], dtype=torch.float64))
    path = tmp_path / "rollouts.parquet"
    write_rollouts(path, trajectories, batch, step=1, details=details, model="", tokenizer="")
    scores = read_rollouts(path).batch.scores
    assert scores is not None
    assert scores.dtype == torch.float64
    assert scores[0].item() == 0.1
    assert scores[1].isnan()


def test_text_that_utf8_cannot_hold_is_spelt_out(tmp_path):
    trajectories, batch, details = two()
    details[1] = replace(details[1], reward_failure="no file \udcff")
    path = tmp_path / "rollouts.parquet"
    write_rollouts(path, trajectories, batch, step=1, details=details, model="", tokenizer="")
    assert read_rollouts(path).details[1].reward_failure == "no file \\udcff"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", torch.tensor([[5, 6, 2], [5, 9, 0]])),
        ("roles", torch.tensor([[1, 2, 3], [1, 2, 2]], dtype=torch.uint8)),
        ("groups", torch.tensor([4, 5])),
        ("policy_versions", torch.tensor([11, 1])),
        ("behaviour_logprobs", torch.tensor([[nan, -0.1, -2.0], [nan, -1.0, nan]])),
    ],
)
def test_a_batch_that_is_not_the_trajectories_is_refused(tmp_path, field, value):
    trajectories, batch, details = two()
    batch = replace(batch, **{field: value})
    with pytest.raises(ValueError, match=f"batch.{field} differs from the trajectories' in row 1"):
        write_rollouts(tmp_path / "x", trajectories, batch, step=1, details=details, model="", tokenizer="")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_too_narrow_and_a_missing_detail_are_refused(tmp_path):
    trajectories, batch, details = two()
    kept = {"step": 1, "model": "", "tokenizer": ""}
    with pytest.raises(ValueError, match="the batch has 2 positions but a trajectory has 3 tokens"):
        write_rollouts(tmp_path / "x", trajectories, batch.trimmed(2), details=details, **kept)
    with pytest.raises(ValueError, match="2 trajectories, 2 batch rows and 1 details"):
        write_rollouts(tmp_path / "x", trajectories, batch, details=details[:1], **kept)
    with pytest.raises(ValueError, match="row 1 has 1 pieces but 2 ids"):
        write_rollouts(
            tmp_path / "x", trajectories, batch, details=[details[0], replace(details[1], pieces=(b"5",))], **kept
        )
    with pytest.raises(ValueError, match="no trajectories"):
        write_rollouts(tmp_path / "x", [], batch, details=[], **kept)


@pytest.mark.parametrize("extras", [{"x": object()}, {"x": nan}])
def test_extras_that_json_cannot_hold_are_refused(tmp_path, extras):
    trajectories, batch, details = two()
    details[1] = replace(details[1], extras=extras)
    with pytest.raises(ValueError, match="the extras of row 1 cannot be JSON"):
        write_rollouts(tmp_path / "x", trajectories, batch, step=1, details=details, model="", tokenizer="")


def test_a_record_is_written_once(tmp_path):
    write_two(tmp_path / "rollouts.parquet")
    with pytest.raises(FileExistsError, match="written once"):
        write_two(tmp_path / "rollouts.parquet")


# --- versions, torn and foreign files ---


def test_a_file_from_the_future_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    with_facts(path, schema_version="7", version="9.9.9")
    with pytest.raises(
        StoreError, match=rf"version 7, written by rolecall 9\.9\.9; .*{rolecall.__version__}.*version 5"
    ):
        read_rollouts(path)


def test_a_file_that_lacks_nullable_columns_loads_with_none(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    lacking = ["weights", "old_logprobs", "reward_failure", "sampling", "score", "pieces"]
    pq.write_table(pq.read_table(path).drop_columns(lacking), path)
    back = read_rollouts(path)
    assert (back.batch.weights, back.batch.old_logprobs) == (None, None)
    assert [d.reward_failure for d in back.details] == [None, None]
    assert back.details[0].sampling is None
    assert back.details[0].pieces is None
    assert back.trajectories[0].ids == (5, 6, 2)


def test_an_older_file_is_brought_up_version_by_version(tmp_path):
    old = Format(name="x", version=0, schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    new = Format(
        name="x",
        version=3,
        schema=pa.schema([pa.field("count", pa.int64(), nullable=False), pa.field("note", pa.string())]),
        upgrades={
            0: lambda t: t.rename_columns(["count"]),
            2: lambda t: t.set_column(0, "count", pa.array([10 * n for n in t["count"].to_pylist()])),
        },
    )
    path = tmp_path / "x.parquet"
    write_table(path, pa.table({"n": [1, 2]}), old, {"by": "me"})
    table, facts = read_table(path, new)
    assert table.to_pydict() == {"count": [10, 20], "note": [None, None]}
    assert facts["by"] == "me"


def test_a_column_that_must_be_there_is_missed_by_name(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    pq.write_table(pq.read_table(path).drop_columns(["roles"]), path)
    with pytest.raises(StoreError, match=r"column 'roles' of .*missing"):
        read_rollouts(path)


def test_lists_that_are_not_as_long_as_the_ids_are_refused(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    table = pq.read_table(path)
    index = table.schema.get_field_index("verdicts")
    pq.write_table(table.set_column(index, "verdicts", pa.array([[1], [1]], parquet.CODES)), path)
    with pytest.raises(StoreError, match=r"column 'verdicts' of .* is not as long as the ids"):
        read_rollouts(path)


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"hello" * 40])
def test_a_torn_file_is_named_in_one_sentence(tmp_path, spoil):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(StoreError, match=r"rollouts\.parquet is not a whole Parquet file") as caught:
        read_rollouts(path)
    assert "\n" not in str(caught.value)
    assert "remove" not in str(caught.value)


def test_a_read_for_which_memory_is_short_says_nothing_about_the_file(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.parquet"
    write_two(path)

    def refuse(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 640 failed")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(MemoryError):
        read_rollouts(path)


def test_a_flipped_bit_in_the_data_is_noticed(tmp_path):
    path = tmp_path / "rollouts.parquet"
    write_two(path)
    column = pq.read_metadata(path).row_group(0).column(ROLLOUTS.schema.names.index("answer_text"))
    spoilt = bytearray(path.read_bytes())
    spoilt[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(StoreError, match="not a whole Parquet file"):
        read_rollouts(path)


def test_foreign_files_and_the_wrong_kind_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(
        StoreError, match=r"foreign\.parquet is not written by rolecall, but a file of rollouts is needed"
    ):
        read_rollouts(tmp_path / "foreign.parquet")
    write_two(tmp_path / "rollouts.parquet")
    with pytest.raises(StoreError, match="is a file of rollouts, but a file of updates is needed"):
        read_updates(tmp_path / "rollouts.parquet")
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "nowhere.parquet")


# --- written aside ---


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def half(table, path, **options):
        Path(path).write_bytes(b"PAR1 half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.pq, "write_table", half)
    with pytest.raises(DiskError, match="No space left"):
        write_two(tmp_path / "rollouts.parquet")
    assert list(tmp_path.iterdir()) == []


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, b"old")

    def half_then_look(aside: Path) -> None:
        aside.write_bytes(b"ne")
        assert path.read_bytes() == b"old"
        aside.write_bytes(b"new")

    write_atomically(path, half_then_look)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_writing_leaves_no_file_of_that_name(tmp_path):
    path = tmp_path / "step-000001.parquet"
    script = (
        "import sys, time; from pathlib import Path; from rolecall.files import write_atomically\n"
        "def half(aside):\n    aside.write_bytes(b'PAR1 half'); print('half', flush=True); time.sleep(60)\n"
        "write_atomically(Path(sys.argv[1]), half)\n"
    )
    source = str(Path(rolecall.__file__).parents[1])
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": source}
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert not path.exists()
    assert all(TMP_MARK in left.name for left in tmp_path.iterdir())


# --- updates ---


def minibatch_of(epoch: int, minibatch: int, terms: dict[str, Tensor], **parts: Tensor) -> MiniBatch:
    return MiniBatch(
        step=3,
        epoch=epoch,
        minibatch=minibatch,
        rollout_steps=[3, 2],
        trajectories=[7, 0],
        lengths=[3, 2],
        verdicts=torch.tensor([[2, 1, 1], [2, 1, 0]]),
        contributions=terms,
        **parts,
    )


def test_contributions_add_up_to_the_loss_terms_of_each_minibatch(tmp_path):
    """1/3 and its like are not float32 numbers: only float64 on disk gives the sum back to 1e-12."""
    draw = torch.Generator().manual_seed(0)
    made, logged = [], {}
    for epoch in range(2):
        for minibatch in range(3):
            inside = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.float64)
            terms = {
                name: torch.rand(2, 3, generator=draw, dtype=torch.float64) / 3 * inside for name in ("policy", "value")
            }
            logged[epoch, minibatch] = {name: float(term.sum()) for name, term in terms.items()}
            made.append(minibatch_of(epoch, minibatch, terms))
    write_updates(tmp_path / "u.parquet", made)
    found = loss_terms(read_updates(tmp_path / "u.parquet"))
    assert found.keys() == logged.keys()
    for place, terms in logged.items():
        assert found[place] == pytest.approx(terms, abs=1e-12, rel=0)


def test_updates_come_back_cut_to_length_with_what_was_not_computed_as_none(tmp_path):
    logprobs = torch.tensor([[nan, -0.1, -2.0], [nan, -1.0, nan]], requires_grad=True)
    ratio = torch.tensor([[1.0, 1.1, 0.9], [1.0, 1.5, 1.0]])
    made = minibatch_of(1, 4, {"policy": torch.ones(2, 3)}, logprobs=logprobs, ratio=ratio)
    shares = torch.tensor([[0.0, 0.5, nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
    write_updates(tmp_path / "u.parquet", [made, replace(made, ratio=None, contributions={"kl": shares})])
    first, second, third, _ = read_updates(tmp_path / "u.parquet")
    assert [(r.step, r.rollout_step, r.trajectory, r.epoch, r.minibatch) for r in (first, second)] == [
        (3, 3, 7, 1, 4),
        (3, 2, 0, 1, 4),
    ]
    assert second.verdicts.tolist() == [2, 1]
    assert second.verdicts.dtype == torch.uint8
    assert first.logprobs is not None
    assert bits(first.logprobs) == bits([nan, -0.1, -2.0])
    assert second.ratio is not None
    assert second.ratio.tolist() == [1.0, 1.5]
    assert (first.weights, third.ratio) == (None, None)
    assert (list(first.contributions), list(third.contributions)) == (["policy"], ["kl"])
    assert isnan(third.contributions["kl"][2])


def test_a_plain_reader_sees_a_column_per_loss_term_and_a_nan_in_it_stays(tmp_path):
    write_updates(tmp_path / "u.parquet", [minibatch_of(0, 0, {"policy": torch.tensor([[0, nan, 1], [0, 2, 0.0]])})])
    table = pq.read_table(tmp_path / "u.parquet")
    assert table["contribution_policy"].type.value_type == pa.float64()
    first, second = table["contribution_policy"].to_pylist()
    assert isnan(first[1])
    assert second == [0.0, 2.0]
    assert table["weights"].null_count == 2


def test_no_updates_is_an_empty_file(tmp_path):
    write_updates(tmp_path / "u.parquet", [])
    assert read_updates(tmp_path / "u.parquet") == []


def test_an_update_of_another_length_than_its_verdicts_is_refused():
    with pytest.raises(ValueError, match=r"trajectory 5: contribution_policy has shape \(2,\) but verdicts has \(3,\)"):
        UpdateRow(
            step=1,
            rollout_step=1,
            trajectory=5,
            epoch=0,
            minibatch=0,
            verdicts=torch.zeros(3, dtype=torch.uint8),
            contributions={"policy": torch.zeros(2)},
        )


def test_a_minibatch_whose_tensors_do_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"a mini-batch: ratio has shape \(2, 2\) but verdicts has \(2, 3\)"):
        minibatch_of(0, 0, {}, ratio=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="one entry per trajectory"):
        replace(minibatch_of(0, 0, {}), lengths=[3])


def test_a_step_of_512_trajectories_of_300_tokens_is_written_without_a_loop_over_tokens(tmp_path):
    """CPU time, so that a busy machine does not matter; a Python loop over tokens takes seconds."""
    trajectory = Trajectory(ids=tuple(range(300)), roles=(1,) * 60 + (2,) * 240, behaviour_logprobs=(-0.5,) * 300)
    trajectories = [trajectory] * 512
    numbers = torch.rand(512, 300)
    batch = batch_of(trajectories, **dict.fromkeys(COMPUTED, numbers))
    details = [RolloutDetails(prompt_text="p" * 200, answer_text="a" * 900, seed=1, sampling=Sampling())] * 512
    start = time.process_time()
    write_rollouts(tmp_path / "r", trajectories, batch, step=1, details=details, model="", tokenizer="")
    assert time.process_time() - start < 0.5


def test_extras_are_json_that_any_reader_can_take(tmp_path):
    trajectories, batch, details = two()
    details[0] = replace(details[0], extras={"tool": ["a", 1]})
    path = tmp_path / "r.parquet"
    write_rollouts(path, trajectories, batch, step=1, details=details, model="", tokenizer="")
    assert [json.loads(x) for x in pq.read_table(path)["extras"].to_pylist()] == [{"tool": ["a", 1]}, {}]
