"""What the optimiser did with each trajectory, on disk: `updates/step-000012.parquet`.

One row per trajectory, epoch and mini-batch; one list entry per token. As in the rollouts file, NaN in memory is null on
disk, except in a contribution to the loss: a NaN there is a fault that a sum must show, so it stays NaN.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rolecall.experience.batches import as_numpy
from rolecall.experience.parquet import (
    CODES,
    FLOATS,
    Ragged,
    list_of,
    read_table,
    row_by_row,
    table_of,
    write_table,
)
from rolecall.experience.rollout_schema import UPDATES as UPDATES

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
        what = f"update of trajectory {self.trajectory}"
        for name in _POSITIONS:
            _check_shape(what, name, getattr(self, name), self.verdicts)
        for name, tensor in self.contributions.items():
            _check_shape(what, _CONTRIBUTION + name, tensor, self.verdicts)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """What one mini-batch did with its trajectories: `UpdateRow`s as [batch, time] tensors, padded at the end."""

    step: int
    epoch: int
    minibatch: int
    rollout_steps: Sequence[int]
    trajectories: Sequence[int]
    lengths: Sequence[int]
    """[batch] tokens of each trajectory."""
    verdicts: Tensor
    weights: Tensor | None = None
    logprobs: Tensor | None = None
    ratio: Tensor | None = None
    contributions: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.rollout_steps) == len(self.trajectories) == len(self.lengths) == len(self.verdicts):
            raise ValueError("rollout_steps, trajectories, lengths and verdicts must have one entry per trajectory")
        for name in _POSITIONS:
            _check_shape("a mini-batch", name, getattr(self, name), self.verdicts)
        for name, tensor in self.contributions.items():
            _check_shape("a mini-batch", _CONTRIBUTION + name, tensor, self.verdicts)


def write_updates(path: Path, minibatches: Sequence[MiniBatch]) -> None:
    """Record what the optimiser's steps did with each trajectory; one column per loss term of any mini-batch."""
    lengths = [np.array(m.lengths, dtype=np.int64) for m in minibatches]

    def column(tensors: Iterable[Tensor | None], dtype: torch.dtype, kind: pa.DataType) -> pa.Array:
        held = (None if t is None else as_numpy(t, dtype) for t in tensors)
        return Ragged.stacked([Ragged.cut(t, n) for t, n in zip(held, lengths, strict=True)]).column(kind)

    columns: dict[str, Any] = {
        "rollout_step": [step for m in minibatches for step in m.rollout_steps],
        "trajectory": [trajectory for m in minibatches for trajectory in m.trajectories],
    }
    for name in ("step", "epoch", "minibatch"):
        columns[name] = [getattr(m, name) for m in minibatches for _ in m.lengths]
    columns["verdicts"] = column((m.verdicts for m in minibatches), torch.uint8, CODES)
    for name in _POSITIONS:
        columns[name] = column((getattr(m, name) for m in minibatches), torch.float32, FLOATS)
    schema = UPDATES.schema
    for term in dict.fromkeys(term for m in minibatches for term in m.contributions):
        shares = column((m.contributions.get(term) for m in minibatches), torch.float64, _CONTRIBUTIONS)
        columns[_CONTRIBUTION + term] = shares
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


def _check_shape(what: str, name: str, tensor: Tensor | None, verdicts: Tensor) -> None:
    if tensor is not None and tensor.shape != verdicts.shape:
        raise ValueError(
            f"{what}: {name} has shape {tuple(tensor.shape)} but verdicts has {tuple(verdicts.shape)}; "
            "index t must mean token t"
        )


def _tensors(column: pa.ChunkedArray) -> list[Tensor | None]:
    """A list column, row by row."""
    rows = Ragged.read(column)
    whole = torch.from_numpy(rows.values.copy())
    parts = whole.split(rows.lengths.tolist())
    return [part if present else None for part, present in zip(parts, rows.present.tolist(), strict=True)]
