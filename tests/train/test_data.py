"""The order of rows: every row of a pass once, and the same after a resume wherever it was cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.errors import UserError
from rolecall.tasks.streams import Stream
from rolecall.train.data import order_of

ROWS = [{"prompt": str(i)} for i in range(7)]
counts = st.lists(st.integers(0, 20), max_size=6)


def taken(order, counts):
    return [row for count in counts for row in order.take(count)]


@given(counts, st.integers(0, 3))
def test_every_pass_over_a_table_has_each_row_once_in_an_order_of_its_own(counts, seed):
    order = order_of(ROWS, seed=seed)
    found = taken(order, counts)
    assert (len(found), order.taken) == (sum(counts),) * 2
    passes = [found[i : i + 7] for i in range(0, len(found), 7)]
    assert all(sorted(one) == list(range(7)) for one in passes[:-1])
    assert found == order_of(ROWS, seed=seed).take(sum(counts)), "the same however it is cut"
    if len(passes) > 2:
        assert passes[0] != passes[1]


@given(counts)
def test_every_pass_over_a_stream_is_from_its_first_row_in_its_own_order(counts):
    order = order_of(Stream(ROWS), seed=0)
    assert taken(order, counts) == [i % 7 for i in range(sum(counts))]
    assert order.taken == sum(counts)


@pytest.mark.parametrize("rows", [lambda: ROWS, lambda: Stream(ROWS)])
@given(before=counts, after=counts)
def test_an_order_goes_on_from_its_state(rows, before, after):
    first, second = order_of(rows(), seed=5), order_of(rows(), seed=5)
    taken(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken(second, after) == taken(first, after)
    assert second.state_dict() == first.state_dict()


def test_rows_of_another_kind_are_refused_and_other_rows_are_told(caplog):
    table, stream = order_of(ROWS, seed=5), order_of(Stream(ROWS), seed=0)
    table.take(9)
    stream.take(2)
    with pytest.raises(UserError, match="began with a table of rows, not with a stream"):
        stream.load_state_dict(table.state_dict())
    with pytest.raises(UserError, match="began with a stream, not with a table"):
        table.load_state_dict(stream.state_dict())
    assert not caplog.messages
    order_of(ROWS[:5], seed=5).load_state_dict(table.state_dict())
    order_of(ROWS, seed=6).load_state_dict(table.state_dict())
    order_of(Stream(ROWS[::-1]), seed=0).load_state_dict(stream.state_dict())
    said = [
        "with 7 rows in the order of seed 5; there are 5 in that of seed 5 now, so the run continues from row 4 of a new",
        "with 7 rows in the order of seed 5; there are 7 in that of seed 6 now, so the run continues from row 2 of a new",
        "the stream gives another row 1 than when the checkpoint was written",
    ]
    assert [part in message for part, message in zip(said, caplog.messages, strict=True)] == [True] * 3
    with pytest.raises(ValueError, match="no rows to train on"):
        order_of([], seed=0)
