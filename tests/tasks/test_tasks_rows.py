"""Reading, recognising and splitting rows."""

import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.tasks import ListRows, RowError, kind_of, read_rows, record, records, split

USER = {"role": "user", "content": "1+1?"}
TWO = {"role": "assistant", "content": "2"}
THREE = {"role": "assistant", "content": "3"}
VERL = {
    "data_source": "gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def write_saved(folder, table, files=1):
    """What `Dataset.save_to_disk` leaves behind."""
    folder.mkdir(parents=True)
    size = -(-len(table) // files)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(i * size, size), max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_jsonl_rows_come_back_as_they_were_written(tmp_path):
    rows = [VERL, {"prompt": "ü\u2028", "n": 1.5, "deep": {"x": [None, True]}}, {"other": "1"}]
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps(row, ensure_ascii=False) for row in rows))
    read = read_rows(path)
    assert list(read) == [read[i] for i in range(3)] == rows
    assert read[-1] == rows[-1]
    assert read.columns == (*VERL, "n", "deep", "other")
    with pytest.raises(IndexError):
        read[3]


def test_jsonl_may_have_empty_lines_spaces_crlf_and_a_byte_order_mark(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"a": 1}\r', "", '  {"a": 2} ', "\t", '{"a": 3}', "")
    assert [row["a"] for row in read_rows(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"a": 1', "not a JSON object"),
        ('{"a": 1} {"a": 2}', "not a JSON object"),
        ('{"a": 1}, {"a": 2}', "not a JSON object"),
        ("[1]", "a row must be a JSON object, this is a list"),
        ("7", "a row must be a JSON object, this is a int"),
        (b'{"a": "\xff"}', "not a JSON object"),
        ('{"a": ' + "[" * 100_000, "not a JSON object"),
        ('{"a": "x\ty"}', "not a JSON object"),
    ],
)
def test_a_malformed_line_is_named_when_the_file_is_opened(tmp_path, bad, why):
    path = write_lines(tmp_path / "rows.jsonl", '{"a": 1}', "", bad, '{"a": 2}')
    with pytest.raises(RowError, match=rf"rows\.jsonl, line 3: {why}"):
        read_rows(path)


@pytest.mark.parametrize("halves", [('{"a": 1', '"b": 2}'), ("[1", "2]"), ('{"a": [1', "2]}"), ('{"a": "x', 'y"}')])
def test_half_an_object_is_never_joined_with_the_next_line(tmp_path, halves):
    with pytest.raises(RowError, match="line 2"):
        read_rows(write_lines(tmp_path / "rows.jsonl", '{"a": 0}', *halves, '{"c": 3}, {"d": 4}'))


@given(st.lists(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())), min_size=1))
@settings(max_examples=50)
def test_any_json_rows_survive(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write_lines(path, *map(json.dumps, rows))
    assert list(read_rows(path)) == rows


def test_many_rows_cost_little_memory(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps({"prompt": "p" * 200, "n": i}) for i in range(20_000)))
    tracemalloc.start()
    rows = read_rows(path)
    assert sum(row["n"] for row in rows) == sum(range(20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 3_000_000


def test_parquet_rows_come_back_as_they_were_written(tmp_path):
    rows = [VERL | {"extra_info": {"split": "train", "index": i}} for i in range(5)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    read = read_rows(tmp_path / "a.parquet")
    assert list(read) == [read[i] for i in range(5)] == rows
    assert read[-2] == rows[3]
    assert list(read_rows(tmp_path)) == rows, "a folder of parquet files is read as one"
    with pytest.raises(IndexError):
        read[5]


def test_what_save_to_disk_writes_is_read_without_datasets(tmp_path):
    def as_json(values):
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(values))

    table = pa.table(
        {
            "prompt": [str(i) for i in range(7)],
            "tools": pa.ListArray.from_arrays(pa.array([*range(6), None, 6]), as_json(['{"name": "f"}'] * 6)),
            "info": pa.StructArray.from_arrays(
                [as_json(["[1]"] * 7)], names=["x"], mask=pa.array([False] * 6 + [True])
            ),
        }
    )
    write_saved(tmp_path / "one", table, files=2)
    read = read_rows(tmp_path / "one")
    assert list(read) == [read[i] for i in range(7)]
    assert [row["prompt"] for row in read] == [str(i) for i in range(7)]
    assert read[0] == {"prompt": "0", "tools": [{"name": "f"}], "info": {"x": [1]}}
    assert read[6] == {"prompt": "6", "tools": None, "info": None}


def test_the_splits_of_a_saved_dataset_dict(tmp_path):
    write_saved(tmp_path / "train", pa.table({"prompt": ["a", "b"]}))
    write_saved(tmp_path / "test", pa.table({"prompt": ["c"]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [len(read_rows(tmp_path)), len(read_rows(tmp_path, split="test"))] == [2, 1]
    with pytest.raises(RowError, match="has no split 'dev'; it has train, test"):
        read_rows(tmp_path, split="dev")
    with pytest.raises(RowError, match="has no splits"):
        read_rows(tmp_path / "train", split="train")


def test_what_cannot_be_read_is_a_sentence(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "rows.xlsx").write_text("a,b")
    (tmp_path / "rows.parquet").write_text("nonsense")
    (tmp_path / "rows.arrow").write_text("nonsense")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "nothing.jsonl": "there is no file or folder",
        "rows.csv": "holds no rows",
        "rows.xlsx": "its name must end in .jsonl",
        "rows.parquet": "cannot be read as Parquet",
        "rows.arrow": "cannot be read as Arrow",
        "empty.jsonl": "holds no rows",
        "folder": "is not a folder of rows",
    }.items():
        with pytest.raises(RowError, match=sentence) as caught:
            read_rows(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "1+1="}, "prompt"),
        ({"prompt": [USER], "answer": "2"}, "prompt"),
        (VERL, "prompt"),
        ({"prompt": "1+1=", "completion": "2"}, "prompt_completion"),
        ({"messages": [USER, TWO]}, "messages"),
        ({"text": "1+1=2"}, "text"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "preference"),
        ({"chosen": [USER, TWO], "rejected": [USER, THREE]}, "preference"),
    ],
)
def test_rows_are_recognised_and_kept_unchanged(row, kind):
    rows = ListRows([row])
    assert kind_of(rows) == kind
    (made,) = records(rows)
    assert made.kind == kind
    assert made.row == row
    for name in ("prompt", "completion", "messages", "text"):
        if name in row:
            assert getattr(made, name) == row[name]


def test_a_preference_without_a_prompt_is_parted_where_the_answers_differ():
    made = record({"chosen": [USER, TWO], "rejected": [USER, THREE]}, "preference")
    assert (made.prompt, made.chosen, made.rejected) == ([USER], [TWO], [THREE])
    made = record({"chosen": "the sky is blue", "rejected": "the sky is green"}, "preference")
    assert (made.prompt, made.chosen, made.rejected) == ("the sky is", " blue", " green")
    made = record({"prompt": "is", "chosen": " blue", "rejected": " green"}, "preference")
    assert (made.prompt, made.chosen, made.rejected) == ("is", " blue", " green")


@pytest.mark.parametrize(
    ("row", "kind", "sentence"),
    [
        ({"prompt": None}, "prompt", "row 4: `prompt` must be a text or a list of messages, it is missing"),
        ({"prompt": 3}, "prompt", "it is a int"),
        ({"prompt": []}, "prompt", "it is an empty list"),
        ({"prompt": ["hello"]}, "prompt", "every message of `prompt` must be an object"),
        ({"messages": "x"}, "messages", "must be a list of messages"),
        ({"text": [USER]}, "text", "`text` must be a text"),
        ({"chosen": "a", "rejected": "b"}, "preference", "nothing in common in front"),
        ({"chosen": "ab", "rejected": "abc"}, "preference", "is the beginning of the other"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "preference", "are the same"),
    ],
)
def test_a_bad_row_is_named(row, kind, sentence):
    with pytest.raises(RowError, match=sentence):
        record(row, kind, number=4)


def test_unknown_columns_are_a_sentence():
    with pytest.raises(RowError, match=r"columns question, answer; .* rename `question` to `prompt`"):
        kind_of(ListRows([{"question": "1+1", "answer": "2"}]))
    with pytest.raises(RowError, match="there are no rows"):
        kind_of(ListRows([]))


def test_a_split_goes_by_prompt_and_not_by_place():
    rows = [{"prompt": f"p{i % 500}", "answer": i} for i in range(1000)]
    train, test = split(ListRows(rows), held_out=0.2, seed=1)
    assert sorted(row["answer"] for part in (train, test) for row in part) == list(range(1000))
    held = {row["prompt"] for row in test}
    assert not held & {row["prompt"] for row in train}
    assert 120 < len(test) < 280
    _, backwards = split(ListRows([*rows[::-1], {"prompt": "new"}]), held_out=0.2, seed=1)
    assert {row["prompt"] for row in backwards} - {"new"} == held
    assert {row["prompt"] for row in split(ListRows(rows), held_out=0.2, seed=2)[1]} != held
    assert test[0] == next(iter(test))
    assert test.columns == ("prompt", "answer")


def test_a_split_without_prompts_goes_by_the_whole_row():
    train, test = split(ListRows({"text": str(i)} for i in range(100)), held_out=0.5)
    assert len(train) + len(test) == 100
    assert not {r["text"] for r in train} & {r["text"] for r in test}


def test_a_split_that_leaves_a_side_empty_is_a_sentence():
    rows = ListRows([{"prompt": "a"}])
    with pytest.raises(RowError, match="of 1 rows leaves no"):
        split(rows, held_out=0.5)
    with pytest.raises(RowError, match="held_out must lie between 0 and 1"):
        split(rows, held_out=1)
