"""The terms of a loss, and their sum: chunk by chunk, each divided by its count over the whole step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolecall.maths.reduce import position_weights, sequence_lengths
from rolecall.policy.model import Outputs
from rolecall.transfer import to_device, to_host
from rolecall.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of the loss: per-position values, where they count, and how they are added up."""

    values: Tensor
    """[batch, time], lower is better if `coef` is positive."""
    mask: Tensor
    """[batch, time] bool. It may depend on the batch, never on the outputs."""
    mode: str
    """One of `maths.reduce.MODES`."""
    coef: float = 1.0
    """What it is multiplied by in the total."""
    norm: float | None = None
    """The constant length of mode seq-mean-token-sum-norm."""


Loss = Callable[[Outputs, Batch], Mapping[str, Term]]


class _Chunk(NamedTuple):
    """What a chunk of rows gave, by term or output, where it was computed."""

    rows: Tensor
    odd: list[Tensor]
    """Of each term, whether its mask is another than that of its denominator."""
    sums: list[Tensor]
    values: list[Tensor]
    """[rows, time] float64, whose sums these are."""
    outputs: dict[str, Tensor]


class Tally:
    """Adds up terms as chunks of rows come by, and keeps what they were computed from.

    An accelerator is not waited for: what it found is looked at when all chunks are done (`settle`).
    """

    def __init__(
        self,
        batch: Batch,
        terms: Mapping[str, Term],
        denominators: Mapping[str, Tensor],
        *,
        device: torch.device,
        record: bool,
    ) -> None:
        self.denominators = {name: to_device(count, device) for name, count in denominators.items()}
        self.record = record
        self.coefs = {name: term.coef for name, term in terms.items()}
        self._masks = {name: term.mask for name, term in terms.items()}
        self._lengths = {name: sequence_lengths(term.mask, batch.episodes) for name, term in terms.items()}
        self.terms = {name: torch.zeros((), dtype=torch.float64) for name in denominators}
        shape = batch.ids.shape
        self._shape = shape
        self._chunks: list[_Chunk] = []
        self._outputs: dict[str, Tensor] = {}
        self.bad_rows: set[int] = set()
        self.contributions = {n: torch.zeros(shape, dtype=torch.float64) for n in denominators} if record else {}

    def add(self, terms: Mapping[str, Term], outputs: Outputs, rows: Tensor) -> Tensor:
        """The total of some rows, with gradient."""
        if terms.keys() != self.denominators.keys():
            raise ValueError(
                f"the loss gave terms {sorted(terms)} but {sorted(self.denominators)} before: they must not change"
            )
        total: Any = 0.0
        held = {n: x.detach().float() for n, x in zip(Outputs._fields, outputs, strict=True) if x is not None}
        chunk = _Chunk(rows, [], [], [], held)
        for name, term in terms.items():
            lengths, device = self._lengths[name], term.mask.device
            known = to_device(self._masks[name][rows, : term.mask.shape[1]], device)
            weights = position_weights(
                term.mask,
                mode=term.mode,
                denominator=self.denominators[name],
                norm=term.norm,
                lengths=None if lengths is None else to_device(lengths[rows], device),
            )
            values = torch.where(term.mask, term.values, 0)
            total = total + term.coef * (weights.to(values.dtype) * values).sum()
            detached = weights * values.detach().double()
            chunk.odd.append((term.mask != known).any())
            chunk.sums.append(detached.sum())
            chunk.values.append(detached)
        self._chunks.append(chunk)
        return total

    def settle(self) -> None:
        """Take in what the chunks gave."""
        found = to_host([t for c in self._chunks for t in (*c.odd, *c.sums, *c.values, *c.outputs.values())])
        tensors = iter(found)
        for chunk in self._chunks:
            odd, sums, values = ([next(tensors) for _ in self.terms] for _ in range(3))
            for name, is_odd, summed, detached in zip(self.terms, odd, sums, values, strict=True):
                self._take(name, chunk.rows, bool(is_odd), summed, detached)
            for name in chunk.outputs:
                tensor = next(tensors)
                held = self._outputs.setdefault(name, torch.zeros(self._shape, dtype=torch.float32))
                held[chunk.rows, : tensor.shape[1]] = tensor
        self._chunks.clear()

    def _take(self, name: str, rows: Tensor, is_odd: bool, summed: Tensor, detached: Tensor) -> None:
        if is_odd:
            raise ValueError(
                f"the mask of loss term {name!r} changed between its denominator and its sum: it may depend on the "
                "batch, never on the outputs; to weigh positions by the outputs multiply the values instead"
            )
        self.terms[name] = self.terms[name] + summed
        if not math.isfinite(summed):
            self.bad_rows |= set(rows[(~detached.isfinite()).any(dim=1)].tolist())
        if self.record:
            self.contributions[name][rows, : detached.shape[1]] = self.coefs[name] * detached

    def outputs(self) -> Outputs:
        """The outputs of all rows."""
        held = self._outputs
        if not held:  # this rank had nothing to compute
            return Outputs(*[torch.zeros(self._shape) for _ in Outputs._fields])
        return Outputs(held["logprobs"], held["entropy"], held.get("values"), held.get("kl"))
