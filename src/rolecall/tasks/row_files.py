"""Rows from files, read one at a time and never changed.

Files are checked when they are opened: a malformed line is an error with its number then, not at step 900. After that
rows are made on demand from the mapped file, so that a million of them cost a few megabytes.
"""

import csv
import gzip
import io
import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from rolecall.tasks.rows import Row, RowError, Rows

_BLOCK = 1 << 13
"""Bytes of lines parsed at a time. More are slower: the garbage collector then walks over the rows."""
_BLOCK_ROWS = 64
"""Rows parsed at a time when all are read."""
_NUMBERS = ("margin", "label")
"""Columns of a .csv file that are numbers; all others stay the text they are."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Names of files that hold rows; all but the last two may end in .gz too."""


class JsonRows:
    """One JSON object per line; empty lines are skipped. Keeps the offset of every line, not the rows.

    `lines` are the bytes of a file that cannot be mapped as it is; `unit` is what they are called in messages.
    """

    def __init__(self, path: Path, lines: bytes | None = None, *, unit: str = "line") -> None:
        self.path, self._unit = path, unit
        with path.open("rb") if lines is None else io.BytesIO(lines) as file:
            self._starts, self.columns = _index_lines(file, path)
            self._bytes: bytes | mmap.mmap = b"" if lines is None else lines
            if lines is None and self._starts:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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
        return f"{self.path}, {self._unit} {before.count(10) + 1}"  # 10 is the line break


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
        return next(self._decoded(self._batches[number].slice(place - start, 1), place))

    def __iter__(self) -> Iterator[Row]:
        for batch, end in zip(self._batches, self._ends, strict=True):
            for start in range(0, len(batch), 1024):
                yield from self._decoded(batch.slice(start, 1024), end - len(batch) + start)

    def _decoded(self, some: Any, first: int) -> Iterator[Row]:
        try:
            rows = some.to_pylist()
        except UnicodeDecodeError as error:
            raise RowError(
                f"a text in rows {first + 1} to {first + len(some)} is not UTF-8: the file is damaged"
            ) from error
        for row in rows:
            for name, decode in self._decoders.items():
                row[name] = decode(row[name])
            yield row


def read_rows(path: str | Path, *, split: str | None = None) -> Rows:
    """Open a .jsonl, .json, .csv, .tsv or .parquet file, a folder of rows, or a folder written by `save_to_disk`.

    Arrow files and .jsonl are mapped, all others are held in memory as bytes or columns. `split` names a split of a
    saved DatasetDict and is "train" unless given.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise RowError(f"there is no file or folder {path}")
    rows = _read_folder(path, split) if path.is_dir() else _read_file(path)
    if not len(rows):
        raise RowError(f"{path} holds no rows")
    return rows


def _read_file(path: Path) -> Rows:
    zipped = path.suffix == ".gz"
    kind = path.with_suffix("").suffix if zipped else path.suffix
    if kind in (".parquet", ".arrow") and not zipped:
        return ArrowRows(_table([path], parquet=kind == ".parquet"))
    if kind in (".jsonl", ".ndjson"):
        return JsonRows(path, _unzipped(path) if zipped else None)
    if kind in (".json", ".csv", ".tsv"):
        content = _unzipped(path) if zipped else path.read_bytes()
        return _json(path, content) if kind == ".json" else ArrowRows(_csv(path, content, tabs=kind == ".tsv"))
    raise RowError(
        f"{path} is not a file of rows: its name must end in {', '.join(SUFFIXES)}, or .jsonl.gz, .json.gz, .csv.gz"
    )


def _unzipped(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError) as error:
        raise RowError(f"{path} cannot be unpacked as gzip: {_first_line(error)}") from error


def _json(path: Path, content: bytes) -> Rows:
    """An array of objects; or one object per line, which is often named .json too."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError(f"{path} is not text in UTF-8: {error}") from error
    if not text.lstrip().startswith("["):
        return JsonRows(path, content)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RowError(f"{path} is not a JSON array of rows ({where})") from error
    for number, row in enumerate(rows, 1):
        if type(row) is not dict:
            raise RowError(f"{path}, row {number}: a row must be a JSON object, this is a {type(row).__name__}")
    return JsonRows(path, "\n".join(map(json.dumps, rows)).encode(), unit="row")


def _csv(path: Path, content: bytes, *, tabs: bool) -> Any:
    """A table of text, as it is written; an empty field is a missing value."""
    import pyarrow
    import pyarrow.csv

    content = content.removeprefix(b"\xef\xbb\xbf")
    delimiter = "\t" if tabs else ","
    try:
        names = next(
            csv.reader(io.StringIO(content[: 1 << 20].decode(errors="ignore"), newline=""), delimiter=delimiter), []
        )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RowError(f"{path}: two columns are named {twice!r}; the first line names the columns")
        table = pyarrow.csv.read_csv(
            io.BytesIO(content),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pyarrow.string() for name in names if name not in _NUMBERS},
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
            ),
        )
        _ = table.column_names  # decoded only when somebody looks
        return table
    except UnicodeDecodeError as error:
        raise RowError(f"{path} is not UTF-8 in its first line, which names the columns: save it as UTF-8") from error
    except (pyarrow.ArrowException, csv.Error) as error:
        if "Empty CSV" in str(error):
            raise RowError(f"{path} holds no rows") from error
        raise RowError(f"{path} cannot be read as CSV: {_first_line(error)}") from error


def splits_of_folder(path: Path) -> list[str]:
    """The splits of a saved DatasetDict; none of any other folder or file."""
    found = path / "dataset_dict.json"
    return list(json.loads(found.read_text())["splits"]) if found.is_file() else []


def _read_folder(path: Path, split: str | None) -> Rows:
    if names := splits_of_folder(path):
        name = split or ("train" if "train" in names or len(names) != 1 else names[0])
        if name not in names:
            raise RowError(f"{path} has no split {name!r}; it has {', '.join(names)}")
        return _read_folder(path / name, None)
    if split is not None:
        raise RowError(f"{path} has no splits; leave out split={split!r}")
    if (path / "state.json").is_file():
        files = json.loads((path / "state.json").read_text())["_data_files"]
        return ArrowRows(_table([path / file["filename"] for file in files], parquet=False))
    parquet, lines = sorted(path.glob("*.parquet")), sorted(path.glob("*.jsonl"))
    if parquet and not lines:
        return ArrowRows(_table(parquet, parquet=True))
    if len(lines) == 1 and not parquet:
        return JsonRows(lines[0])
    raise RowError(
        f"{path} is not a folder of rows: it needs .parquet files, one .jsonl file, or what `save_to_disk` writes"
    )


def _table(paths: Sequence[Path], *, parquet: bool) -> Any:
    """One table of all files, Arrow's mapped."""
    import pyarrow
    import pyarrow.parquet

    def read(path: Path) -> Any:
        if parquet:
            return pyarrow.parquet.ParquetFile(path).read()
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()

    try:
        return pyarrow.concat_tables([read(path) for path in paths], promote_options="default" if parquet else "none")
    except MemoryError:  # some of Arrow's exceptions are
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "Parquet" if parquet else "Arrow"
        raise RowError(f"{', '.join(map(str, paths))} cannot be read as {kind}: {_first_line(error)}") from error


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


def _index_lines(file: BinaryIO, path: Path) -> tuple["array[int]", tuple[str, ...]]:
    """The offset of every row, and all columns. Raises at the first line that is not a JSON object."""
    starts, columns = array("Q"), dict[str, None]()
    last: tuple[str, ...] | None = None
    position, first_number = 0, 1
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
