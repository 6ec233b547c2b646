"""Parquet files that say what they are: a name, a version, a schema; and columns of lists of uneven length."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray

import rolecall
from rolecall.files import write_atomically

_PREFIX = "rolecall."
"""Of every key that is ours in a file's metadata."""
_GROUPS = "groups"
"""The key of a merged file under which the facts of its tables are, in JSON."""
# A dictionary of numbers that hardly repeat makes the file larger and writing several times slower.
_WRITTEN = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}


class StoreError(ValueError):
    """A file that cannot be read as what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One kind of file."""

    name: str
    """What it is called in a file's metadata."""
    version: int
    """The version that is written. Grows when a column is added or changes its meaning."""
    schema: pa.Schema
    """The columns. A file may hold more; a nullable one may be missing."""
    upgrades: Mapping[int, Callable[[pa.Table], pa.Table]] = field(default_factory=dict)
    """From that version to the next. A version without an entry only lacks columns that may be null."""


def list_of(value_type: pa.DataType, *, null_positions: bool = False) -> pa.DataType:
    """A list column's type; `null_positions` lets single positions be null."""
    return pa.list_(pa.field("element", value_type, nullable=null_positions))


FLOATS = list_of(pa.float32(), null_positions=True)
CODES = list_of(pa.uint8())
IDS = list_of(pa.int32())
NESTED_IDS = list_of(IDS)
"""Lists of numbers that may be missing at a position, of roles or verdicts, of token ids, and of such lists."""


def table_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Columns that are plain lists get the schema's type; the others have it."""
    arrays = [columns[name] for name in schema.names]
    kinds = zip(arrays, schema.types, strict=True)
    return pa.table([pa.array(held, kind) if isinstance(held, list) else held for held, kind in kinds], schema=schema)


def row_by_row(columns: Mapping[str, list]) -> Iterator[dict[str, Any]]:
    """Columns as one dict per row."""
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def write_table(path: Path, table: pa.Table, form: Format, facts: Mapping[str, str]) -> None:
    """Write a table once, atomically, with the format's name and version and the given facts in its metadata."""
    if path.exists():
        raise FileExistsError(f"{path} is there already, and the record of a step is written once; remove it first")
    named = {"schema": form.name, "schema_version": str(form.version), "version": rolecall.__version__, **facts}
    table = table.replace_schema_metadata({_PREFIX + key: value for key, value in named.items()})
    write_atomically(path, lambda aside: pq.write_table(table, aside, **_WRITTEN))


def merged(tables: Sequence[tuple[pa.Table, Mapping[str, str]]], form: Format) -> bytes:
    """One file of several tables and their facts, in order: each is a row group of its own."""
    kept = [{key: value for key, value in facts.items() if not key.startswith("schema")} for _, facts in tables]
    named = {"schema": form.name, "schema_version": str(form.version), "version": rolecall.__version__}
    metadata = {_PREFIX + key: value for key, value in (named | {_GROUPS: json.dumps(kept)}).items()}
    out, schema = io.BytesIO(), form.schema.with_metadata(metadata)
    with pq.ParquetWriter(out, schema, **_WRITTEN) as writer:
        for table, _ in tables:
            fitting = table.select(schema.names).cast(form.schema).replace_schema_metadata(metadata)
            writer.write_table(fitting, row_group_size=len(table))
    return out.getvalue()


def merged_facts(source: Any) -> list[dict[str, str]]:
    """The facts of every table in a file that `merged` made."""
    metadata = pq.read_metadata(source).metadata or {}
    return list(json.loads(metadata[f"{_PREFIX}{_GROUPS}".encode()]))


def read_table(
    path: Path | str,
    form: Format,
    *,
    columns: Sequence[str] | None = None,
    source: Any = None,
    group: int | None = None,
) -> tuple[pa.Table, dict[str, str]]:
    """A table with at least the format's columns, brought to its version, and the facts written with it.

    With `columns` those alone, which is quicker; a file of a version whose columns changed is read as a whole. `source` is what is
    read, if it is no file that `path` names; `group` which table of a `merged` file.
    """
    try:
        with pq.ParquetFile(path if source is None else source, page_checksum_verification=True) as file:
            written = (file.schema_arrow.metadata or {}).get(f"{_PREFIX}schema_version".encode(), b"")
            if columns is not None and not any(str(older).encode() == written for older in form.upgrades):
                form = replace(form, schema=pa.schema([form.schema.field(name) for name in columns]))
                table = file.read(columns=[name for name in columns if name in file.schema_arrow.names])
            else:
                table = file.read() if group is None else file.read_row_group(group)
        facts = _facts(table)
        facts |= {} if group is None else json.loads(facts.pop(_GROUPS))[group]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:  # the system's own: not there, not allowed
            raise
        if isinstance(error, MemoryError):  # says nothing about the file
            raise
        raise StoreError(
            f"{path} is not a whole Parquet file, or there is too little memory to read it "
            f"({str(error).splitlines()[0]}); if it is damaged, bring back a copy"
        ) from error
    if facts.get("schema") != form.name or not facts.get("schema_version", "").isdecimal():
        found = f"a file of {facts['schema']}" if "schema" in facts else "not written by rolecall"
        raise StoreError(f"{path} is {found}, but a file of {form.name} is needed; check the path")
    version = int(facts["schema_version"])
    if version > form.version:
        raise StoreError(
            f"{path} is a file of {form.name} in version {version}, written by rolecall {facts.get('version', '?')}; "
            f"this is rolecall {rolecall.__version__}, which reads up to version {form.version}: install a newer one"
        )
    for older in range(version, form.version):
        table = form.upgrades.get(older, lambda same: same)(table)
    return _fitted(table, form, path), facts


def _facts(table: pa.Table) -> dict[str, str]:
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}


def _fitted(table: pa.Table, form: Format, path: Path | str) -> pa.Table:
    """The same table with every column of the format, in its type."""
    for column in form.schema:
        index = table.schema.get_field_index(column.name)
        if index >= 0 and table.schema.field(index).type == column.type:
            continue
        try:
            if index >= 0:
                table = table.set_column(index, column, table.column(index).cast(column.type))
            elif column.nullable:
                table = table.append_column(column, pa.nulls(len(table), column.type))
            else:
                raise pa.ArrowInvalid("it is missing")
        except pa.ArrowException as error:
            raise StoreError(
                f"column {column.name!r} of {path} is not {column.type}: {str(error).splitlines()[0]}; bring back a copy of the file"
            ) from error
    return table


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of uneven length, end to end in one array."""

    values: NDArray
    """All rows, one after the other."""
    lengths: NDArray
    """Entries per row; 0 where there is no row."""
    present: NDArray
    """False where the row is null as a whole, which is not the same as empty."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[float] | None], dtype: DTypeLike) -> Self:
        """From Python sequences."""
        lengths, present = _extents(rows)
        given = chain.from_iterable(row for row in rows if row is not None)
        return cls(np.fromiter(given, dtype, count=int(lengths.sum())), lengths, present)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts."""
        if not parts:
            return cls(np.empty(0), np.empty(0, np.int64), np.empty(0, bool))
        held = [part.values for part in parts if part.present.any()]
        values = np.concatenate(held) if held else np.empty(0)
        return cls(values, np.concatenate([p.lengths for p in parts]), np.concatenate([p.present for p in parts]))

    @classmethod
    def cut(cls, rectangle: NDArray | None, lengths: NDArray) -> Self:
        """From [rows, time], each row cut to its length; all rows null if there is no rectangle."""
        if rectangle is None:
            return cls(np.empty(0), np.zeros_like(lengths), np.zeros(len(lengths), bool))
        return cls(rectangle[_inside(lengths, rectangle.shape[1])], lengths, np.ones(len(lengths), bool))

    @classmethod
    def read(cls, column: pa.ChunkedArray) -> Self:
        """From a list column. Null positions become NaN."""
        lists = column.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
        return cls(
            lists.flatten().to_numpy(zero_copy_only=False), lengths, lists.is_valid().to_numpy(zero_copy_only=False)
        )

    def column(self, kind: pa.DataType) -> pa.Array:
        """As a list column; NaN becomes null if the type allows null positions."""
        nulls = np.isnan(self.values) if kind.value_field.nullable else None
        absent = None if self.present.all() else pa.array(~self.present)
        return pa.ListArray.from_arrays(
            _offsets(self.lengths), pa.array(self.values, kind.value_type, mask=nulls), type=kind, mask=absent
        )

    def tuples(self) -> list[tuple | None]:
        """Each row as plain Python; None where there is none."""
        values, start = self.values.tolist(), 0
        rows: list[tuple | None] = []
        for length, present in zip(self.lengths.tolist(), self.present.tolist(), strict=True):
            rows.append(tuple(values[start : start + length]) if present else None)
            start += length
        return rows

    def arrays(self) -> list[NDArray | None]:
        """Each row as an array; None where there is none."""
        parts = np.split(self.values, np.cumsum(self.lengths)[:-1])
        return [part if present else None for part, present in zip(parts, self.present, strict=True)]

    def sums(self, values: NDArray) -> NDArray:
        """The sum over each row of numbers that stand end to end as the rows do."""
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(owner, weights=values, minlength=len(self.lengths))

    def rectangle(self, time: int, fill: float) -> NDArray:
        """As [rows, time], `fill` after each row's end."""
        out = np.full((len(self.lengths), time), fill, self.values.dtype)
        out[_inside(self.lengths, time)] = self.values
        return out


def nested(ids: NDArray, counts: NDArray, lengths: NDArray, present: NDArray) -> pa.Array:
    """A column of `NESTED_IDS`: rows of `lengths` positions, positions of `counts` ids; null where not `present`."""
    inner = pa.ListArray.from_arrays(_offsets(counts[np.repeat(present, lengths)]), pa.array(ids, pa.int32()), type=IDS)
    offsets = _offsets(np.where(present, lengths, 0))
    return pa.ListArray.from_arrays(offsets, inner, type=NESTED_IDS, mask=pa.array(~present))


def flattened(column: pa.ChunkedArray, lengths: NDArray) -> tuple[NDArray, NDArray]:
    """(ids, counts) of a column of `NESTED_IDS`; a row that is null has no ids."""
    lists = column.combine_chunks()
    present = lists.is_valid().to_numpy(zero_copy_only=False)
    counts, inner = np.zeros(int(lengths.sum()), np.int64), lists.flatten()
    counts[np.repeat(present, lengths)] = pc.list_value_length(inner).to_numpy()
    return inner.flatten().to_numpy(), counts


def _offsets(lengths: NDArray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def first_table() -> None:
    """Make pyarrow import what it imports at its first array: pandas, where it is installed, takes a fifth of a second."""
    pa.array([0])


def _extents(rows: Iterable[Sequence[float] | NDArray | None]) -> tuple[NDArray, NDArray]:
    counts = [None if row is None else len(row) for row in rows]
    return np.array([count or 0 for count in counts], np.int64), np.array([count is not None for count in counts], bool)


def _inside(lengths: NDArray, time: int) -> NDArray:
    return np.arange(time) < lengths[:, None]
