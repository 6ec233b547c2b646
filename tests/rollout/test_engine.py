"""What all engines share: fingerprints of weights, checks of requests and weights, warnings, the choice of an engine."""

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from small_models import ENGINES, native, prompt, small_model

from rolecall.policy.load import load
from rolecall.rollout.engine import check_requests, check_weights, in_order, warn_if_support_is_cut, weights_hash
from rolecall.rollout.hf import HFEngine
from rolecall.rollout.llama import unsupported
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.open import open_engine
from rolecall.types import Completion, Finish, Request, Sampling

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def some_weights():
    generator = torch.Generator().manual_seed(0)
    return {"b": torch.randn(7, 300, generator=generator), "a": torch.randn(5, generator=generator)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_sees_every_element(dtype):
    weights = some_weights()
    base = weights_hash(weights, dtype)
    assert weights_hash(dict(reversed(weights.items())), dtype) == base
    for name, index in [("a", 0), ("a", 4), ("b", 0), ("b", 1023), ("b", 1024), ("b", 2099)]:
        other = {key: tensor.clone() for key, tensor in weights.items()}
        other[name].view(-1)[index] *= 1.01
        assert weights_hash(other, dtype) != base, (name, index)


def test_hash_is_of_the_weights_as_they_are_in_the_dtype():
    weights = some_weights()
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    assert weights_hash(weights, torch.bfloat16) == weights_hash(rounded, torch.bfloat16)
    assert weights_hash(weights, torch.float32) != weights_hash(rounded, torch.float32)


def test_hash_sees_names_and_shapes():
    tensor = torch.arange(6.0)
    hashes = {
        weights_hash(w, torch.float32)
        for w in ({"a": tensor}, {"b": tensor}, {"a": tensor.view(2, 3)}, {"a": tensor.view(3, 2)}, {})
    }
    assert len(hashes) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_of_strided_and_scalar_tensors(dtype):
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert weights_hash({"m": matrix.T}, dtype) == weights_hash({"m": matrix.T.contiguous()}, dtype)
    assert weights_hash({"m": torch.tensor(1.0)}, dtype) != weights_hash({"m": torch.tensor(2.0)}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 4095, 4096, 8192, 2**20 + 3])
def test_hash_of_a_slice_of_a_larger_tensor(dtype, length):
    """Weights may be views into one buffer, wherever they begin in it."""
    whole = torch.randn(length + 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    for offset in range(4):
        part = whole[offset : offset + length]
        assert weights_hash({"w": part}, dtype) == weights_hash({"w": part.clone()}, dtype)
        other = part.clone()
        other[-1] += 1
        assert weights_hash({"w": part}, dtype) != weights_hash({"w": other}, dtype)


def request(**changes):
    return replace(Request(prompt_ids=(1, 2, 3), sampling=Sampling()), **changes)


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([request(prompt_ids=(1,) * 10, prompt=4)], "prompt 4 has 10 tokens but the model's context is 10"),
        ([request(prompt_ids=(1, 50))], r"token id outside 0\.\.49"),
        ([request(prompt_ids=(-1, 5))], "token id outside"),
        ([request(prompt=2), request(prompt=2)], "prompt 2 is requested twice"),
        ([request(n=4), request(first_sample=3)], "prompt 0 is requested twice"),
    ],
)
def test_what_cannot_be_answered_is_refused(requests, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_requests(requests, context_length=10, vocabulary=50)


def test_what_can_be_answered_is_not_refused():
    requests = [request(prompt_ids=(0, 49) * 4 + (1,)), request(prompt=1, n=4), request(prompt=1, first_sample=4)]
    check_requests(requests, context_length=10, vocabulary=50)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prompt_ids": ()}, "prompt 0 is empty"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "conversation": "c"}, "a conversation has one"),
    ],
)
def test_requests_that_make_no_sense_cannot_be_made(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        request(**settings)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        Sampling(max_new_tokens=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_refuse_before_they_work(engine):
    made = ENGINES[engine](small_model())
    for wrong in (request(prompt_ids=prompt(160)), request(prompt_ids=(300,))):
        with pytest.raises(ValueError, match="prompt 0"):
            made.generate([request(prompt=1), wrong])
    assert made.generate([]) == []


def test_order_is_that_of_the_requests():
    requests = [request(prompt=3, n=2, first_sample=5), request(prompt=1)]
    completions = [
        Completion(
            ids=(1,), behaviour_logprobs=(-1.0,), finish=Finish.LENGTH, policy_version=0, prompt=p, sample=s, seed=0
        )
        for p, s in [(1, 0), (3, 6), (3, 5)]
    ]
    assert [(c.prompt, c.sample) for c in in_order(requests, iter(completions))] == [(3, 5), (3, 6), (1, 0)]


def test_weights_that_do_not_fit_are_named():
    shapes = {"a": torch.Size([2]), "b": torch.Size([3])}
    fit = {"a": torch.zeros(2), "b": torch.zeros(3)}
    check_weights(fit, shapes)
    with pytest.raises(ValueError, match="b is missing"):
        check_weights({"a": fit["a"]}, shapes)
    with pytest.raises(ValueError, match="c is unknown"):
        check_weights(fit | {"c": torch.zeros(1)}, shapes)
    with pytest.raises(ValueError, match=r"b has shape \(2,\), the engine's model has \(3,\)"):
        check_weights(fit | {"b": torch.zeros(2)}, shapes)


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}])
def test_a_cut_support_that_is_not_recorded_warns_and_names_the_settings(settings):
    with pytest.warns(UserWarning, match=", ".join(f"{k}={v}" for k, v in settings.items())):
        warn_if_support_is_cut(Sampling(**settings, logprobs="full"))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_p": 0.9}, {"logprobs": "full"}]
)
def test_a_whole_support_or_one_that_is_recorded_does_not_warn(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_support_is_cut(Sampling(**settings))


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


def test_auto_opens_the_native_engine(tiny):
    engine = open_engine(tiny, version=3, max_rows=2)
    assert isinstance(engine, NativeEngine)
    assert (engine.version, engine.max_rows, engine.stop_ids) == (3, 2, tiny.stop_ids)
    assert engine.hash() == weights_hash(dict(tiny.model.named_parameters()), torch.float32)
    assert (open_engine(tiny).version, open_engine(tiny).max_rows) == (0, 64)


def test_auto_falls_back_and_says_why(tiny, caplog):
    other = replace(tiny, model=small_model("gpt2"))
    with caplog.at_level(logging.INFO, logger="rolecall"):
        engine = open_engine(other)
    assert isinstance(engine, HFEngine)
    assert [r.message for r in caplog.records if r.name == "rolecall.rollout.open"] == [
        "sampling from tiny with the hf engine, not the native one: its architecture is gpt2"
    ]


def test_engines_by_name_and_dtype(tiny):
    for name in ("native", "hf"):
        engine = open_engine(tiny, name=name, dtype=torch.bfloat16)
        assert engine.hash() == weights_hash(dict(tiny.model.named_parameters()), torch.bfloat16)
    with pytest.raises(ValueError, match="unknown engine 'vllm'"):
        open_engine(tiny, name="vllm")
    with pytest.raises(ValueError, match="its architecture is gpt2; use the hf engine"):
        open_engine(replace(tiny, model=small_model("gpt2")), name="native")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"sliding_window": 32}, "sliding window of 32"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "change with the length"),
        ({"rope_parameters": {"rope_type": "linear", "partial_rotary_factor": 0.5}}, "a part of each head"),
    ],
)
def test_what_the_native_engine_cannot_run_is_known_beforehand(change, reason):
    model = small_model("mistral")
    assert unsupported(model) is None
    for key, value in change.items():
        setattr(model.config, key, value)
    assert reason in unsupported(model)
    with pytest.raises(ValueError, match=reason):
        native(model)


def test_a_weight_the_native_engine_does_not_know_is_named():
    model = small_model()
    model.model.layers[1].self_attn.lora_A = torch.nn.Linear(2, 2, bias=False)
    assert unsupported(model) == "it has a weight model.layers.1.self_attn.lora_A.weight of its own"
