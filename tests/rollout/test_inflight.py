"""Weights that change while answers grow: which version drew which token, and that it drew it as by itself."""

import json

import pytest
import torch
from safetensors.torch import save_file
from small_models import native, prompt, small_model

from rolecall.policy.load import load, save
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.worker import Sampler, Setup, Unit, pack, unpack
from rolecall.types import Completion, Finish, Request, Sampling

LENGTHS = (3, 9, 14)


def asked(**more):
    return [
        Request(prompt_ids=prompt(4 + i), sampling=Sampling(max_new_tokens=new, stop_ids=()), prompt=i, n=2, **more)
        for i, new in enumerate(LENGTHS)
    ]


def scaled(model, by):
    return {name: p.detach() * by for name, p in model.named_parameters()}


def check_spans(completion, request, versions, engine):
    """Its runs cover it, and each has the log-probs that its version gives to the whole sequence."""
    spans = completion.versions or ((0, len(completion.ids), completion.policy_version),)
    assert [t for start, end, _ in spans for t in range(start, end)] == list(range(len(completion.ids)))
    assert [v for *_, v in spans] == sorted({v for *_, v in spans})
    assert completion.policy_version == spans[0][2]
    first = len(request.prompt_ids) - 1
    for start, end, version in spans:
        engine.load(versions[version], version)
        own = engine.score((*request.prompt_ids, *completion.ids))[first + start : first + end]
        assert own == pytest.approx(completion.behaviour_logprobs[start:end], abs=1e-4)
    return [v for *_, v in spans]


def test_answers_go_on_with_new_weights_as_if_those_had_read_all_of_it():
    model = small_model("llama-biases")
    engine, versions = native(model, max_rows=3), {v: scaled(model, 1 + v / 2) for v in range(3)}
    engine.inflight, flight = True, engine.open()
    requests = asked()
    for request in requests:
        flight.add(request)
    found, steps = [], 0
    while flight:
        if steps in (5, 8):
            engine.load(versions[1 if steps == 5 else 2], 1 if steps == 5 else 2)
        found += [completion for _, completion in flight.step()]
        steps += 1
    drawn = [check_spans(c, requests[c.prompt], versions, engine) for c in found]
    assert [0] in drawn  # it ended before
    assert [0, 1, 2] in drawn
    assert [2] in drawn  # it waited for a place, its prompt read by version 0
    assert all(unpack(json.loads(json.dumps(pack(c)))) == c for c in found)


def test_a_worker_follows_the_newest_weights_that_are_published(tmp_path):
    tiny = load("tiny")
    save(tiny, tmp_path / "model")
    versions, newest = {v: scaled(tiny.model, 1 + v / 4) for v in (1, 2)}, tmp_path / "newest.json"

    def publish(version):
        path = tmp_path / f"{version}.safetensors"
        save_file(versions[version], path)
        named = [[str(path)], version, weights_hash(versions[version], torch.float32)]
        newest.write_text(json.dumps(named))
        return named

    path, version, fingerprint = publish(1)
    how = {"name": "native", "dtype": None, "max_rows": 64}
    sampler = Sampler(Setup(model=str(tmp_path / "model"), how={}, engine=how, threads=1, beat=1.0))
    requests = tuple(asked())
    unit = Unit(requests=requests, weights=path, version=version, hash=fingerprint, newest=str(newest))
    answers = sampler.stream(unit)
    found = [next(answers)]
    publish(2)
    found += list(answers)
    assert len(found) == 2 * len(LENGTHS)
    drawn = [check_spans(c, requests[c.prompt], versions, sampler.engine) for c in found]
    assert [1, 2] in drawn
    newest.write_text(json.dumps([[str(tmp_path / "gone.safetensors")], 3, ""]))  # removed before it was read
    assert {c.policy_version for c in sampler.stream(unit)} == {1}


def test_runs_of_versions_that_do_not_cover_an_answer_are_refused():
    how = {"behaviour_logprobs": (-1.0,) * 4, "finish": Finish.LENGTH, "policy_version": 1, "prompt": 0, "sample": 0}
    for runs in (((0, 2, 1), (3, 4, 2)), ((0, 2, 1), (2, 3, 2)), ((1, 4, 1),), ()):
        with pytest.raises(ValueError, match="the versions' runs do not cover the completion's 4 tokens"):
            Completion(ids=(1, 2, 3, 4), seed=0, versions=runs, **how)
