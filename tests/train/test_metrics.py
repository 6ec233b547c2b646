"""Means, totals and extremes of a step, over ranks."""

import weakref
from math import inf, nan

import torch

from rolecall.train.metrics import Meter


def gathered(*values, mask=None):
    meter = Meter()
    for one in values:
        held = torch.tensor(one)
        where = None if mask is None else torch.tensor(mask)
        meter.mean("mean", held, where)
        meter.largest("high", held, where)
        meter.smallest("low", held, where)
        meter.total("sum", held.nansum())
    return meter


def test_a_mean_counts_every_value_once_and_nothing_outside_the_mask():
    assert gathered([1.0, 2.0], [6.0]).result() == {"mean": 3.0, "sum": 9.0, "high": 6.0, "low": 1.0}
    masked = gathered([1.0, nan, -9.0], [4.0, inf, 7.0], mask=[True, False, False])
    assert masked.result() == {"mean": 2.5, "sum": inf, "high": 4.0, "low": 1.0}
    assert gathered([5.0], mask=[False]).result() == {"sum": 5.0}, "a mean of nothing is left out"
    assert Meter().result() == {}


def test_numbers_are_added_in_double_precision():
    meter = gathered([2.0**26], [1.0], [1.0])
    assert meter.result()["sum"] == 2.0**26 + 2
    meter.total("float", 2.0**26)
    meter.total("float", 1.0)
    assert meter.result()["float"] == 2.0**26 + 1


def test_ranks_are_put_together_by_sums_and_maxima():
    ranks = [gathered([1.0, 2.0]), gathered([6.0])]
    rows = [[], []]
    for meter, seen in zip(ranks, rows, strict=True):
        meter.result(lambda x, seen=seen: seen.append(x) or x, lambda x, seen=seen: seen.append(x) or x)
    sums, maxima = zip(*rows, strict=True)
    found = ranks[0].result(lambda x: sum(sums), lambda x: torch.maximum(*maxima))
    assert found == {"mean": 3.0, "sum": 9.0, "high": 6.0, "low": 1.0}


def test_what_is_gathered_keeps_no_graph_alive():
    class Held:
        pass

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = Held()
            alive.append(weakref.ref(ctx.held))
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    alive = []
    for gather in ("mean", "largest", "smallest"):
        meter = Meter()
        getattr(meter, gather)("x", Watched.apply(torch.ones(3, requires_grad=True)))
        assert alive[-1]() is None, gather
        assert set(map(abs, meter.result().values())) == {2.0}
