"""Requests in flight of an engine that answers lists."""

import time

from rolecall.rollout.engine import StreamFlight
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.types import Finish, Request, Sampling


def request(prompt, n=1):
    return Request(prompt_ids=(1,), sampling=Sampling(max_new_tokens=4), seed=0, step=0, prompt=prompt, n=n)


def test_what_is_added_meanwhile_is_the_next_list():
    lists = []
    engine = ScriptedEngine(lambda request, sample: (request.prompt, sample), stop_ids=())

    def stream(requests):
        lists.append([r.prompt for r in requests])
        return engine.stream(requests)

    flight = StreamFlight(stream)
    first = flight.add(request(3, n=2))
    assert len(flight) == 2
    ((ticket, completion),) = flight.step()
    assert ticket is first
    assert completion.ids == (3, 0)
    flight.add(request(4))
    flight.add(request(5))
    drawn = []
    while flight:
        drawn += [(t.request.prompt, c.ids) for t, c in flight.step()]
    assert drawn == [(3, (3, 1)), (4, (4, 0)), (5, (5, 0))]
    assert lists == [[3], [4, 5]]
    assert flight.step() == []


def test_what_is_cancelled_or_late_before_it_begins_is_answered_with_nothing():
    flight = StreamFlight(ScriptedEngine(lambda request, sample: (7,), stop_ids=()).stream)
    flight.cancel(flight.add(request(0)))
    flight.add(request(1), deadline=time.monotonic() - 1)
    flight.add(request(2))
    found = {}
    while flight:
        found |= {t.request.prompt: c for t, c in flight.step()}
    assert {prompt: (c.finish, c.ids) for prompt, c in found.items()} == {
        0: (Finish.ABORT, ()),
        1: (Finish.TIMEOUT, ()),
        2: (Finish.LENGTH, (7,)),
    }
