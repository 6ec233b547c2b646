"""What engines say of answers drawn from a part of the vocabulary: who could be drawn, and how likely it was."""

import numpy as np
import pytest
import torch
from small_models import ENGINES, STOP, prompt, ragged_requests, small_model

from rolecall.policy.logprobs import token_logprobs
from rolecall.rollout.sampler import support
from rolecall.types import Request, Sampling

CUTS = [{"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}]


@torch.no_grad()
def tempered(model, ids, temperature):
    return model(input_ids=torch.tensor([ids])).logits[0, -1:].float() / temperature


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cut", CUTS)
def test_log_probs_are_of_what_could_be_drawn(engine, cut):
    model = small_model("llama")
    (request,) = ragged_requests((9,), n=4, max_new_tokens=6, **cut)
    for completion in ENGINES[engine](model).generate([request]):
        for i, (token, logprob, ids) in enumerate(
            zip(completion.ids, completion.behaviour_logprobs, completion.supports, strict=True)
        ):
            z = tempered(model, [*request.prompt_ids, *completion.ids[:i]], request.sampling.temperature)
            kept = support(z, request.sampling)[0].nonzero().flatten()
            held = np.frombuffer(ids, np.int32)
            assert held.tolist() == kept.tolist()
            assert token in held
            expected = z[0, kept].log_softmax(-1)[kept.tolist().index(token)]
            assert logprob == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_drawn_as_often_as_their_log_probs_say(engine):
    model, n = small_model("llama"), 600
    sampling = Sampling(max_new_tokens=1, top_k=4, temperature=1.5)
    request = Request(prompt_ids=prompt(5), sampling=sampling, n=n, seed=3)
    drawn = ENGINES[engine](model, max_rows=n).generate([request])
    claimed = {c.ids[0]: np.exp(c.behaviour_logprobs[0]) for c in drawn}
    assert len(claimed) == 4
    assert sum(claimed.values()) == pytest.approx(1, abs=1e-5)
    for token, share in claimed.items():
        assert sum(c.ids[0] == token for c in drawn) / n == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("engine", ENGINES)
def test_other_requests_in_the_same_batch_are_as_ever(engine):
    """Each row's settings are its own: whole, cut, cut but scored over everything, greedy."""
    model = small_model("llama")
    settings = [{}, {"top_k": 3}, {"top_k": 3, "logprobs": "full"}, {"top_k": 3, "temperature": 0.0}]
    requests = [
        Request(prompt_ids=prompt(5), sampling=Sampling(max_new_tokens=4, **s), n=1, seed=3, prompt=i)
        for i, s in enumerate(settings)
    ]
    found = ENGINES[engine](model).generate(requests)
    assert [c.supports is None for c in found] == [True, False, True, True]
    for request, completion in zip(requests, found, strict=True):
        (alone,) = ENGINES[engine](model).generate([request])
        assert alone.ids == completion.ids
        assert alone.supports == completion.supports
        assert alone.behaviour_logprobs == pytest.approx(completion.behaviour_logprobs, abs=1e-4)
    cut, full = found[1], found[2]
    with torch.no_grad():
        hidden = model.get_decoder()(torch.tensor([[*prompt(5), *full.ids]])).last_hidden_state[0, 4:-1]
        whole = token_logprobs(hidden, model.get_output_embeddings().weight, torch.tensor(full.ids)).logprobs
    assert full.behaviour_logprobs == pytest.approx(whole.tolist(), abs=1e-4)
    assert cut.behaviour_logprobs[0] > full.behaviour_logprobs[0] or cut.ids[0] != full.ids[0]


def test_a_support_that_is_the_whole_vocabulary_takes_no_room():
    model = small_model("llama")
    request = Request(prompt_ids=prompt(5), sampling=Sampling(max_new_tokens=3, top_k=10**6), seed=3)
    (completion,) = ENGINES["native"](model).generate([request])
    assert completion.supports == (b"",) * len(completion.ids)
    assert STOP not in completion.ids[:-1]


def test_a_conversation_keeps_them_beside_their_tokens():
    from rolecall.agents.conversation import TokenSample
    from rolecall.types import Completion, Finish

    def said(ids, supports):
        return Completion(
            ids=ids,
            behaviour_logprobs=(-1.0,) * len(ids),
            finish=Finish.LENGTH,
            policy_version=0,
            prompt=0,
            sample=0,
            seed=0,
            supports=supports,
        )

    sample = TokenSample()
    sample.extend([1, 2], [1, 1], [(0, 2, "prompt")])
    sample.add(said((5, 6), (b"\5\0\0\0", b"\6\0\0\0")))
    sample.extend([7], [4], [(0, 1, "tool")])
    sample.add(said((8,), None))
    assert sample.ended().supports == [b"", b"", b"\5\0\0\0", b"\6\0\0\0", b"", b""]
