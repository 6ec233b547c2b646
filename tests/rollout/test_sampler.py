"""The sampler's random numbers, its distribution and its supports."""

import dataclasses

import numpy as np
import pytest
import torch

from rolecall.rollout.sampler import draw, row_keys, support, uniforms
from rolecall.types import Sampling


def test_random_numbers_belong_to_seed_step_prompt_sample_and_position():
    base = (1, 2, 3)
    first, second = row_keys(*base, [4, 5])
    keys = {first, second}
    for i in range(3):
        other = list(base)
        other[i] += 1
        keys.update(row_keys(*other, [4]))
    assert len(keys) == 5
    assert row_keys(*base, [5]) == second  # whatever other samples are asked for
    a = uniforms(np.repeat(first, 3), np.array([0, 1, 2]))
    assert len(set(a.tolist())) == 3
    b = uniforms(np.repeat(first, 1), np.array([2]))
    assert b[0] == a[2]  # whatever else is in the batch


def test_random_numbers_are_uniform_and_independent():
    keys = np.concatenate([row_keys(0, 0, p, range(64)) for p in range(64)])
    numbers = np.stack([uniforms(keys, np.full(len(keys), t)) for t in range(64)])
    counts = np.bincount((numbers.flatten() * 64).astype(int), minlength=64)
    expected = numbers.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # chi-square, 63 degrees: 99.98 %
    assert numbers.min() >= 0
    assert numbers.max() < 1
    neighbours = np.corrcoef(numbers[:-1].flatten(), numbers[1:].flatten())[0, 1]
    samples = np.corrcoef(numbers[:, :-1].flatten(), numbers[:, 1:].flatten())[0, 1]
    assert abs(neighbours) < 0.01
    assert abs(samples) < 0.01


@pytest.mark.parametrize("vocab", [5, 256, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_follow_the_tempered_softmax(vocab, temperature):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    n = 20_000
    u = torch.from_numpy(uniforms(np.arange(n).astype(np.uint64), np.zeros(n, dtype=np.int64)))
    drawn = draw(logits.expand(n, vocab), Sampling(temperature=temperature), u)
    probs = (logits / temperature).double().softmax(-1)
    counts = torch.bincount(drawn.tokens, minlength=vocab).double()
    common = probs * n >= 5
    chi = ((counts - n * probs) ** 2 / (n * probs))[common].sum()
    degrees = int(common.sum())
    assert float(chi) < degrees + 4 * (2 * degrees) ** 0.5
    torch.testing.assert_close(drawn.logprobs.double(), probs.log()[drawn.tokens], atol=1e-5, rtol=1e-5)


def test_every_u_inverts_the_cdf():
    # p = 1/2, 1/4, 0, 1/4: slices [0, .5) [.5, .75) - [.75, 1)
    logits = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).log().expand(5, 4)
    drawn = draw(logits, Sampling(), torch.tensor([0.0, 0.49, 0.5, 0.75, 1 - 1e-16], dtype=torch.float64))
    assert drawn.tokens.tolist() == [0, 0, 1, 3, 3]


def test_greedy_takes_the_most_likely_and_scores_at_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    drawn = draw(logits, Sampling(temperature=0), torch.tensor([0.99], dtype=torch.float64))
    assert drawn.tokens.tolist() == [1]
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1)[:, 1])


PROBS = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=9), {0, 1, 2, 3, 4}),
        (Sampling(top_p=0.4), {1}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.86), {0, 1, 3, 4}),
        (Sampling(min_p=0.5), {1, 3, 4}),
        (Sampling(top_k=3, top_p=0.5), {1, 3}),  # top_p counts within the top k: .4/.85 < .5
        (Sampling(top_k=4, min_p=0.3), {1, 3, 4}),
    ],
)
def test_supports_are_exact(sampling, kept):
    logits = PROBS.log()
    assert set(support(logits, sampling)[0].nonzero().flatten().tolist()) == kept
    n = 4000
    u = torch.from_numpy(uniforms(np.arange(n).astype(np.uint64), np.zeros(n, dtype=np.int64)))
    drawn = draw(logits.expand(n, 5), sampling, u)
    assert set(drawn.tokens.tolist()) == kept
    renormalised = torch.zeros(5).index_fill(0, torch.tensor(sorted(kept)), 1) * PROBS[0]
    torch.testing.assert_close(drawn.logprobs, (renormalised / renormalised.sum()).log()[drawn.tokens])
    whole = draw(logits.expand(n, 5), dataclasses.replace(sampling, logprobs="full"), u)
    assert torch.equal(whole.tokens, drawn.tokens)
    torch.testing.assert_close(whole.logprobs, PROBS[0].log()[drawn.tokens])
    share = torch.bincount(drawn.tokens, minlength=5) / n
    torch.testing.assert_close(share, renormalised / renormalised.sum(), atol=0.03, rtol=0)


def test_bad_settings_are_refused():
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 2.0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
