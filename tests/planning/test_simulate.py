"""The simulation against steps that can be worked out by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from rolecall.planning.picture import bar, svg
from rolecall.planning.simulate import Fleet, Generation, _in_a_row, generation, simulate

EVEN = Fleet(slots=4, token_seconds=0.1, mean=100.0, spread=0.0, longest=1000, train_seconds=7.0)


def test_equal_answers_take_the_same_time_at_every_size():
    """100 tokens of 0.1 s: 10 s; in turn 10 + 7, ahead the slower of the two. Slots grow answers 10 s of these."""
    for workers in (1, 8, 64):
        turn, one, three = simulate(EVEN, workers, aheads=(0, 1, 3), steps=8)
        assert [turn.seconds, one.seconds, three.seconds] == pytest.approx([17.0, 10.0, 10.0])
        assert (turn.sampling, turn.lost, turn.idle) == pytest.approx((10 / 17, 0.0, 7 / 17))
        assert one.sampling == pytest.approx(1.0)


def test_a_slow_worker_holds_up_every_step():
    fleet = replace(EVEN, slow_share=1.0, slow_factor=1.5)
    assert simulate(fleet, 8, aheads=(0,), steps=4)[0].seconds == pytest.approx(15 + 7)


def test_what_a_failed_worker_grew_is_asked_again_and_everything_is_answered():
    fleet = replace(EVEN, failures_per_day=86400 / 30, silence=2.0, restart=3.0)  # one in 30 s
    found = generation(fleet, 16, random.Random(0))
    assert found.useful == pytest.approx(16 * 4 * 10.0)
    assert found.lost > 0
    assert found.seconds > 10.0
    assert generation(fleet, 16, random.Random(0)) == found


def test_tails_leave_slots_idle_and_more_steps_ahead_never_take_longer():
    fleet = replace(EVEN, spread=1.0)
    found = simulate(fleet, 32, aheads=(0, 1, 2, 4), steps=12)
    assert found[0].idle > 0.4
    seconds = [one.seconds for one in found]
    assert seconds[1] < seconds[0]
    assert all(later <= earlier * 1.1 for earlier, later in pairwise(seconds))


def test_steps_side_by_side_share_the_slots_and_in_flight_nothing_waits():
    """Four slots, four answers: one of 40 s and three of 10 s, 70 / 4 = 17.5 s of all slots; training takes 7."""
    one = Generation(seconds=40.0, useful=70.0, lost=0.0)
    found = [_in_a_row(EVEN, 1, [one] * 40, ahead) for ahead in (0, 1, 2, 3, None)]
    assert [each.seconds for each in found] == pytest.approx([47.0, 40.0, 20.0, 17.5, 17.5], rel=0.05)
    assert [each.mode for each in found] == ["in turn", "1 ahead", "2 ahead", "3 ahead", "in flight"]
    assert found[-1].sampling == pytest.approx(1.0)


def test_the_picture_shows_the_shares():
    assert bar(0.5, 0.1, width=10) == "#####x...."
    assert bar(1.2, 0.3, width=4) == "####"
    drawn = svg(simulate(EVEN, 8, aheads=(0, 1), steps=4))
    assert drawn.count("<rect") == 1 + 3 + 2 * 3
    assert "8 workers, 1 ahead" in drawn
