"""Rows that are one sequence: the samples of an agent's episode whose context was cut, end to end.

Scores, rewards, advantages and counts are of sequences; the model reads rows. What is computed for a sequence does not
depend on where it was cut, because all that was put between its pieces is untrained.

    rows          P C S O P C | P O C S        one agent's episode in two samples
    sequence      P C S O P C   P O C S        the score on its last S, one count, one weight
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from rolecall.types import Batch, Trajectory


class Joined:
    """Which rows belong together, and who is compared with whom: the agents of one name in a group."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        names: dict[tuple[int, str, int], list[int]] = {}
        for row, t in enumerate(trajectories):
            names.setdefault((t.group, t.agent, t.episode), []).append(row)
        self.rows = list(names.values())
        """The rows of each sequence, in order."""
        self._trajectories = trajectories
        self._lengths = [len(t.ids) for t in trajectories]
        compared = list(dict.fromkeys((group, agent) for group, agent, _ in names))
        one_agent = len({group for group, _ in compared}) == len(compared)
        groups = [group if one_agent else compared.index((group, agent)) for group, agent, _ in names]
        self.groups = torch.tensor(groups)
        """[sequences] equal numbers are compared with each other."""
        self.cut = len(self.rows) < len(trajectories)
        """True if some sequence has several rows."""
        self.plain = not self.cut and one_agent
        """True if every row is a sequence of its own, and all sequences of a group are compared."""

    @cached_property
    def index(self) -> Tensor:
        """[batch] the sequence of each row."""
        index = torch.zeros(len(self._trajectories), dtype=torch.long)
        for number, rows in enumerate(self.rows):
            index[rows] = number
        return index

    @cached_property
    def names(self) -> Tensor:
        """[batch] the same, in numbers that stay the same in another batch."""
        return torch.tensor([_number(t) for t in self._trajectories])

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, per_row: Tensor) -> Tensor:
        """[sequences] what the first row of each says."""
        return per_row[[rows[0] for rows in self.rows]] if self.cut else per_row

    def last(self, per_row: Tensor) -> Tensor:
        """[sequences] what the last row of each says."""
        return per_row[[rows[-1] for rows in self.rows]] if self.cut else per_row

    def join(self, per_position: Tensor) -> Tensor:
        """[batch, time] -> [sequences, longer time], 0 after the end."""
        if not self.cut:
            return per_position
        width = max(sum(self._lengths[row] for row in rows) for rows in self.rows)
        out = per_position.new_zeros(len(self), max(width, per_position.shape[1]))
        for number, rows in enumerate(self.rows):
            pieces = torch.cat([per_position[row, : self._lengths[row]] for row in rows])
            out[number, : len(pieces)] = pieces
        return out

    def split(self, per_sequence: Tensor, width: int) -> Tensor:
        """Back: [sequences, longer time] -> [batch, width], 0 after the end; [sequences] -> [batch]."""
        if not self.cut:
            return per_sequence
        if per_sequence.dim() == 1:
            return per_sequence[self.index]
        out = per_sequence.new_zeros(len(self.index), width)
        for number, rows in enumerate(self.rows):
            start = 0
            for row in rows:
                out[row, : self._lengths[row]] = per_sequence[number, start : start + self._lengths[row]]
                start += self._lengths[row]
        return out

    def batch(self, batch: Batch) -> Batch:
        """Sequences in the place of rows, and `groups` of those that are compared. A plain batch comes back as it is."""
        if self.plain:
            return batch
        fields = {n: self.first(x) if x.dim() == 1 else self.join(x) for n, x in batch.tensors()}
        return replace(batch, **{**fields, "groups": self.groups, "episodes": None, "supports": None})  # type: ignore[arg-type]


def _number(t: Trajectory) -> int:
    return int.from_bytes(sha256(f"{t.group}/{t.agent}/{t.episode}".encode()).digest()[:7])
