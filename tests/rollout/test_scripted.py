"""The scripted engine replays what it is given, under the rules of the others."""

import pytest
import torch

from rolecall.rollout.engine import Engine, weights_hash
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.types import Finish, Request, Sampling


def script(request, sample):
    return (10 * request.prompt + sample, 5, 6, 2)


def request(prompt=0, n=1, **sampling):
    return Request(prompt_ids=(1,), sampling=Sampling(**sampling), prompt=prompt, n=n, seed=9)


def test_answers_come_in_order_with_their_numbers():
    engine: Engine = ScriptedEngine(script, stop_ids=(2,), version=4)
    completions = engine.generate([request(1, 2), request(0)])
    assert [c.ids[0] for c in completions] == [10, 11, 0]
    assert [(c.prompt, c.sample, c.seed, c.policy_version) for c in completions] == [
        (1, 0, 9, 4),
        (1, 1, 9, 4),
        (0, 0, 9, 4),
    ]
    assert all(c.finish is Finish.STOP and c.behaviour_logprobs == (-1.0,) * 4 for c in completions)


@pytest.mark.parametrize(
    ("sampling", "ids", "finish"),
    [
        ({"max_new_tokens": 3}, (0, 5, 6), Finish.LENGTH),
        ({"max_new_tokens": 4}, (0, 5, 6, 2), Finish.STOP),
        ({"stop_ids": ()}, (0, 5, 6, 2), Finish.LENGTH),
        ({"max_new_tokens": 3, "stop_ids": (6,)}, (0, 5, 6), Finish.STOP),
    ],
)
def test_an_answer_ends_by_its_last_token(sampling, ids, finish):
    (completion,) = ScriptedEngine(script, stop_ids=(2,)).generate([request(**sampling)])
    assert (completion.ids, completion.finish) == (ids, finish)


def test_logprobs_may_be_scripted_and_must_fit():
    engine = ScriptedEngine(script, stop_ids=(2,), logprobs=lambda request, ids: [-0.5 * i for i in ids])
    assert engine.generate([request()])[0].behaviour_logprobs == (0.0, -2.5, -3.0, -1.0)
    with pytest.raises(ValueError, match="behaviour_logprobs"):
        ScriptedEngine(script, stop_ids=(2,), logprobs=lambda request, ids: [0.0]).generate([request()])


def test_load_notes_version_and_hash():
    engine = ScriptedEngine(script, stop_ids=(2,))
    weights = {"w": torch.arange(3.0)}
    assert engine.hash() != weights_hash(weights, torch.float32)
    engine.load(weights, 3)
    assert (engine.version, engine.hash()) == (3, weights_hash(weights, torch.float32))
    assert engine.generate([request()])[0].policy_version == 3


def test_the_same_number_twice_is_refused():
    with pytest.raises(ValueError, match="prompt 0 is requested twice"):
        ScriptedEngine(script, stop_ids=(2,)).generate([request(), request()])
