"""From per-position losses to one number: what is divided by what."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolecall.conformance import references
from rolecall.conformance.compare import batches, bits, close, gradients, ignores_rubbish, padded, reals
from rolecall.conformance.interface import MODES

Function = Callable[..., Tensor]
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
X, MASK = reals([2, 4, 9, 9], [3, 9, 9, 9]), bits("1100", "1000")
GOLDEN = {
    "token-mean": 3.0,  # (2 + 4 + 3) / 3
    "token-sum": 9.0,
    "seq-mean-token-mean": 3.0,  # (3 + 3) / 2
    "seq-mean-token-sum": 4.5,  # (6 + 3) / 2
    "seq-mean-token-sum-norm": 0.45,  # the same / 10
}


def _norm(mode: str) -> dict[str, float]:
    return {"norm": 10.0} if mode.endswith("norm") else {}


@EVERY_MODE
def test_aggregate_golden(aggregate: Function, mode: str) -> None:
    """Two answers of two tokens and one, by hand."""
    close(aggregate(X, MASK, mode=mode, **_norm(mode)), GOLDEN[mode])


@EVERY_MODE
def test_aggregate_equals_the_loop(aggregate: Function, mode: str) -> None:
    """Random answers, against a loop in float64; the gradient is the weight of each position and 0 in padding."""
    for batch in batches(holes=True):
        x, mask = batch.real(), batch.mask
        close(aggregate(x, mask, mode=mode, **_norm(mode)), references.aggregate(x, mask, mode=mode, norm=10.0))
        (got,) = gradients(lambda y, m=mask: aggregate(y, m, mode=mode, **_norm(mode)), x)
        ones = [
            [references.aggregate(_one_hot(x, i, t), mask, mode=mode, norm=10.0) for t in range(x.shape[1])]
            for i in range(x.shape[0])
        ]
        close(got, ones)


def _one_hot(x: Tensor, i: int, t: int) -> Tensor:
    out = torch.zeros_like(x)
    out[i, t] = 1
    return out


@EVERY_MODE
def test_aggregate_ignores_padding(aggregate: Function, mode: str) -> None:
    """Columns of padding are in no denominator."""
    for batch in batches(holes=True):
        x, mask = batch.real(), batch.mask
        got = aggregate(padded(x), padded(mask), mode=mode, **_norm(mode))
        close(got, aggregate(x, mask, mode=mode, **_norm(mode)))


@EVERY_MODE
def test_aggregate_pieces_add_up(aggregate: Function, mode: str) -> None:
    """Micro-batches or ranks with different numbers of tokens add up to the whole batch."""
    x, mask = reals([2, 4, 6], [3, 9, 9], [1, 9, 9], [5, 7, 9]), bits("111", "100", "100", "110")
    whole = aggregate(x, mask, mode=mode, **_norm(mode))
    counts = {"tokens": 7} if mode == "token-mean" else {"sequences": 4} if mode.startswith("seq") else {}
    pieces = [aggregate(x[i : i + 2], mask[i : i + 2], mode=mode, **_norm(mode), **counts) for i in (0, 2)]
    close(pieces[0] + pieces[1], whole)


@EVERY_MODE
def test_aggregate_leaves_out_an_empty_row(aggregate: Function, mode: str) -> None:
    """A row without any position that counts (a failed reward, all tool output) is in no mean."""
    x, mask = torch.cat([X, reals([7, 7, 7, 7])]), torch.cat([MASK, bits("0000")])
    close(aggregate(x, mask, mode=mode, **_norm(mode)), GOLDEN[mode])


@EVERY_MODE
def test_aggregate_of_nothing(aggregate: Function, mode: str) -> None:
    """With nothing to count the loss is 0, not NaN, so that one empty micro-batch does not spoil a step."""
    close(aggregate(X, torch.zeros_like(MASK), mode=mode, **_norm(mode)), 0.0)


@EVERY_MODE
def test_aggregate_ignores_rubbish(aggregate: Function, mode: str) -> None:
    """NaN and inf in padding reach neither the loss nor the gradient."""
    ignores_rubbish(lambda x: aggregate(x, MASK, mode=mode, **_norm(mode)), MASK, X)
