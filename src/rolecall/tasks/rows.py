"""Tables of rows, and how they are split."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Protocol

from rolecall.errors import UserError

Row = dict[str, Any]


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


def holds_splits(given: Mapping[str, Any]) -> bool:
    """Whether a dict holds splits, `{"train": rows, "test": rows}`, and not columns: those are lists of anything but dicts."""
    return bool(given) and all(
        not isinstance(part, list | tuple | str) or (len(part) > 0 and isinstance(part[0], Mapping))
        for part in given.values()
    )


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


def split(rows: Rows, *, held_out: float, seed: int = 0) -> tuple[Rows, Rows]:
    """(train, test): a row is held out by a hash of its prompt, or of the whole row if it has none.

    The same prompt is always on the same side, whatever else the file holds and in whatever order.
    """
    if not 0 < held_out < 1:
        raise RowError(f"held_out must lie between 0 and 1 (a share of the prompts), got {held_out}")
    sides: tuple[array[int], array[int]] = array("Q"), array("Q")
    for index, row in enumerate(rows):
        sides[is_held_out(row, held_out, seed=seed)].append(index)
    for name, side in zip(("train", "test"), sides, strict=True):
        if not side:
            raise RowError(
                f"held_out={held_out} of {len(rows)} rows leaves no {name} row; change the share or the seed"
            )
    return ChosenRows(rows, sides[0]), ChosenRows(rows, sides[1])


def is_held_out(row: Row, share: float, *, seed: int = 0) -> bool:
    """Whether a row is among the share of prompts that is held out, by a hash of its prompt or, without one, of the row."""
    return share_of(row if row.get("prompt") is None else row["prompt"], seed=seed) < share


def place_of(rows: Rows, index: int) -> str:
    """How messages name a row: by file and line where there are lines, else by its number from 0."""
    place = getattr(rows, "place", None)
    return f"row {index}" if place is None else str(place(index))


def share_of(content: Any, *, seed: int = 0) -> float:
    """A number in [0, 1) that depends on the content and the seed only."""
    text = json.dumps([seed, content], sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big") / 2**48
