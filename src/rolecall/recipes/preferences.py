"""Preferences: rows that say which of two answers to a prompt is better, as pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, TypeVar

from rolecall.tasks.kinds import Record, kind_of, record
from rolecall.tasks.rows import Row, RowError, Rows, place_of
from rolecall.tasks.streams import Stream

Side = TypeVar("Side")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(Generic[Side]):
    """Two answers to one prompt, prompt included: as ids for a reward model, as trajectories for a policy."""

    chosen: Side
    """The better one."""
    rejected: Side
    """The worse one."""
    margin: float = 0.0
    """By how much a reward model should score the better one higher before the loss is at its middle, log 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs to learn from or to be measured on, and what was left out."""

    pairs: Any
    """A tuple of `Pair` in the order of the rows; of rows that are streamed, a stream of them."""
    too_long: int = 0
    """Rows with a side longer than the limit."""
    same: int = 0
    """Rows whose sides are the same, as written or as the model reads them."""

    def in_words(self) -> str:
        """One sentence for people."""
        left_out = [f"{n} {why}" for n, why in ((self.too_long, "too long"), (self.same, "the same twice")) if n]
        return f"{len(self.pairs)} pairs" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def read_pairs(
    rows: Rows,
    render: Callable[[Record, Any, int], Side],
    *,
    longest: int,
    limit: int | None = None,
    ids: Callable[[Side], Sequence[int]] = lambda side: side,  # type: ignore[assignment, return-value]
) -> Pairs:
    """The first `limit` rows as pairs; of a stream, as they come.

    `render(record, answer, number)` is one side as the model reads it, at most `longest` tokens, which `ids` gives.
    """
    kind_of(rows, among=("preference",), job="a preference needs")
    too_long = same = 0

    def made(number: int, row: Row) -> Pair[Side] | None:
        nonlocal too_long, same
        if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
            same += 1
            return None
        place = place_of(rows, number)
        found = record(row, "preference", number=place)
        try:
            chosen, rejected = (render(found, answer, number) for answer in (found.chosen, found.rejected))
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise RowError(f"{place} cannot be rendered: {' '.join(str(error).split())}") from error
        if not ids(chosen) or not ids(rejected):
            raise RowError(f"{place}: prompt and answer are empty, and the tokenizer has no end-of-text token")
        if ids(chosen) == ids(rejected):
            same += 1
        elif max(len(ids(chosen)), len(ids(rejected))) > longest:
            too_long += 1
        else:
            return Pair(chosen=chosen, rejected=rejected, margin=_margin(row, place))
        return None

    if isinstance(rows, Stream):
        return Pairs(pairs=rows.kept(made))
    numbered = zip(range(len(rows) if limit is None else limit), rows, strict=False)
    pairs = [pair for number, row in numbered if (pair := made(number, row)) is not None]
    if not pairs:
        raise RowError(
            f"no pair is left of {too_long + same} rows: {too_long} have a side longer than {longest} tokens, in {same} "
            "both sides are the same; raise max_length, or look at the rows"
        )
    return Pairs(pairs=tuple(pairs), too_long=too_long, same=same)


def _margin(row: Row, place: str) -> float:
    margin = row.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
        raise RowError(f"{place}: `margin` must be a finite number, it is {margin!r}")
    return float(margin)
