"""Rows of unequal length as rectangles that fit into memory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def right_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """([rows, longest] ids with zeros after the shorter rows, [rows] lengths)."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, lengths


def micro_batches(lengths: Tensor, *, token_budget: int, groups: Tensor | None = None) -> list[Tensor]:
    """Row indices cut into micro-batches of at most `token_budget` tokens after padding, rows of like length together.

    Longest first, so that what does not fit fails at once. A row longer than the budget is a micro-batch of its own.
    With `groups`, rows of a group stay beside each other, which is for models that compute what they share once.
    """
    order = lengths.argsort(descending=True, stable=True)
    if groups is not None:
        rank = {group: i for i, group in reversed(list(enumerate(groups[order].tolist())))}
        order = order[torch.tensor([rank[group] for group in groups[order].tolist()]).argsort(stable=True)]
    parts: list[Tensor] = []
    while len(order):
        count = max(1, min(len(order), token_budget // max(1, int(lengths[order[0]]))))
        parts.append(order[:count])
        order = order[count:]
    return parts


def rounded_up(rows: int, dtype: torch.dtype) -> int:
    """The number of rows to which a product is filled up, in the dtype it is computed in.

    oneDNN compiles bf16 products again for every number of rows, which takes a millisecond and half a megabyte, and is
    slower where it is odd. So there are some thirty sizes between a number and its double, and at most a few percent
    are filled up.
    """
    if dtype != torch.bfloat16:
        return rows
    block = max(64, 2 ** (rows.bit_length() - 6))
    return -(-rows // block) * block
