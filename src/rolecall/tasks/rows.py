"""Rows from .jsonl, .parquet and directories saved by Hugging Face datasets, read one at a time and never changed.

Files are checked when they are opened: a malformed line is an error with its number then, not at step 900. After that
rows are made on demand from the mapped file, so that a million of them cost a few megabytes.
"""

import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from rolecall.errors import UserError

Row = dict[str, Any]

_BLOCK = 1 << 13
"""Bytes of lines parsed at a time. More are slower: the garbage collector then walks over the rows."""


_BLOCK_ROWS = 64
"""Rows parsed at a time when all are read."""


class RowError(UserError):
    """Rows that cannot be read or are not what they should be."""


class Rows(Protocol):
    """A table of rows: `rows[7]` is a new dict."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that some row has, in order of appearance."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...


def rows_of_columns(columns: Mapping[str, Any]) -> list[Row]:
    """Rows from a mapping of columns, as `datasets.Dataset.from_dict` takes it: {"prompt": [...], "answer": [...]}."""
    lengths = {name: len(values) for name, values in columns.items() if isinstance(values, list | tuple)}
    if not columns or len(lengths) < len(columns) or len(set(lengths.values())) > 1:
        raise RowError(
            "rows given as a mapping are columns, lists of the same length: {'prompt': [...], 'answer': [...]}; a single "
            "row is a list with one dict"
        )
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class ListRows:
    """Rows that are in memory already."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]
        self.columns = tuple(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return (dict(row) for row in self._rows)


class ChosenRows:
    """Some rows of another table, in a given order."""

    def __init__(self, rows: Rows, indices: Iterable[int]) -> None:
        self._rows, self._indices = rows, array("Q", indices)
        self.columns = rows.columns

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._indices[index]]

    def __iter__(self) -> Iterator[Row]:
        return (self._rows[index] for index in self._indices)

    def place(self, index: int) -> str:
        """Where the row stands in the table it was chosen from."""
        return place_of(self._rows, self._indices[index])


class JsonRows:
    """One JSON object per line; empty lines are skipped. Keeps the offset of every line, not the rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self.columns = _index_lines(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._starts else b""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = self._starts[index]
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        try:
            row: Row = json.loads(line.decode())
        except ValueError as error:
            raise RowError(f"row {index} of {self.path} can no longer be read; has the file changed?") from error
        return row

    def __iter__(self) -> Iterator[Row]:
        for first in range(0, len(self), _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, len(self))
            bounds = [*self._starts[first:last], self._starts[last] if last < len(self) else len(self._bytes)]
            lines = [self._bytes[start:end] for start, end in pairwise(bounds)]
            rows = _parse_block(lines)
            yield from rows if rows is not None else (self[index] for index in range(first, last))

    def place(self, index: int) -> str:
        """The file and the line."""
        before = self._bytes[: self._starts[index]]
        return f"{self.path}, line {before.count(10) + 1}"  # 10 is the line break


class ArrowRows:
    """Rows of an Arrow table, which may be mapped from a file. JSON columns are decoded."""

    def __init__(self, table: Any) -> None:
        self.columns: tuple[str, ...] = tuple(table.column_names)
        self._batches = [batch for batch in table.to_batches() if len(batch)]
        self._ends: list[int] = []
        for batch in self._batches:
            self._ends.append(len(batch) + (self._ends[-1] if self._ends else 0))
        decoders = {field.name: _decoder(field.type) for field in table.schema}
        self._decoders = {name: decode for name, decode in decoders.items() if decode is not None}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        place = range(len(self))[index]  # negative and out-of-range indices as for a list
        number = bisect_right(self._ends, place)
        start = self._ends[number - 1] if number else 0
        return self._decoded(self._batches[number].slice(place - start, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches:
            for start in range(0, len(batch), 1024):
                for row in batch.slice(start, 1024).to_pylist():
                    yield self._decoded(row)

    def _decoded(self, row: Row) -> Row:
        for name, decode in self._decoders.items():
            row[name] = decode(row[name])
        return row


def read_rows(path: str | Path, *, split: str | None = None) -> Rows:
    """Open a .jsonl or .parquet file, a folder of such files, or a folder written by `save_to_disk`.

    Parquet is decoded into memory; Arrow files and .jsonl are mapped. `split` names a split of a saved DatasetDict and
    is "train" unless given.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise RowError(f"there is no file or folder {path}")
    rows = _read_folder(path, split) if path.is_dir() else _read_file(path)
    if not len(rows):
        raise RowError(f"{path} holds no rows")
    return rows


def split(rows: Rows, *, held_out: float, seed: int = 0) -> tuple[Rows, Rows]:
    """(train, test): a row is held out by a hash of its prompt, or of the whole row if it has none.

    The same prompt is always on the same side, whatever else the file holds and in whatever order.
    """
    if not 0 < held_out < 1:
        raise RowError(f"held_out must lie between 0 and 1 (a share of the prompts), got {held_out}")
    sides: tuple[array[int], array[int]] = array("Q"), array("Q")
    for index, row in enumerate(rows):
        content = row if row.get("prompt") is None else row["prompt"]
        sides[share_of(content, seed=seed) < held_out].append(index)
    for name, side in zip(("train", "test"), sides, strict=True):
        if not side:
            raise RowError(
                f"held_out={held_out} of {len(rows)} rows leaves no {name} row; change the share or the seed"
            )
    return ChosenRows(rows, sides[0]), ChosenRows(rows, sides[1])


def place_of(rows: Rows, index: int) -> str:
    """How messages name a row: by file and line where there are lines, else by its number from 0."""
    place = getattr(rows, "place", None)
    return f"row {index}" if place is None else str(place(index))


def share_of(content: Any, *, seed: int = 0) -> float:
    """A number in [0, 1) that depends on the content and the seed only."""
    text = json.dumps([seed, content], sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big") / 2**48


def _read_file(path: Path) -> Rows:
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonRows(path)
    if path.suffix == ".parquet":
        return ArrowRows(_parquet([path]))
    if path.suffix == ".arrow":
        return ArrowRows(_arrow([path]))
    raise RowError(f"{path} is neither .jsonl nor .parquet nor a folder; convert it to one JSON object per line")


def _read_folder(path: Path, split: str | None) -> Rows:
    if (path / "dataset_dict.json").is_file():
        names: list[str] = json.loads((path / "dataset_dict.json").read_text())["splits"]
        name = split or ("train" if "train" in names or len(names) != 1 else names[0])
        if name not in names:
            raise RowError(f"{path} has no split {name!r}; it has {', '.join(names)}")
        return _read_folder(path / name, None)
    if split is not None:
        raise RowError(f"{path} has no splits; leave out split={split!r}")
    if (path / "state.json").is_file():
        files = json.loads((path / "state.json").read_text())["_data_files"]
        return ArrowRows(_arrow([path / file["filename"] for file in files]))
    parquet, lines = sorted(path.glob("*.parquet")), sorted(path.glob("*.jsonl"))
    if parquet and not lines:
        return ArrowRows(_parquet(parquet))
    if len(lines) == 1 and not parquet:
        return JsonRows(lines[0])
    raise RowError(
        f"{path} is not a folder of rows: it needs .parquet files, one .jsonl file, or what `save_to_disk` writes"
    )


def _parquet(paths: Sequence[Path]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.concat_tables(
            [pyarrow.parquet.ParquetFile(path).read() for path in paths], promote_options="default"
        )
    except pyarrow.ArrowException as error:
        raise RowError(f"{', '.join(map(str, paths))} cannot be read as Parquet: {_first_line(error)}") from error


def _arrow(paths: Sequence[Path]) -> Any:
    import pyarrow

    try:
        return pyarrow.concat_tables(
            [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all() for path in paths]
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise RowError(f"{', '.join(map(str, paths))} cannot be read as Arrow: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """How to turn values of an Arrow type into Python, where `to_pylist` leaves JSON as text; None: as it is."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.JsonType):
        return lambda value: None if value is None else json.loads(value)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        return None if inner is None else lambda value: None if value is None else [inner(item) for item in value]
    if types.is_struct(kind):
        parts = {field.name: decode for field in kind if (decode := _decoder(field.type)) is not None}
        if parts:
            return lambda value: (
                None if value is None else value | {name: decode(value[name]) for name, decode in parts.items()}
            )
    return None


def _index_lines(path: Path) -> tuple["array[int]", tuple[str, ...]]:
    """The offset of every row, and all columns. Raises at the first line that is not a JSON object."""
    starts, columns = array("Q"), dict[str, None]()
    last: tuple[str, ...] | None = None
    position, first_number = 0, 1
    with path.open("rb") as file:
        if file.read(3) == b"\xef\xbb\xbf":
            position = 3
        file.seek(position)
        while lines := file.readlines(_BLOCK):
            rows: Sequence[Row | None] | None = _parse_block(lines)
            if rows is None:
                rows = [_parse_line(path, number, line) for number, line in enumerate(lines, first_number)]
            for row, line in zip(rows, lines, strict=True):
                if row is not None:
                    starts.append(position)
                    names = tuple(row)
                    if names != last:
                        last = names
                        columns.update(dict.fromkeys(names))
                position += len(line)
            first_number += len(lines)
    return starts, tuple(columns)


def _parse_block(lines: Sequence[bytes]) -> list[Row] | None:
    """All lines in one go, which is faster; None if any is not an object.

    Every line gets brackets of its own, so that half an object on one line and half on the next is not taken for one.
    """
    try:
        rows = [row for (row,) in json.loads("[[" + b"],[".join(lines).decode() + "]]")]
    except (ValueError, RecursionError, TypeError):
        return None
    return rows if len(rows) == len(lines) and all(type(row) is dict for row in rows) else None


def _parse_line(path: Path, number: int, line: bytes) -> Row | None:
    """One line on its own; None if it is empty."""
    if not line.strip():
        return None
    try:
        row = json.loads(line.strip().decode())
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RowError(f"{path}, line {number}: not a JSON object ({what})") from error
    if type(row) is not dict:
        raise RowError(f"{path}, line {number}: a row must be a JSON object, this is a {type(row).__name__}")
    return row
