"""Where a step's loss comes from: the sums of its contributions, compared with the loss in the metrics, as numbers and as HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.experience.parquet import Ragged
from rolecall.look.page import table
from rolecall.maths.codes import Verdict

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


def loss_terms(updates: pa.Table) -> list[str]:
    """The terms that an updates file holds contributions of."""
    return [name.removeprefix(PREFIX) for name in updates.column_names if name.startswith(PREFIX)]


def row_sums(column: pa.ChunkedArray, *, absolute: bool = False) -> tuple[NDArray, NDArray]:
    """The sum of each row's entries, and whether the row is there at all."""
    rows = Ragged.read(column)
    return rows.sums(np.abs(rows.values) if absolute else rows.values), rows.present


def check_loss(updates: pa.Table, *, step: int, logged: float | None) -> LossCheck:
    """Add up an updates file."""
    places = list(zip(updates["epoch"].to_pylist(), updates["minibatch"].to_pylist(), strict=True))
    verdicts = Ragged.read(updates["verdicts"])
    trained = verdicts.sums(verdicts.values == Verdict.TRAINED)
    sums = {term: row_sums(updates[PREFIX + term]) for term in loss_terms(updates)}
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
    size = sum(float(row_sums(updates[PREFIX + term], absolute=True)[0].sum()) for term in sums)
    return LossCheck(step=step, minibatches=made, logged=logged, size=size / max(1, sum(bool(m.terms) for m in made)))


def loss_note(check: LossCheck, about: Mapping[str, Any]) -> str:
    """The sums of contributions, an optimiser step a line, and the comparison with the metrics."""
    terms = list(dict.fromkeys(term for made in check.minibatches for term in made.terms))
    many = len(terms) > 1
    head = ["optimiser step", "answers", "trained tokens", *([*terms] if many else []), "sum of contributions"]
    rows = [
        (
            f"epoch {m.epoch + 1}, mini-batch {m.minibatch + 1}",
            m.answers,
            m.trained,
            *([_exact(m.terms.get(term)) for term in terms] if many else []),
            _exact(m.total) if m.terms else "nothing trained",
        )
        for m in check.minibatches
    ]
    shown = table(head, rows, numbers=1, caption="Contributions of all answers of the step, coefficients included")
    made = [m for m in check.minibatches if m.terms]
    if len(made) > 6:
        shown = f"<details><summary>{len(made)} optimiser steps</summary>{shown}</details>"
    return f"<h3>Where the loss of step {check.step} comes from</h3>{shown}{_verdict(check, len(made), about)}"


def _verdict(check: LossCheck, made: int, about: Mapping[str, Any]) -> str:
    if check.mean is None:
        return '<p class="note">Nothing trained in this step, so there is no loss.</p>'
    how = (
        "The contributions add up to"
        if made == 1
        else f"The mean of the {made} sums, which is what the metrics log, is"
    )
    sum_ = f'<b class="contribution-sum">{_exact(check.mean)}</b>'
    if check.difference is None:
        return f"<p>{how} {sum_}. The metrics have no loss for this step to compare with.</p>"
    logged = f'<code>loss</code> in metrics.jsonl is <b class="logged-loss">{_exact(check.logged)}</b>'
    if isnan(check.mean) and isnan(float(check.logged or 0)):
        return f'<p class="off">{how} {sum_}; {logged}: the loss of this step was not finite.</p>'
    gap = f'difference <b class="loss-difference">{_gap(check.difference)}</b>'
    if check.agrees:
        size = f"Their absolute values add up to {check.size:.4g}."
        return f'<p class="ok">{how} {sum_}; {logged}; {gap}. They agree. {size}</p>'
    why = (
        "The files hold one process's share of several."
        if about.get("processes", 1) != 1
        else "They do not agree: something is wrong with the record."
    )
    return f'<p class="off">{how} {sum_}; {logged}; {gap}. {why}</p>'


def _gap(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _exact(value: float | None) -> str:
    return "–" if value is None else f"{value:+.9g}" if value else "0"
