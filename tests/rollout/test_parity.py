"""Engines against the trainer, against transformers, and against themselves in other batches.

Bands are of |behaviour log-prob - trainer's log-prob|. Measured on random models with large weights: at most 2.3e-5 in
fp32; in bf16 a mean of at most 0.022 (native) and 0.013 (hf), at most 0.17 for one token. On SmolLM2-135M: at most 4.2e-5
in fp32; in bf16 means of 0.043 (native) and 0.048 (hf), at most 0.30.
"""

import numpy as np
import pytest
import torch
from small_models import (
    CONTEXT,
    ENGINES,
    FAMILIES,
    STOP,
    gaps,
    hf,
    native,
    prompt,
    ragged_requests,
    small_model,
    trainer_logprobs,
)

from rolecall.policy.load import cast_weights, load
from rolecall.rollout.open import open_engine
from rolecall.rollout.sampler import row_keys, uniforms
from rolecall.types import Finish, Request, Sampling
from smollm2 import smollm2_path

FP32_BAND = 1e-4
BF16_MEAN_BAND, BF16_BAND = 0.05, 0.6
REAL_BF16_MEAN_BAND = 0.08


@pytest.fixture(scope="module")
def models():
    """Every family in fp32, made once; tests do not change them."""
    made = {family: small_model(family) for family in (*FAMILIES, "gpt2")}
    return made | {"tiny": load("tiny").model}


PAIRS = [
    (engine, family)
    for engine in ENGINES
    for family in (*FAMILIES, "gpt2", "tiny")
    if (engine, family) != ("native", "gpt2")
]


@pytest.mark.parametrize(("engine", "family"), PAIRS)
def test_logprobs_are_the_trainers_in_fp32(models, engine, family):
    made = ENGINES[engine](models[family], max_rows=5)
    for temperature in (0.0, 0.7, 1.6):
        requests = ragged_requests((5, 1, 17), n=2, temperature=temperature, max_new_tokens=12)
        completions = made.generate(requests)
        assert float(gaps(models[family], requests, completions).max()) < FP32_BAND


@pytest.mark.parametrize("max_rows", [1, 3, 64])
@pytest.mark.parametrize("lengths", [(6,), (5, 1, 40, 9)])
@pytest.mark.parametrize("engine", ENGINES)
def test_logprobs_are_the_trainers_in_every_batch_shape(models, engine, lengths, max_rows):
    made = ENGINES[engine](models["llama"], max_rows=max_rows)
    requests = ragged_requests(lengths, n=1 if len(lengths) == 1 else 3, max_new_tokens=12)
    completions = made.generate(requests)
    assert len(completions) == sum(r.n for r in requests)
    assert float(gaps(models["llama"], requests, completions).max()) < FP32_BAND


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
@pytest.mark.parametrize("engine", ENGINES)
def test_logprobs_are_near_the_trainers_in_bf16(engine, family):
    model = (
        cast_weights(load("tiny").model, torch.bfloat16)
        if family == "tiny"
        else small_model(family, dtype=torch.bfloat16)
    )
    requests = ragged_requests()
    found = gaps(model, requests, ENGINES[engine](model, max_rows=5).generate(requests))
    assert float(found.mean()) < BF16_MEAN_BAND
    assert float(found.max()) < BF16_BAND


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_may_have_another_dtype_than_the_trainer(models, engine):
    made = ENGINES[engine](models["qwen2"], dtype=torch.bfloat16)
    requests = ragged_requests()
    found = gaps(models["qwen2"], requests, made.generate(requests))
    assert 1e-4 < float(found.mean()) < BF16_MEAN_BAND


@pytest.mark.parametrize("engine", ENGINES)
def test_rotary_frequencies_stay_exact_in_bf16(engine):
    """Rounded to bf16 they would turn position 900 by several radians too far or too little."""
    loaded = load("tiny", dtype="bfloat16")
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    made = open_engine(load("tiny"), name=engine, dtype=torch.bfloat16)
    request = Request(prompt_ids=prompt(900), sampling=Sampling(max_new_tokens=16, temperature=0.3), n=2)
    assert float(gaps(load("tiny").model, [request], made.generate([request])).mean()) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_every_end_has_its_cause_and_its_logprobs(models, engine):
    model = models["llama-biases"]
    made = ENGINES[engine](model, stop_ids=(), max_rows=4)
    base = Request(prompt_ids=prompt(6), sampling=Sampling(max_new_tokens=20, stop_ids=()))
    ids = made.generate([base])[0].ids
    first = next(i for i, token in enumerate(ids) if i > 5 and token < 128 and ids.index(token) == i)
    second = next(i for i, token in enumerate(ids) if i > first and ids.index(token) == i)
    # Two printable-or-not bytes in a row, as text: a stop string that spans two tokens.
    pair = next(i for i in range(2, 20) if max(ids[i - 1 : i + 1]) < 128)
    text = bytes(ids[pair - 1 : pair + 1]).decode()
    room = CONTEXT - 4
    cases = [
        (Sampling(max_new_tokens=20, stop_ids=(ids[first],)), Finish.STOP, first + 1),
        (Sampling(max_new_tokens=20, stop_ids=(299, ids[second])), Finish.STOP, second + 1),
        (Sampling(max_new_tokens=20, stop_ids=(ids[second], ids[first])), Finish.STOP, first + 1),
        (Sampling(max_new_tokens=20, stop_ids=(), stop_strings=("never seen", text)), Finish.STOP_STRING, pair + 1),
        (Sampling(max_new_tokens=7, stop_ids=()), Finish.LENGTH, 7),
        (Sampling(max_new_tokens=20, stop_ids=()), Finish.LENGTH, 20),
    ]
    for sampling, finish, length in cases:
        request = Request(prompt_ids=base.prompt_ids, sampling=sampling)
        (completion,) = made.generate([request])
        assert (completion.finish, completion.ids) == (finish, ids[:length])
        assert float(gaps(model, [request], [completion]).max()) < FP32_BAND
    full = Request(prompt_ids=prompt(room), sampling=Sampling(max_new_tokens=20, stop_ids=()), prompt=1)
    # All in one batch: they end at different times.
    together = [Request(prompt_ids=base.prompt_ids, sampling=s, prompt=0, first_sample=0) for s, _, _ in cases[:1]]
    completions = made.generate([*together, full])
    assert (completions[1].finish, len(completions[1].ids)) == (Finish.LENGTH, 4)
    assert completions[0].ids == ids[: first + 1]
    assert float(gaps(model, [*together, full], completions).max()) < FP32_BAND


@torch.no_grad()
def transformers_greedy(model, prompt_ids, new):
    ids = torch.tensor([prompt_ids])
    settings = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    # Without a mask, transformers takes every token 0 for padding.
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt_ids) :].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
def test_greedy_is_transformers_greedy(models, family):
    requests = ragged_requests((5, 1, 30), n=1, temperature=0.0, stop_ids=(), max_new_tokens=40)
    completions = native(models[family]).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        assert list(completion.ids) == transformers_greedy(models[family], request.prompt_ids, 40)
    if family != "tiny":  # untrained tiny repeats itself
        assert len({token for c in completions for token in c.ids}) > 20


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
def test_both_engines_draw_the_same_tokens(models, family):
    requests = ragged_requests((5, 1, 30), max_new_tokens=40)
    ours, theirs = (make(models[family]).generate(requests) for make in (native, hf))
    assert [c.ids for c in ours] == [c.ids for c in theirs]
    assert [c.finish for c in ours] == [c.finish for c in theirs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_call_gives_the_same_bits(engine, dtype):
    model = small_model("qwen3", dtype=dtype)
    made = ENGINES[engine](model, max_rows=4)
    requests = ragged_requests()
    first = made.generate(requests)
    made.generate(ragged_requests((50, 60), n=4, max_new_tokens=60))  # whatever came between
    assert made.generate(requests) == first
    assert ENGINES[engine](model, max_rows=4).generate(requests) == first


@torch.no_grad()
def distance_to_boundary(model, request, completion, t):
    """How far the t-th random number lies from the nearer end of the CDF slice of the token drawn, on the trainer's CDF;
    negative if outside."""
    sequence = torch.tensor([[*request.prompt_ids, *completion.ids[:t]]])
    probs = (model(sequence).logits[0, -1].double() / request.sampling.temperature).softmax(-1)
    (key,) = row_keys(request.seed, request.step, request.prompt, [completion.sample])
    u = uniforms(np.array([key], dtype=np.uint64), np.array([sequence.shape[1]]))[0]
    ends, token = probs.cumsum(0), completion.ids[t]
    return min(u - float(ends[token] - probs[token]), float(ends[token]) - u)


def differences(model, engine, lengths=(5, 1, 30), **sampling):
    """(|distance| of each first difference between batch shapes, answers compared)."""
    requests = ragged_requests(lengths, n=4, max_new_tokens=30, **sampling)
    reference, *others = (ENGINES[engine](model, max_rows=rows).generate(requests) for rows in (64, 1, 3))
    found = []
    for other in others:
        for a, b in zip(reference, other, strict=True):
            if a.ids != b.ids:
                t = next(i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
                found.append(abs(distance_to_boundary(model, requests[a.prompt], a, t)))
    return found, sum(len(other) for other in others)


@pytest.mark.parametrize("engine", ENGINES)
def test_other_batch_shapes_draw_the_same_tokens_in_fp32(models, engine):
    found, compared = differences(models["llama"], engine)
    assert compared == 24
    assert found == []


@pytest.mark.parametrize("engine", ENGINES)
def test_other_batch_shapes_differ_at_boundaries_only_in_bf16(engine):
    found, compared = differences(small_model(dtype=torch.bfloat16), engine)
    assert len(found) < compared
    assert all(distance < 0.03 for distance in found), found


@pytest.mark.parametrize("engine", ENGINES)
def test_the_token_drawn_is_the_one_whose_slice_holds_the_random_number(models, engine):
    (request,) = ragged_requests((9,), n=2, temperature=1.3, stop_ids=())
    for completion in ENGINES[engine](models["mistral"]).generate([request]):
        for t in range(len(completion.ids)):
            assert distance_to_boundary(models["mistral"], request, completion, t) > -1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_supports_are_cut_end_to_end(models, engine):
    model = models["qwen2"]
    made = ENGINES[engine](model)
    settings = {"top_k": {"top_k": 2}, "top_p": {"top_p": 0.3}, "min_p": {"min_p": 0.5}}
    for name, setting in settings.items():
        requests = ragged_requests((5, 11), n=4, stop_ids=(), **setting)
        completions = made.generate(requests)
        # Log-probs are those of the distribution that was drawn from.
        assert float(gaps(model, requests, completions).max()) < FP32_BAND
        ranks, before, relative = [], [], []
        for c in completions:
            sequence = torch.tensor([[*requests[c.prompt].prompt_ids, *c.ids]])
            with torch.no_grad():
                probs = model(sequence).logits[0, -len(c.ids) - 1 : -1].double().softmax(-1)
            chosen = probs.gather(1, torch.tensor(c.ids)[:, None])
            ranks += (probs > chosen).sum(-1).tolist()
            before += probs.where(probs > chosen, 0).sum(-1).tolist()
            relative += (chosen[:, 0] / probs.max(-1).values).tolist()
        assert {"top_k": max(ranks) == 1, "top_p": max(before) < 0.3, "min_p": min(relative) > 0.5 - 1e-4}[name]
        assert max(ranks) > 0  # the cut leaves a choice


@pytest.mark.parametrize("engine", ENGINES)
def test_one_batch_may_mix_settings(models, engine):
    model = models["llama"]
    settings = [
        Sampling(temperature=0.0, max_new_tokens=9),
        Sampling(temperature=0.6, max_new_tokens=15, stop_ids=()),
        Sampling(temperature=1.5, top_k=4, max_new_tokens=12),
        Sampling(temperature=1.0, max_new_tokens=30, stop_ids=(7, 9)),
    ]
    requests = [Request(prompt_ids=prompt(4 + i), sampling=s, n=2, prompt=i) for i, s in enumerate(settings)]
    together = ENGINES[engine](model).generate(requests)
    alone = [c for r in requests for c in ENGINES[engine](model).generate([r])]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert float(gaps(model, requests, together).max()) < FP32_BAND


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_token_that_is_also_the_pad_token_is_only_a_token(models, engine):
    """Prompts hold it, answers may hold it where it does not stop, and it still ends an answer."""
    model = models["llama"]
    assert model.config.pad_token_id == STOP
    requests = [
        Request(
            prompt_ids=(STOP, 5, STOP, STOP, 8), sampling=Sampling(max_new_tokens=100, temperature=50), n=16, prompt=0
        ),
        Request(prompt_ids=(STOP,), sampling=Sampling(max_new_tokens=100, temperature=50, stop_ids=()), n=16, prompt=1),
    ]
    completions = ENGINES[engine](model).generate(requests)
    assert float(gaps(model, requests, completions).max()) < FP32_BAND
    assert any(c.finish is Finish.STOP and c.ids[-1] == STOP for c in completions if c.prompt == 0)
    assert any(STOP in c.ids for c in completions if c.prompt == 1)
    assert all(len(c.ids) == 100 for c in completions if c.prompt == 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_chat_model(dtype):
    loaded = load(smollm2_path(), dtype=dtype)
    questions = ["What is the capital of France?", "Count to ten.", "Write two lines about the sea and the wind."]
    prompts = [
        tuple(
            loaded.tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for q in questions
    ]
    for engine in ("native", "hf"):
        made = open_engine(loaded, name=engine)
        requests = [
            Request(prompt_ids=p, sampling=Sampling(max_new_tokens=48), n=2, prompt=i) for i, p in enumerate(prompts)
        ]
        found = gaps(loaded.model, requests, made.generate(requests))
        if dtype == "float32":
            assert float(found.max()) < FP32_BAND
            greedy = [
                Request(prompt_ids=p, sampling=Sampling(max_new_tokens=32, temperature=0, stop_ids=())) for p in prompts
            ]
            for request in greedy:
                assert list(made.generate([request])[0].ids) == transformers_greedy(
                    loaded.model, request.prompt_ids, 32
                )
        else:
            assert float(found.mean()) < REAL_BF16_MEAN_BAND
            assert float(found.max()) < BF16_BAND


def test_trainer_logprobs_are_those_of_full_logits(models):
    """The yardstick of this file against the definition."""
    ids = prompt(20)
    with torch.no_grad():
        logits = models["qwen3"](torch.tensor([ids])).logits[0].double() / 0.7
    expected = logits.log_softmax(-1)[4:-1].gather(1, torch.tensor(ids[5:])[:, None])[:, 0]
    found = trainer_logprobs(models["qwen3"], ids[:5], ids[5:], 0.7)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
