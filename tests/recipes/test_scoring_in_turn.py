"""Steps that are sampled at once share a reward: each scores as its episodes end, from when those before it have scored."""

import threading
from contextlib import contextmanager

import torch

from rolecall.recipes.ahead import InOrder
from rolecall.rewards import Sample, Scored
from rolecall.rollout.pinned import Published
from rolecall.rollout.scripted import ScriptedEngine


class AtOnce:
    """Notes down what it is given when it is given it."""

    names = ("at_once",)

    def __init__(self):
        self.seen = []

    @contextmanager
    def scoring(self, state):
        self.given = []
        yield self

    def add(self, samples):
        self.given += samples
        self.seen += [sample.completion for sample in samples.values()]

    def poll(self):
        pass

    def finish(self):
        return [Scored(scores={"at_once": float(i)}, total=float(i)) for i in self.given]

    def take_metrics(self):
        return {}


def test_a_step_scores_as_its_episodes_end_once_those_before_it_have_their_scores():
    engine = ScriptedEngine(lambda request, sample: [], stop_ids=(0,))
    reward, waits, goes = AtOnce(), threading.Event(), threading.Event()
    shared, totals = InOrder(reward, Published([engine], {"w": torch.zeros(1)}, dtype=torch.float32)), []

    def second():
        with shared.step(1), shared.scoring({}) as scoring:
            scoring.add({3: Sample(prompt="", completion="b")})
            scoring.poll()
            waits.set()
            goes.wait(60)
            scoring.poll()
            scoring.add({4: Sample(prompt="", completion="c")})
            totals.extend(one.total for one in scoring.finish())

    thread = threading.Thread(target=second)
    with shared.step(0), shared.scoring({}) as scoring:
        scoring.add({0: Sample(prompt="", completion="a")})
        scoring.poll()
        assert reward.seen == ["a"], "its turn: nothing is waited for"
        thread.start()
        assert waits.wait(60)
        assert reward.seen == ["a"], "the one after it keeps what it has"
        assert [one.total for one in scoring.finish()] == [0.0]
    goes.set()
    thread.join(60)
    assert (reward.seen, totals) == (["a", "b", "c"], [3.0, 4.0])
    assert shared.next == 2
