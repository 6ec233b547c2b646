"""What the optimiser did with each trajectory, on disk: `updates/step-000012.parquet`.

One row per trajectory, epoch and mini-batch; one list entry per token. As in the rollouts file, NaN in memory is null on
disk, except in a contribution to the loss: a NaN there is a fault that a sum must show, so it stays NaN.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rolecall.experience.parquet import (
    CODES,
    FLOATS,
    Format,
    Ragged,
    as_numpy,
    list_of,
    read_table,
    row_by_row,
    table_of,
    write_table,
)

UPDATES = Format(
    name="updates",
    version=1,
    schema=pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("rollout_step", pa.int64(), nullable=False),
            pa.field("trajectory", pa.int64(), nullable=False),
            pa.field("epoch", pa.int64(), nullable=False),
            pa.field("minibatch", pa.int64(), nullable=False),
            pa.field("verdicts", CODES, nullable=False),
            pa.field("weights", FLOATS),
            pa.field("logprobs", FLOATS),
            pa.field("ratio", FLOATS),
        ]
    ),
)
_PLACE = ("step", "rollout_step", "trajectory", "epoch", "minibatch")
"""The columns that say which row it is."""
_POSITIONS = ("weights", "logprobs", "ratio")
"""The columns of numbers per position that may be missing."""
_CONTRIBUTION = "contribution_"
"""What the name of a loss term's column begins with."""
_CONTRIBUTIONS = list_of(pa.float64())


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRow:
    """What one mini-batch did with one trajectory. Tensors are [time], without padding; None means not computed."""

    step: int
    """The training step."""
    rollout_step: int
    """The step whose rollouts file holds the trajectory: an earlier one if it is replayed."""
    trajectory: int
    """Its row in that file, from 0."""
    epoch: int
    """Which pass over the batch, from 0."""
    minibatch: int
    """Which optimiser step of the epoch, from 0."""
    verdicts: Tensor
    """`maths.roles.Verdict` of each position."""
    weights: Tensor | None = None
    """Importance weights; None is 1 everywhere."""
    logprobs: Tensor | None = None
    """log p of each token under the weights this mini-batch started from."""
    ratio: Tensor | None = None
    """How much more likely each token is than it was under the policy it is compared with."""
    contributions: Mapping[str, Tensor] = field(default_factory=dict)
    """Each position's share of each loss term, float64, times the term's coefficient: over a mini-batch all of them add up
    to its loss."""

    def __post_init__(self) -> None:
        for name in _POSITIONS:
            _check_length(self, name, getattr(self, name))
        for name, tensor in self.contributions.items():
            _check_length(self, _CONTRIBUTION + name, tensor)


def update_rows(
    rollout_steps: Sequence[int],
    trajectories: Sequence[int],
    lengths: Sequence[int],
    *,
    step: int,
    epoch: int,
    minibatch: int,
    verdicts: Tensor,
    contributions: Mapping[str, Tensor],
    logprobs: Tensor | None = None,
    ratio: Tensor | None = None,
    weights: Tensor | None = None,
) -> list[UpdateRow]:
    """The rows of one micro-batch from [batch, time] tensors, each cut to its trajectory's length."""
    held = {
        name: part.detach().to("cpu", torch.float32)
        for name, part in (("weights", weights), ("logprobs", logprobs), ("ratio", ratio))
        if part is not None
    }
    codes = verdicts.to("cpu", torch.uint8)
    terms = {name: term.detach().to("cpu", torch.float64) for name, term in contributions.items()}
    return [
        UpdateRow(
            step=step,
            rollout_step=rollout_step,
            trajectory=trajectory,
            epoch=epoch,
            minibatch=minibatch,
            verdicts=codes[row, :length],
            contributions={name: term[row, :length] for name, term in terms.items()},
            **{name: part[row, :length] for name, part in held.items()},
        )
        for row, (rollout_step, trajectory, length) in enumerate(zip(rollout_steps, trajectories, lengths, strict=True))
    ]


def write_updates(path: Path, rows: Sequence[UpdateRow]) -> None:
    """Record what the optimiser's steps did with each trajectory; one column per loss term of any row."""
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _PLACE}
    columns["verdicts"] = _joined([row.verdicts for row in rows], torch.uint8).column(CODES)
    for name in _POSITIONS:
        columns[name] = _joined([getattr(row, name) for row in rows], torch.float32).column(FLOATS)
    schema = UPDATES.schema
    for term in dict.fromkeys(term for row in rows for term in row.contributions):
        shares = _joined([row.contributions.get(term) for row in rows], torch.float64)
        columns[_CONTRIBUTION + term] = shares.column(_CONTRIBUTIONS)
        schema = schema.append(pa.field(_CONTRIBUTION + term, _CONTRIBUTIONS))
    write_table(path, table_of(columns, schema), UPDATES, {})


def read_updates(path: Path) -> list[UpdateRow]:
    """What `write_updates` wrote, row by row. Per-position numbers are float32, contributions float64."""
    table, _ = read_table(path, UPDATES)
    if not len(table):
        return []
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in _PLACE}
    columns |= {name: _tensors(table[name]) for name in ("verdicts", *_POSITIONS)}
    terms = {
        name.removeprefix(_CONTRIBUTION): _tensors(table[name])
        for name in table.column_names
        if name.startswith(_CONTRIBUTION)
    }
    return [
        UpdateRow(contributions={name: share for name, term in terms.items() if (share := term[i]) is not None}, **row)
        for i, row in enumerate(row_by_row(columns))
    ]


def loss_terms(rows: Iterable[UpdateRow]) -> dict[tuple[int, int], dict[str, float]]:
    """Each loss term times its coefficient by (epoch, mini-batch), as the sum of its contributions."""
    shares: dict[tuple[int, int], dict[str, list[Tensor]]] = {}
    for row in rows:
        for term, share in row.contributions.items():
            shares.setdefault((row.epoch, row.minibatch), {}).setdefault(term, []).append(share)
    return {
        place: {term: float(torch.cat(parts).sum(dtype=torch.float64)) for term, parts in terms.items()}
        for place, terms in shares.items()
    }


def _check_length(row: UpdateRow, name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.shape != row.verdicts.shape:
        raise ValueError(
            f"update of trajectory {row.trajectory}: {name} has shape {tuple(tensor.shape)} but verdicts has "
            f"{tuple(row.verdicts.shape)}; index t must mean token t"
        )


def _joined(rows: Sequence[Tensor | None], dtype: torch.dtype) -> Ragged:
    return Ragged.joined([None if row is None else as_numpy(row, dtype) for row in rows])


def _tensors(column: pa.ChunkedArray) -> list[Tensor | None]:
    """A list column, row by row."""
    rows = Ragged.read(column)
    whole = torch.from_numpy(rows.values.copy())
    parts = whole.split(rows.lengths.tolist())
    return [part if present else None for part, present in zip(parts, rows.present.tolist(), strict=True)]
