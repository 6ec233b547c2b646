"""Where a step's loss comes from: the sums of its contributions, held against the loss in the metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.experience.parquet import Ragged

PREFIX = "contribution_"
"""What the name of a term's column begins with."""

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """One optimiser step: what each loss term added up to, coefficients included."""

    epoch: int
    minibatch: int
    answers: int
    """Trajectories in it."""
    trained: int
    """Positions that train."""
    terms: Mapping[str, float]
    """Empty if nothing trained."""

    @property
    def total(self) -> float:
        """The loss of this optimiser step."""
        return fsum(self.terms.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCheck:
    """All optimiser steps of a training step, and what the metrics say."""

    step: int
    minibatches: Sequence[MiniBatch]
    logged: float | None
    """`loss` in metrics.jsonl; None if the step is not there."""
    size: float
    """Sum of the absolute contributions per optimiser step: what rounding is measured against."""

    @property
    def mean(self) -> float | None:
        """What the metrics log: the mean over the optimiser steps that trained anything."""
        made = [m.total for m in self.minibatches if m.terms]
        return fsum(made) / len(made) if made else None

    @property
    def difference(self) -> float | None:
        """Between the two; None if either is missing."""
        return None if self.mean is None or self.logged is None else self.mean - self.logged

    @property
    def agrees(self) -> bool:
        """To 1e-6, or 1e-6 of the sum of absolute contributions where that is larger than 1."""
        return self.difference is not None and abs(self.difference) <= TOLERANCE * max(1.0, self.size)


def loss_terms(table: pa.Table) -> list[str]:
    """The terms that an updates file holds contributions of."""
    return [name.removeprefix(PREFIX) for name in table.column_names if name.startswith(PREFIX)]


def row_sums(column: pa.ChunkedArray, *, absolute: bool = False) -> tuple[NDArray, NDArray]:
    """The sum of each row's entries, and whether the row is there at all."""
    rows = Ragged.read(column)
    values = np.abs(rows.values) if absolute else rows.values
    where = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    return np.bincount(where, weights=values, minlength=len(rows.lengths)), rows.present


def check_loss(table: pa.Table, *, step: int, logged: float | None) -> LossCheck:
    """Add up an updates file."""
    places = list(zip(table["epoch"].to_pylist(), table["minibatch"].to_pylist(), strict=True))
    verdicts = Ragged.read(table["verdicts"])
    owner = np.repeat(np.arange(len(verdicts.lengths)), verdicts.lengths)
    trained = np.bincount(owner, weights=verdicts.values == 1, minlength=len(places))
    sums = {term: row_sums(table[PREFIX + term]) for term in loss_terms(table)}
    made = []
    for place in sorted(set(places)):
        rows = [i for i, found in enumerate(places) if found == place]
        terms = {term: fsum(held[rows]) for term, (held, present) in sums.items() if present[rows].any()}
        made.append(
            MiniBatch(
                epoch=place[0],
                minibatch=place[1],
                answers=len(rows),
                trained=int(trained[rows].sum()),
                terms=terms,
            )
        )
    size = sum(float(row_sums(table[PREFIX + term], absolute=True)[0].sum()) for term in sums)
    return LossCheck(step=step, minibatches=made, logged=logged, size=size / max(1, sum(bool(m.terms) for m in made)))
