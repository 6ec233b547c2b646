"""The files of one step of a run, read for comparing."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.experience.parquet import Format, Ragged, StoreError, read_table
from rolecall.experience.rollout_schema import ROLLOUTS, UPDATES
from rolecall.look.run import RunFiles

_log = logging.getLogger("rolecall")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a run kept of a step."""

    rollouts: pa.Table
    updates: pa.Table | None
    weights: str | None
    """The fingerprint of the weights that sampled, if the file holds one of weights."""


def read_record(run: RunFiles, step: int) -> Record | None:
    """The record of a step; None if its rollouts are not there or cannot be read."""
    held = _read(run.rollouts, step, ROLLOUTS)
    if held is None:
        return None
    updates = _read(run.updates, step, UPDATES)
    model = held[1].get("model", "")
    # A multi-agent run writes a word there, not a fingerprint.
    return Record(
        rollouts=held[0], updates=None if updates is None else updates[0], weights=model if len(model) >= 32 else None
    )


def _read(files: Mapping[int, Path], step: int, form: Format) -> tuple[pa.Table, dict[str, str]] | None:
    if step not in files:
        return None
    try:
        return read_table(files[step], form)
    except FileNotFoundError:  # older steps make room while a run goes on
        return None
    except (StoreError, OSError) as error:
        _log.warning("%s; compared without it", error)
        return None


def lists(table: pa.Table, name: str) -> list[NDArray | None]:
    """A list column as an array per row; None where there is none."""
    held = Ragged.read(table[name])
    parts = np.split(held.values, np.cumsum(held.lengths)[:-1])
    return [part if there else None for part, there in zip(parts, held.present, strict=True)]


def first_difference(a: NDArray | None, b: NDArray | None) -> int | None:
    """The first position at which two arrays differ; their shorter length if one goes on; None if they are equal.

    One that is missing differs where the other has its first number.
    """
    if a is None or b is None:
        there = a if b is None else b
        numbers = np.zeros(0, bool) if there is None else there == there
        return int(np.argmax(numbers)) if numbers.any() else None
    n = min(len(a), len(b))
    same = (a[:n] == b[:n]) | ((a[:n] != a[:n]) & (b[:n] != b[:n]))
    if not same.all():
        return int(np.argmin(same))
    return None if len(a) == len(b) else n


def at(values: NDArray | None, position: int) -> str:
    """A value as people read it."""
    if values is None or position >= len(values):
        return "nothing"
    value = values[position].item()
    return "nothing" if value is None or value != value else f"{value:.9g}" if isinstance(value, float) else str(value)
