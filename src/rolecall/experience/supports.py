"""What could be drawn in each token's place, end to end in arrays: for files, checkpoints and batches."""

from collections.abc import Sequence
from itertools import islice

import numpy as np


def flat_supports(rows: Sequence[tuple[bytes, ...] | None], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`supports` of trajectories of these lengths, end to end: all ids, and how many each token has."""
    tokens = [part for row, n in zip(rows, lengths, strict=True) for part in ((b"",) * n if row is None else row)]
    return np.frombuffer(b"".join(tokens), np.int32), np.array([len(part) // 4 for part in tokens], np.int64)


def split_supports(ids: np.ndarray, counts: np.ndarray, lengths: Sequence[int]) -> list[tuple[bytes, ...] | None]:
    """Back; None where nothing of a row was cut."""
    held, ends = ids.astype(np.int32).tobytes(), (4 * counts.cumsum()).tolist()
    tokens = iter([held[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    rows = [tuple(islice(tokens, n)) for n in lengths]
    return [row if any(row) else None for row in rows]
