"""The hf engine's own promises: it asks nothing of the model but `generate`, and takes nothing from its settings."""

import inspect

import pytest
import torch
from small_models import CONTEXT, gaps, hf, prompt, ragged_requests, small_model

from rolecall.rollout.engine import weights_hash
from rolecall.types import Finish, Request, Sampling


@pytest.fixture(scope="module")
def model():
    return small_model("gpt2")


def test_the_models_generation_settings_change_nothing():
    plain, opinionated = small_model("llama"), small_model("llama")
    settings = opinionated.generation_config
    settings.repetition_penalty = 5.0
    settings.suppress_tokens = list(range(100))
    settings.eos_token_id = list(range(100, 256))
    settings.top_k, settings.temperature, settings.do_sample = 3, 0.1, True
    requests = ragged_requests(stop_ids=())
    assert hf(opinionated).generate(requests) == hf(plain).generate(requests)


def test_the_trainers_model_is_left_alone(model):
    before = weights_hash(dict(model.named_parameters()), torch.float32)
    hf(model, dtype=torch.bfloat16).generate(ragged_requests(n=1, max_new_tokens=2))
    assert weights_hash(dict(model.named_parameters()), torch.float32) == before
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id is not None
    assert all(p.requires_grad for p in model.parameters())


def test_what_is_loaded_is_a_copy(model):
    engine = hf(model)
    before = engine.hash()
    with torch.no_grad():
        kept = [p.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.add_(1.0)
        assert engine.hash() == before
        engine.load(dict(model.named_parameters()), 1)
        now = engine.hash()
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.copy_(old)
    assert engine.hash() == now != before


def test_generation_uses_a_cache_though_training_does_not(model):
    assert not model.config.use_cache
    engine = hf(model)
    engine.generate(ragged_requests((7,), n=1, max_new_tokens=1))  # tries how it can sample
    lengths = []
    forward = engine._model.forward

    def counted(*args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    engine._model.forward = counted
    engine.generate(ragged_requests((7,), n=1, stop_ids=(), max_new_tokens=4))
    assert lengths == [7, 1, 1, 1]


def unpadded(forward):
    """A model that looks at its padding."""

    def run(*args, **kwargs):
        return forward(*args, **kwargs | {"attention_mask": None, "position_ids": None})

    return run


def uncached(forward):
    """One that has no cache."""

    def run(*args, **kwargs):
        if kwargs.get("use_cache"):
            raise NotImplementedError
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("change", "context", "shapes"),
    [
        (lambda forward: forward, CONTEXT, [(2, 7), (2, 1)]),
        (lambda forward: forward, 9, [(2, 7), (2, 1)]),  # no room for a longer trial
        (lambda forward: forward, 8, [(1, 3), (1, 1), (1, 7)]),  # answers of unlike lengths
        (unpadded, CONTEXT, [(1, 3), (1, 1), (1, 7), (1, 1)]),
        (uncached, CONTEXT, [(1, 3), (1, 4), (1, 7), (1, 8)]),
    ],
    ids=["padded", "padded-9", "padded-8", "level", "plain"],
)
def test_the_quickest_way_is_taken_in_which_the_model_is_right(model, change, context, shapes):
    engine = hf(model, context_length=context)
    inner, seen = change(engine._model.forward), []

    def forward(*args, **kwargs):
        if kwargs["input_ids"].shape[1] > context:
            raise IndexError("no such position")
        seen.append(tuple(kwargs["input_ids"].shape))
        return inner(*args, **kwargs)

    engine._model.forward = forward
    forward.__signature__ = inspect.signature(model.forward)
    requests = ragged_requests((7, 3), n=1, stop_ids=(), max_new_tokens=2)
    engine.generate(requests)
    seen.clear()
    assert float(gaps(model, requests, engine.generate(requests)).max()) < 1e-4
    assert seen == shapes


def test_no_row_grows_beyond_learned_positions(model):
    """GPT-2 has no embedding for position CONTEXT: a row that is full must not wait for shorter ones."""
    requests = [
        Request(prompt_ids=prompt(length), sampling=Sampling(max_new_tokens=20, stop_ids=()), prompt=i, n=2)
        for i, length in enumerate([4, CONTEXT - 3, CONTEXT - 1, 30])
    ]
    completions = hf(model).generate(requests)
    assert [len(c.ids) for c in completions[::2]] == [20, 3, 1, 20]
    assert {c.finish for c in completions} == {Finish.LENGTH}
    assert float(gaps(model, requests, completions).max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_takes_the_trainers_weights(model, dtype):
    engine = hf(model, dtype=dtype)
    trained = small_model("gpt2", seed=1)
    weights = dict(trained.named_parameters())
    old = engine.generate(ragged_requests(n=1))
    assert engine.hash() == weights_hash(dict(model.named_parameters()), dtype) != weights_hash(weights, dtype)
    engine.load(weights, 7)
    assert engine.hash() == weights_hash(weights, dtype)
    new = engine.generate(ragged_requests(n=1))
    assert {c.policy_version for c in new} == {7}
    assert [c.ids for c in new] != [c.ids for c in old]
    assert new == hf(trained, dtype=dtype, version=7).generate(ragged_requests(n=1))


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(model):
    engine = hf(model)
    before, weights = engine.hash(), dict(small_model("gpt2", seed=1).named_parameters())
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is missing"):
        engine.load({name: w for name, w in weights.items() if name != "transformer.wte.weight"}, 1)
    with pytest.raises(ValueError, match="x is unknown"):
        engine.load(weights | {"x": torch.zeros(1)}, 1)
    assert (engine.hash(), engine.version) == (before, 0)


def test_a_stream_left_half_way_does_no_harm(model):
    engine, requests = hf(model, max_rows=2), ragged_requests(n=2)
    expected = engine.generate(requests)
    stream = engine.stream(requests)
    next(stream)
    stream.close()
    assert engine.generate(requests) == expected


def test_broken_weights_are_named(model):
    engine = hf(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    engine.load(weights | {"transformer.ln_f.weight": weights["transformer.ln_f.weight"] / 0}, 1)
    with pytest.raises(ValueError, match="logits hold NaN or inf"):
        engine.generate(ragged_requests(n=1))
