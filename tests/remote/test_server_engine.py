"""An engine over servers answers as one in this process does, and a run on servers ends in the same weights."""

from pathlib import Path

import pytest
import torch
from served import Options, app_of, requests, serving

import rolecall
from rolecall.jobs.models import sampler
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.types import Finish

REWARD = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"
SHORT = {
    "model": "tiny",
    "rows": "addition",
    "reward": REWARD,
    "steps": 3,
    "prompts": 4,
    "samples": 4,
    "sampling": {"max_new_tokens": 12},
    "optim": {"lr": 1e-3},
    "save": {"every": 1},
    "quiet": True,
}


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


@pytest.fixture(scope="module")
def urls():
    with serving(app_of()) as one, serving(app_of()) as two:
        yield one, two


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "stop_ids": ()},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.9, "logprobs": "full", "stop_strings": ("a", "é")},
    ],
)
def test_answers_are_those_of_an_engine_in_this_process_bit_for_bit(tiny, urls, sampling):
    asked = requests(**sampling)
    expected = open_engine(tiny, name="native").generate(asked)
    for servers in (urls[:1], urls):
        engine = sampler(tiny, Options(*servers))
        assert engine.generate(asked) == expected
        engine.close()


def test_new_weights_reach_every_server_by_directory_and_by_upload(tiny, urls, tmp_path):
    engine = sampler(tiny, Options(*urls, weights_directory=str(tmp_path)))
    other = open_engine(tiny, name="native")
    with torch.no_grad():
        changed = load("tiny")
        for parameter in changed.model.parameters():
            parameter.mul_(1.1)
    engine.close()
    engine = sampler(changed, Options(*urls))
    engine._shared = False
    weights = dict(changed.model.named_parameters())
    for version in (1, 7):
        engine.load(weights, version)
        other.load(weights, version)
        assert engine.hash() == other.hash()
        assert engine.generate(requests()) == other.generate(requests())
    engine.close()


def test_a_run_on_servers_ends_in_the_weights_of_a_run_without(urls, tmp_path):
    runs = {
        name: rolecall.rl(out=str(tmp_path / name), engine={"servers": list(servers)}, **SHORT)
        for name, servers in (("here", ()), ("one", urls[:1]), ("two", urls))
    }
    weights = {name: (run.model / "model.safetensors").read_bytes() for name, run in runs.items()}
    assert weights["here"] == weights["one"] == weights["two"]
    start = load("tiny").model.state_dict()
    assert any(not torch.equal(p, start[n]) for n, p in load(str(runs["one"].model)).model.state_dict().items())
    assert all(line["sampling/probe_difference"] < 1e-5 for line in runs["two"].metrics)
    rollouts = {name: sorted(p.name for p in (run.path / "rollouts").iterdir()) for name, run in runs.items()}
    assert rollouts["here"] == rollouts["two"]


def test_requests_are_cancelled_and_end_at_their_deadline(tiny, urls):
    engine = sampler(tiny, Options(urls[0], max_new_tokens=200))
    flight = engine.open()
    (long,) = requests(1, max_new_tokens=2000, stop_ids=())
    ticket = flight.add(long)
    flight.step()
    flight.cancel(ticket)
    ended = []
    while flight:
        ended += flight.step()
    assert [c.finish for _, c in ended] == [Finish.ABORT] * 3
    assert [c.sample for _, c in ended] == [2, 3, 4]
    assert engine.generate(requests(1)) == open_engine(tiny, name="native").generate(requests(1))
    engine.close()
