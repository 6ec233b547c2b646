"""Rows of whatever people have are the same rows, read one at a time."""

import builtins
import gzip
import json
import os
import subprocess
import sys
from itertools import islice

import datasets
import pandas
import polars
import pyarrow
import pytest

from rolecall.tasks import RowError, kind_of, read_rows, record, resolve
from rolecall.tasks.names import open_source
from rolecall.tasks.rows import share_of, split
from rolecall.tasks.sources import Splits, hub_name
from rolecall.tasks.streams import NoLengthError, Stream, head, split_stream
from rolecall.train.data import order_of

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)


def written(tmp_path, name):
    text = {
        "jsonl": LINES,
        "json": json.dumps(ROWS, indent=1),
        "csv": CSV,
        "tsv": CSV.replace(",", "\t"),
    }[name.removesuffix(".gz").rpartition(".")[2]]
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.json.gz", "a.csv.gz", "lines/of.json"]
)
def test_files(tmp_path, name):
    if name == "lines/of.json":  # one object per line, named .json as many are
        path = tmp_path / "of.json"
        path.write_text(LINES)
    else:
        path = written(tmp_path, name)
    rows = resolve(str(path))
    assert (len(rows), rows.columns, list(rows)) == (20, ("prompt", "answer"), ROWS)
    assert rows[7] == ROWS[7]
    assert rows[7] is not rows[7]


def test_what_csv_says_stays_as_it_is_written(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffprompt,answer,margin\n"one, two\nthree",007,0.5\nnull,,\n'.encode())
    assert list(read_rows(path)) == [
        {"prompt": "one, two\nthree", "answer": "007", "margin": 0.5},
        {"prompt": "null", "answer": None, "margin": None},
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "[1, 2]", "row 1: a row must be a JSON object, this is a int"),
        (
            "a.json",
            '[{"prompt": "x"}\n {"prompt": "y"}]',
            r"not a JSON array of rows \(line 2: Expecting ',' delimiter",
        ),
        ("a.json", '[{"prompt": "x"},', "not a JSON array of rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", '{\n"data": []}', "line 1: not a JSON object"),
        ("a.csv", "a,b\n1,2,3\n", "cannot be read as CSV: .*Expected 2 columns, got 3"),
        ("a.csv", "a,a\n1,2\n", "two columns are named 'a'"),
        ("a.jsonl.gz", "no gzip", "cannot be unpacked as gzip"),
    ],
)
def test_files_that_are_wrong(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(RowError, match=sentence) as caught:
        read_rows(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_json_array_is_not_held_as_dicts(tmp_path):
    rows = read_rows(written(tmp_path, "a.json"))
    assert rows[3] is not rows[3]
    assert rows.place(3).endswith("a.json, row 4")


# -- objects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        datasets.Dataset.from_list,
        pandas.DataFrame,
        polars.DataFrame,
        lambda rows: polars.DataFrame(rows).lazy(),
        pyarrow.Table.from_pylist,
        list,
        lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    ],
    ids=["dataset", "pandas", "polars", "lazy", "arrow", "list", "numpy"],
)
def test_tables(made):
    found = open_source(made(ROWS)).train
    assert (len(found), found.columns, list(found)) == (20, ("prompt", "answer"), ROWS)
    assert found[7] == ROWS[7]
    assert kind_of(found) == "prompt"


def test_a_frame_of_texts_and_messages():
    mixed = [{"prompt": "a", "answer": 1.5}, {"prompt": [{"role": "user", "content": "b"}], "answer": None}]
    assert list(open_source(pandas.DataFrame(mixed)).train) == mixed


def test_splits(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict(train=data.select(range(15)), validation=data.select(range(15, 20)))
    both.save_to_disk(str(tmp_path / "saved"))
    for source in (both, dict(both), str(tmp_path / "saved")):
        found = open_source(source)
        assert isinstance(found, Splits)
        assert (list(found.train), list(found.test)) == (ROWS[:15], ROWS[15:])
    with pytest.raises(RowError, match="splits left, right and none is called train"):
        open_source(datasets.DatasetDict(left=data, right=data))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((row for row in ROWS), "a generator, which can be read once only"),
        (["a"], "row 0 must be a dict of columns, it is a str"),
        ([], "there are no rows"),
        ({"prompt": "a"}, "rows are a dict"),
        (3, "rows are a int"),
    ],
)
def test_objects_that_are_no_rows(given, sentence):
    with pytest.raises(RowError, match=sentence):
        open_source(given)


def test_a_prompt_that_conversations_repeat_is_not_read_twice():
    """As ultrafeedback has them: the prompt as text, and two whole conversations."""
    asked = {"role": "user", "content": "hi"}
    good, bad = ({"role": "assistant", "content": text} for text in ("hello", "no"))
    found = record({"prompt": "hi", "chosen": [asked, good], "rejected": [asked, bad]}, "preference")
    assert (found.prompt, found.chosen, found.rejected) == ([asked], [good], [bad])
    found = record({"prompt": "hi", "chosen": [good], "rejected": [bad]}, "preference")
    assert (found.prompt, found.chosen, found.rejected) == ("hi", [good], [bad])


# -- streams ---------------------------------------------------------------------------------------------------------


def stream(n=20):
    return datasets.Dataset.from_list(ROWS[:n]).to_iterable_dataset(num_shards=2)


def taken(order, rows, *counts):
    return [[rows[i]["prompt"] for i in order.take(count)] for count in counts]


def test_a_stream_is_read_in_its_own_order_again_and_again():
    rows = open_source(stream()).train
    assert isinstance(rows, Stream)
    order = order_of(rows, seed=3)
    prompts = [row["prompt"] for row in ROWS]
    assert [p for some in taken(order, rows, 7, 7, 7, 19) for p in some] == prompts + prompts
    with pytest.raises(NoLengthError, match="a stream, whose number is not known"):
        len(rows)
    assert list(rows) == ROWS


def test_a_stream_goes_on_from_its_position():
    whole_rows = open_source(stream()).train
    whole = taken(order_of(whole_rows, seed=0), whole_rows, 6, 6, 6, 6, 6)
    first_rows, second_rows = open_source(stream()).train, open_source(stream()).train
    first, second = order_of(first_rows, seed=0), order_of(second_rows, seed=0)
    before = taken(first, first_rows, 6, 6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + taken(second, second_rows, 6, 6, 6) == whole


def test_a_stream_that_came_in_another_order_is_told(caplog):
    first = order_of(open_source(stream()).train, seed=0)
    first.take(5)
    other = order_of(open_source(_Again(ROWS[::-1])).train, seed=0)
    other.load_state_dict(first.state_dict())
    assert "another row 4 than when the checkpoint was written" in caplog.text


class _Again:
    """Something that can be iterated again and has no length."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


def test_only_so_many_rows_of_a_stream_are_read():
    read = []

    class Counting(_Again):
        def __iter__(self):
            for row in self._rows:
                read.append(row)
                yield row

    rows = open_source(Counting(ROWS)).train
    read.clear()
    order_of(rows, seed=0).take(4)
    assert len(read) == 4


def test_rows_of_a_stream_that_are_left_out_are_never_trained_on():
    rows = open_source(_Again(ROWS)).train.kept(lambda i, row: row if i % 3 else None)
    order = order_of(rows, seed=0)
    assert order.take(16) == [i for i in range(20) if i % 3] + [1, 2, 4]
    with pytest.raises(RowError, match="no row of the stream can be used"):
        order_of(rows.kept(lambda i, row: None), seed=0).take(1)


def test_a_stream_is_split_as_a_table_is():
    train, test = split(open_source(ROWS).train, held_out=0.3)
    streamed, held = split_stream(open_source(stream()).train, held_out=0.3, n=100)
    assert (list(streamed), list(held)) == (list(train), list(test))
    assert all(share_of(row["prompt"]) < 0.3 for row in held)
    assert list(head(streamed, 2)) == list(islice(train, 2))


# -- the hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, None)),
        ("openai/gsm8k:main", ("openai/gsm8k", "main", None)),
        ("openai/gsm8k:main@test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k@test", ("openai/gsm8k", None, "test")),
        ("org/data-v1.1", ("org/data-v1.1", None, None)),
        ("data/train.jsonl", None),
        ("./gsm8k", None),
        ("a/b/c", None),
        ("~/gsm8k", None),
        ("data/rows.csv.gz", None),
    ],
)
def test_which_names_are_of_the_hub(name, parts):
    found = hub_name(name)
    assert (found and tuple(found.values())) == parts


def test_a_folder_that_is_there_makes_it_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    assert hub_name("openai/gsm8k") is None
    with pytest.raises(RowError, match="there is no file or folder openai/gsm8k"):
        resolve("openai/gsm8k")


@pytest.fixture
def hub(monkeypatch):
    """A hub with one dataset; what was asked of it."""
    asked = []
    data = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict(train=data.select(range(15)), test=data.select(range(15, 20)))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, **how: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **how: (asked.append(args), both)[1])
    return asked


def test_a_dataset_of_the_hub(hub):
    found = open_source("openai/gsm8k:main")
    assert (list(found.train), list(found.test)) == (ROWS[:15], ROWS[15:])
    assert list(open_source("openai/gsm8k:main@test").train) == ROWS[15:]
    assert hub == [("openai/gsm8k", "main")] * 2
    with pytest.raises(RowError, match="has no split 'dev'; it has train, test"):
        open_source("openai/gsm8k@dev")


def test_offline_is_one_sentence_at_once(tmp_path):
    """Nothing is replaced here: the hub is an address that refuses every connection."""
    asks = "from rolecall.tasks import resolve; import datasets, time; start = time.monotonic()\n"
    asks += "try: resolve('openai/gsm8k:main')\n"
    asks += "except Exception as error: print(type(error).__name__, error, time.monotonic() - start, sep='|')"
    how = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, env=how, check=True)
    kind, sentence, seconds = ran.stdout.strip().split("|")
    assert kind == "RowError"
    assert sentence.startswith("there is no file openai/gsm8k:main, and the Hugging Face hub cannot be reached")
    assert "Retry" not in ran.stderr
    assert float(seconds) < 8  # the package would retry for half a minute


def test_without_the_package(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **how):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RowError, match=r"pip install 'rolecall\[data\]'"):
        open_source("openai/gsm8k")
