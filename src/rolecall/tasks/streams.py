"""Rows that come in their own order and whose number is not known, such as a `datasets.IterableDataset`.

A row's number is its place in the stream. A stream is never shuffled and never held: a window of the last rows is kept,
and what lies before it is read again from the start.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from rolecall.tasks.rows import ChosenRows, ListRows, Row, RowError, Rows, is_held_out

_WINDOW = 4096
"""Rows of a stream that are kept after they were read."""
_LOOKED_AT = 256
"""Rows of a stream that checks look at."""


class NoLengthError(RowError, TypeError):
    """The number of rows was asked of a stream. A TypeError, as of any object without a length."""


class Stream:
    """Rows read in order. `keep` makes of each what is kept of it; None leaves the row out."""

    def __init__(
        self, source: Iterable[Mapping[str, Any]], *, keep: Callable[[int, Row], Any] = lambda _, row: row
    ) -> None:
        self._source, self._keep = source, keep
        self._reader: Iterator[Mapping[str, Any]] = iter(())
        self._read = 0
        self._window: dict[int, Any] = {}
        first = next(iter(source), None)
        if first is None:
            raise RowError("the stream holds no rows")
        known = getattr(source, "column_names", None) or ()
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*known, *first)))
        self._restart()

    def __len__(self) -> int:
        raise NoLengthError("these rows are a stream, whose number is not known: use a file, or a table in memory")

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> Any:
        if index not in self._window:
            self._skip_to(index)
            if self._next_row() is None or index not in self._window:
                raise RowError(f"the stream has no row {index} that can be used; it is not the one it was")
        found = self._window[index]
        return dict(found) if isinstance(found, dict) else found

    def __iter__(self) -> Iterator[Any]:
        return (row for _, row in self.items())

    def items(self) -> Iterator[tuple[int, Any]]:
        """(number, row) of all that are kept, from the first on."""
        for index, row in enumerate(self._source):
            if (found := self._keep(index, dict(row))) is not None:
                yield index, found

    def next(self, position: int) -> int:
        """The first row at or after this position that is kept; after the last one, the first of the next pass."""
        self._skip_to(position)
        passes = 0
        while passes < 2:
            index = self._next_row()
            if index is None:
                passes += 1
                self._restart()
            elif index in self._window:
                return index
        raise RowError("no row of the stream can be used: all are too long or held out")

    def kept(self, keep: Callable[[int, Row], Any]) -> "Stream":
        """The same stream through one more `keep`."""
        before = self._keep

        def both(index: int, row: Row) -> Any:
            found = before(index, row)
            return None if found is None else keep(index, found)

        return Stream(self._source, keep=both)

    def _restart(self) -> None:
        self._reader, self._read = iter(self._source), 0

    def _skip_to(self, position: int) -> None:
        if position < self._read:
            self._restart()
        for _ in islice(self._reader, position - self._read):
            self._read += 1

    def _next_row(self) -> int | None:
        """The number of the row that was read, None at the end; it is in the window if it is kept."""
        row = next(self._reader, None)
        if row is None:
            return None
        index, self._read = self._read, self._read + 1
        found = self._keep(index, dict(row))
        self._window.pop(index, None)
        if found is not None:
            self._window[index] = found
            if len(self._window) > _WINDOW:
                del self._window[next(iter(self._window))]
        return index


def head(rows: Rows, n: int) -> Rows:
    """The first n rows, or all."""
    if isinstance(rows, Stream):
        return ListRows(islice(rows, n))
    return ChosenRows(rows, range(min(n, len(rows))))


def first_of(rows: Rows, n: int) -> Iterator[tuple[int, Row]]:
    """(number, row) of the first n rows, to look at; of a stream fewer."""
    if isinstance(rows, Stream):
        return islice(rows.items(), min(n, _LOOKED_AT))
    return ((index, rows[index]) for index in range(min(n, len(rows))))


def split_stream(rows: Stream, *, held_out: float, n: int) -> tuple[Stream, Rows]:
    """(the stream without held-out rows, the first n that are held out), by the hash that `split` uses."""
    test = ListRows(islice((row for row in rows if is_held_out(row, held_out)), n))
    if not len(test):
        raise RowError(f"held_out={held_out} of the stream leaves no test row; change the share, or give eval.data")
    return rows.kept(lambda _, row: None if is_held_out(row, held_out) else row), test
