"""The bookkeeping of one call, with workers that are played by the test."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.rewards import Sample
from rolecall.rewards.round import Round

BEHAVIOUR = st.sampled_from(["ok", "ok", "ok", "none", "raise", "crash", "hang", "nan"])
VALUES = {"ok": 1.0, "none": None, "nan": float("nan")}
BREAKS = {"raise": "exception", "crash": "crash", "hang": "deadline"}


def closed_round(samples, **how):
    """All samples at once."""
    this = Round(**how)
    this.add(dict(enumerate(samples)))
    this.close()
    return this


def play(this, job, styles, behaviours):
    """What a worker would say of this job, told to the round."""
    if styles[job.function] == "batch":
        for index in job.samples:
            if behaviours[index] in BREAKS:
                return this.broke(job, BREAKS[behaviours[index]], behaviours[index])
        values = [VALUES[behaviours[index]] for index in job.samples]
        metrics = [("size", float(len(values)))]
        return this.heard(job, {"values": values, "extras": {}, "metrics": metrics, "done": True}, name="f")
    for at, index in enumerate(job.samples):
        if behaviours[index] in ("crash", "hang"):
            return this.broke(job, BREAKS[behaviours[index]], behaviours[index])
        said = {"error": "raise"} if behaviours[index] == "raise" else {"value": VALUES[behaviours[index]]}
        this.heard(job, {"at": at, "extras": {}, "metrics": [], **said}, name="f")
    return this.heard(job, {"done": True}, name="f")


@given(
    behaviours=st.lists(BEHAVIOUR, min_size=1, max_size=30),
    styles=st.lists(st.sampled_from(["batch", "sample", "verl"]), min_size=1, max_size=3),
    workers=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_every_sample_gets_its_due_whatever_the_order_of_events(behaviours, styles, workers, seed):
    samples = [Sample(prompt="q", completion=text) for text in behaviours]
    this = closed_round(samples, styles=styles, workers=workers, state={})
    rng, running, calls = Random(seed), [], 0
    while not this.finished:
        while this.queue and len(running) < workers:
            running.append(this.queue.popleft())
        play(this, running.pop(rng.randrange(len(running))), styles, behaviours)
        calls += 1
    assert not this.queue
    assert not running
    good = {i: VALUES[b] for i, b in enumerate(behaviours) if b in ("ok", "none")}
    given_up = behaviours.count("hang") >= 8
    for function in range(len(styles)):
        values, failures = this.values[function], this.failures[function]
        assert values.keys().isdisjoint(failures)
        assert values.keys() | failures.keys() == set(range(len(behaviours)))
        if not given_up:
            assert values == good
    assert calls <= len(styles) * (2 * len(behaviours) + 3)


def test_metrics_are_those_of_the_calls_that_count():
    behaviours = ["ok", "raise", "ok", "ok"]
    samples = [Sample(prompt="q", completion=text) for text in behaviours]
    this = closed_round(samples, styles=["batch"], workers=1, state={})
    while not this.finished:
        play(this, this.queue.popleft(), ["batch"], behaviours)
    assert list(this.metrics.values()) == [[("size", 3.0)]]


@pytest.mark.parametrize(("style", "sizes"), [("batch", [1000]), ("sample", [64] * 15 + [40])])
def test_functions_of_one_answer_are_spread_and_those_of_all_are_not(style, sizes):
    samples = [Sample(prompt="q", completion="a")] * 1000
    this = closed_round(samples, styles=[style], workers=2, state={})
    assert [len(job.samples) for job in this.queue] == sizes


def round_of(style, count, *, workers=1):
    samples = [Sample(prompt="q", completion=str(i), prompt_index=i) for i in range(count)]
    return closed_round(samples, styles=[style], workers=workers, state={})


def test_answers_are_handed_out_in_four_parts_per_worker():
    assert [len(job.samples) for job in round_of("sample", 16).queue] == [4] * 4
    assert [len(job.samples) for job in round_of("sample", 16, workers=2).queue] == [2] * 8
    assert [len(job.samples) for job in round_of("batch", 16).queue] == [16]


def test_a_job_is_named_by_the_answer_it_is_at_or_by_how_many_there_are():
    one_by_one, together, alone = round_of("sample", 8), round_of("batch", 3), round_of("batch", 1)
    assert one_by_one.current(one_by_one.queue[0]) == one_by_one.samples[0].place
    assert together.current(together.queue[0]) == "3 samples"
    assert alone.current(alone.queue[0]) == alone.samples[0].place


def test_a_function_that_only_hangs_is_given_up():
    this, calls = round_of("sample", 40), 0
    while not this.finished:
        this.broke(this.queue.popleft(), "deadline", "too slow")
        calls += 1
    assert calls == 8
    assert len(this.failures[0]) == 40
    assert this.failures[0][39] == "not tried: the first 8 samples all ran into the deadline"


def test_answers_that_are_all_good_alone_are_not_scored_again():
    this = round_of("batch", 3)
    this.broke(this.queue.popleft(), "exception", "together it fails")
    while this.queue:
        job = this.queue.popleft()
        assert job.stage == "alone"
        this.heard(job, {"values": [1.0], "extras": {}, "metrics": [], "done": True}, name="f")
    assert this.finished
    assert this.values[0] == {0: 1.0, 1: 1.0, 2: 1.0}
