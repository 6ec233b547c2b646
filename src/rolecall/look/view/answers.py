"""Recorded answers: search over their text, filters, and the way from one to the next."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rolecall.errors import UserError
from rolecall.experience.parquet import Ragged, StoreError, read_table
from rolecall.experience.rollout_schema import ROLLOUTS, UPDATES
from rolecall.look.records import cut_off
from rolecall.look.run import RunFiles
from rolecall.look.tokens import words
from rolecall.maths.codes import Verdict

MOST = 100
"""Answers on a page of results."""
_SECONDS = 1.0
"""That a search may take before it shows what it has; the page offers to go on."""
_COLUMNS = ("group", "episode", "agent", "author", "prompt_text", "answer_text", "score", "finish", "sample")
VERDICTS = {words(verdict.name): verdict for verdict in Verdict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Which answers are wanted. What is None, empty or False does not matter."""

    text: str = ""
    """Stands in the prompt or the answer, in letters of any case."""
    below: float | None = None
    """The score is below it."""
    above: float | None = None
    truncated: bool = False
    """A limit ended it."""
    flat: bool = False
    """All answers of its group have the same score."""
    verdict: str = ""
    """At least one position has this verdict, by its name."""
    ratio: float | None = None
    """A trained position's ratio is above it, as far as updates are kept."""
    author: str = ""
    step: int | None = None
    """Only this step."""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "Query":
        """From an address. What cannot be understood is a `UserError`."""
        verdict = given.get("verdict", "")
        if verdict and verdict not in VERDICTS:
            raise UserError(f"there is no verdict {verdict!r}; choose one of {', '.join(VERDICTS)}")
        step = _number(given, "step")
        return cls(
            text=given.get("text", ""),
            below=_number(given, "below"),
            above=_number(given, "above"),
            truncated=bool(given.get("truncated")),
            flat=bool(given.get("flat")),
            verdict=verdict,
            ratio=_number(given, "ratio"),
            author=given.get("author", ""),
            step=None if step is None else int(step),
        )

    def params(self) -> dict[str, object]:
        """As an address has it."""
        held = {name: getattr(self, name) for name in self.__slots__}
        return {name: 1 if value is True else value for name, value in held.items() if value not in (None, "", False)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What a search has found so far."""

    answers: Sequence[Mapping[str, Any]]
    """Their light columns, and step and row."""
    searched: int
    """Steps."""
    more: int | None
    """Steps before this one are still to be searched; None if all were."""
    notes: Sequence[str] = ()
    """Files that could not be read."""


def search(files: RunFiles, query: Query, *, before: int | None = None) -> Results:
    """The answers that are wanted, those of the last step first."""
    steps = _order(files, query, before)
    found: list[Mapping[str, Any]] = []
    notes: list[str] = []
    begun, searched = time.monotonic(), 0
    for step in steps:
        if searched and (len(found) >= MOST or time.monotonic() > begun + _SECONDS):
            return Results(answers=found, searched=searched, more=steps[searched - 1], notes=notes)
        searched += 1
        try:
            table, rows = _matching(files, step, query)
            held = zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True)
            found += [{**one, "step": step, "row": row} for row, one in held]
        except FileNotFoundError:  # older steps make room while a run goes on
            continue
        except (StoreError, OSError) as error:
            notes.append(str(error))
    return Results(answers=found, searched=searched, more=None, notes=notes)


Place = tuple[int, int]
"""Step and row of an answer."""


def beside(files: RunFiles, step: int, row: int, query: Query) -> tuple[Place | None, Place | None]:
    """The answers before and after one among those that are wanted; None at the ends, or if none was found in time."""
    steps = _order(files, replace(query, step=None) if query.step != step else query, None)
    at = steps.index(step) if step in steps else 0
    end = time.monotonic() + _SECONDS / 2

    def places(there: Sequence[int], *, back: bool) -> Iterator[Place]:
        for other in there:
            if other != step and time.monotonic() > end:
                return
            try:
                held = _rows(files, other, query)
            except (StoreError, OSError):
                continue
            inside = [r for r in held if other != step or (r < row if back else r > row)]
            yield from ((other, r) for r in (reversed(inside) if back else inside))

    return next(places(steps[at::-1], back=True), None), next(places(steps[at:], back=False), None)


def _order(files: RunFiles, query: Query, before: int | None) -> list[int]:
    held = [step for step in files.rollouts if query.step in (None, step) and (before is None or step < before)]
    return sorted(held, reverse=True)


def _rows(files: RunFiles, step: int, query: Query) -> list[int]:
    if not query.params().keys() - {"step"}:
        with pq.ParquetFile(files.rollouts[step]) as file:
            return list(range(file.metadata.num_rows))
    return [int(row) for row in _matching(files, step, query)[1]]


def _matching(files: RunFiles, step: int, query: Query) -> tuple[pa.Table, NDArray]:
    """(the step's light columns, the rows that are wanted)."""
    columns = [*_COLUMNS, *(["verdicts"] if query.verdict else [])]
    table = read_table(files.rollouts[step], ROLLOUTS, columns=columns)[0]
    keep = np.ones(len(table), bool)
    score = np.array([np.nan if s is None else s for s in table["score"].to_pylist()], np.float64)
    if query.text:
        keep &= _holds(table["prompt_text"], query.text) | _holds(table["answer_text"], query.text)
    if query.below is not None:
        keep &= score < query.below
    if query.above is not None:
        keep &= score > query.above
    if query.truncated:
        keep &= np.array([cut_off(finish) for finish in table["finish"].to_pylist()], bool)
    if query.author:
        keep &= np.array([author == query.author for author in table["author"].to_pylist()], bool)
    if query.flat:
        keep &= _flat(np.array(table["group"].to_pylist()), score)
    if query.verdict:
        codes = Ragged.read(table["verdicts"])
        keep &= codes.sums(codes.values == VERDICTS[query.verdict]) > 0
    if query.ratio is not None:
        keep &= _ratio_above(files.updates.get(step), step, query.ratio, len(table))
    return table, np.flatnonzero(keep)


def _holds(column: pa.ChunkedArray, text: str) -> NDArray:
    return np.asarray(pc.match_substring(column, text, ignore_case=True).to_numpy(zero_copy_only=False), bool)


def _flat(groups: NDArray, score: NDArray) -> NDArray:
    """Where all scores of a group of several are the same."""
    out = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        inside = groups == group
        held = score[inside]
        out[inside] = len(held) > 1 and bool((held == held[0]).all())
    return out


def _ratio_above(updates: Path | None, step: int, limit: float, rows: int) -> NDArray:
    out = np.zeros(rows, bool)
    if updates is None:
        return out
    table = read_table(updates, UPDATES, columns=["rollout_step", "trajectory", "verdicts", "ratio"])[0]
    ratio, verdicts = Ragged.read(table["ratio"]), Ragged.read(table["verdicts"])
    if len(ratio.values) != len(verdicts.values):  # some rows have no ratios
        return out
    above = ratio.sums((verdicts.values == Verdict.TRAINED) & (ratio.values > limit)) > 0
    own = np.array(table["rollout_step"].to_pylist()) == step
    trajectory = np.array(table["trajectory"].to_pylist(), np.int64)
    hit = trajectory[own & above]
    out[hit[hit < rows]] = True
    return out


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{name} must be a number, got {text!r}") from None
    if not np.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {text!r}")
    return value
