"""From trajectories to a rectangle, and what cuts it into micro-batches that fit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolecall.maths.roles import Role, Verdict
from rolecall.policy.packing import micro_batches as micro_batches
from rolecall.types import Batch, Supports, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories as one right-padded batch. Log-probs are NaN wherever the policy did not sample."""
    if not trajectories:
        raise ValueError("cannot make a batch of no trajectories")
    lengths = np.array([len(t.ids) for t in trajectories])
    inside = np.arange(lengths.max()) < lengths[:, None]

    def rectangle(rows: Iterable[Sequence[float]], dtype: type, fill: float) -> Tensor:
        held: np.ndarray = np.full(inside.shape, fill, dtype)
        held[inside] = np.fromiter(chain.from_iterable(rows), dtype, count=int(lengths.sum()))
        return torch.from_numpy(held)

    sampled = [t.behaviour_logprobs for t in trajectories]
    unknown = ((torch.nan,) * n if row is None else row for row, n in zip(sampled, lengths.tolist(), strict=True))
    return Batch(
        ids=rectangle((t.ids for t in trajectories), np.int64, 0),
        roles=rectangle((t.roles for t in trajectories), np.uint8, int(Role.PAD)),
        groups=torch.tensor([t.group for t in trajectories]),
        behaviour_logprobs=rectangle(unknown, np.float32, np.nan) if any(row is not None for row in sampled) else None,
        policy_versions=torch.tensor([t.policy_version for t in trajectories]),
        supports=_supports(trajectories, rectangle),
    )


def _supports(trajectories: Sequence[Trajectory], rectangle: Callable[..., Tensor]) -> Supports | None:
    if all(t.supports is None for t in trajectories):
        return None
    ids, counts = flat_supports([t.supports for t in trajectories], [len(t.ids) for t in trajectories])
    return Supports(
        ids=torch.from_numpy(ids.copy()),
        starts=rectangle([counts.cumsum() - counts], np.int64, 0),
        counts=rectangle([counts], np.int64, 0),
    )


def lengths_of(batch: Batch) -> Tensor:
    """Tokens per row, padding left out (by role)."""
    return (batch.roles != Role.PAD).sum(dim=1)


def runs_in(batch: Batch, runs: Sequence[Sequence[int]]) -> Tensor:
    """[batch, time] True at every token of every place where one of the runs of ids stands within the policy's words."""
    chosen = (batch.roles == Role.CONTENT) | (batch.roles == Role.STOP)
    ids = torch.where(chosen, batch.ids, -1)
    found = torch.zeros_like(chosen)
    for run in runs:
        if not 0 < len(run) <= ids.shape[1]:
            continue
        places = (ids.unfold(1, len(run), 1) == torch.tensor(run)).all(dim=2)
        for offset in range(len(run)):
            found[:, offset : offset + places.shape[1]] |= places
    return found


_FILL: dict[str, float] = {
    "ids": 0,
    "roles": int(Role.PAD),
    "verdicts": int(Verdict.PADDING),
    "rewards": 0,
    "advantages": 0,
    "weights": 1,
    "replayed": False,
    "guided": False,
}
"""What stands where a batch has nothing: after a row's end, or in a field that only the other batch has. Else NaN."""


def join(fresh: Batch, replayed: Batch) -> Batch:
    """Both batches as one, fresh rows first. Old log-probs are there only if the fresh ones have them."""
    if fresh.old_logprobs is None:
        replayed = replace(replayed, old_logprobs=None)
    time = max(fresh.ids.shape[1], replayed.ids.shape[1])
    first, second = dict(fresh.tensors()), dict(replayed.tensors())
    names = [*first, *(name for name in second if name not in first)]
    return Batch(
        supports=_both_supports(fresh, replayed, time),
        **{
            name: torch.cat(
                [
                    _filled(name, first.get(name), len(fresh), time, like=second.get(name)),
                    _filled(name, second.get(name), len(replayed), time, like=first.get(name)),
                ]
            )
            for name in names
        },
    )


def _both_supports(fresh: Batch, replayed: Batch, time: int) -> Supports | None:
    """What could be drawn at the positions of both, the ids of one after those of the other."""
    if fresh.supports is None and replayed.supports is None:
        return None
    none = torch.zeros(0, dtype=torch.int32)
    first, second = (
        b.supports or Supports(ids=none, starts=torch.zeros_like(b.ids), counts=torch.zeros_like(b.ids))
        for b in (fresh, replayed)
    )

    def both(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.pad(part, (0, time - part.shape[1])) for part in (x, y)])

    return Supports(
        ids=torch.cat([first.ids, second.ids]),
        starts=both(first.starts, second.starts + len(first.ids)),
        counts=both(first.counts, second.counts),
    )


def _filled(name: str, tensor: Tensor | None, rows: int, time: int, *, like: Tensor | None) -> Tensor:
    """A field of `rows` rows, as wide as `time`; where there is nothing, what `_FILL` says."""
    fill = _FILL.get(name, torch.nan)
    if tensor is None:
        assert like is not None
        if like.dim() == 1 and name not in _FILL and not like.is_floating_point():
            return -1 - torch.arange(rows)  # names of episodes: each row is one of its own
        return torch.full((rows, time)[: like.dim()], fill, dtype=like.dtype)
    if tensor.dim() == 1:
        return tensor
    return torch.nn.functional.pad(tensor, (0, time - tensor.shape[1]), value=fill)


def as_numpy(tensor: Tensor, dtype: torch.dtype) -> NDArray:
    """A tensor's values, wherever it lives."""
    return tensor.detach().to("cpu", dtype).numpy()


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
