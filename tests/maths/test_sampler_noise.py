"""What a sampler that is a little off does to the gradient, by enumeration of all answers, and which weights put it right.

A policy over four tokens and four positions, one free distribution behind every beginning of an answer. The sampler's
log-probs are the policy's plus noise; its answers are weighed by `importance_weights` and trained by REINFORCE.
"""

import itertools

import pytest
import torch

from rolecall.maths.losses import importance_weights

TOKENS, LENGTH, PROBLEMS = 4, 4, 5
ANSWERS = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))
STATES = sum(TOKENS**t for t in range(LENGTH))

KINDS = {
    "none": None,
    "token, truncate at 2": {"level": "token", "kind": "truncate", "high": 2.0},
    "token, mask outside 0.5 to 2": {"level": "token", "kind": "mask", "low": 0.5, "high": 2.0},
    "sequence, mask outside 0.5 to 2": {"level": "sequence", "kind": "mask", "low": 0.5, "high": 2.0},
    "sequence, truncate at 2": {"level": "sequence", "kind": "truncate", "high": 2.0},
    "sequence, truncate at 3": {"level": "sequence", "kind": "truncate", "high": 3.0},
}
NOISE = (0.01, 0.05, 0.2)
PERCENT_OFF = {
    "none": (1.47, 7.30, 28.35),
    "token, truncate at 2": (1.19, 5.94, 23.58),
    "token, mask outside 0.5 to 2": (1.19, 5.94, 23.58),
    "sequence, mask outside 0.5 to 2": (0.00, 0.00, 8.53),
    "sequence, truncate at 2": (0.00, 0.00, 1.27),
    "sequence, truncate at 3": (0.00, 0.00, 0.18),
}
"""The table in docs/numerics.md."""


def states():
    """[answers, length] the number of the beginning that each token was drawn behind."""
    found, first = [], 0
    for t in range(LENGTH):
        place = torch.zeros(len(ANSWERS), dtype=torch.long)
        for before in range(t):
            place = place * TOKENS + ANSWERS[:, before]
        found.append(first + place)
        first += TOKENS**t
    return torch.stack(found, dim=1)


def of_answers(logits):
    """[answers, length] log-prob of every token of every answer."""
    return logits.log_softmax(-1)[states(), ANSWERS]


def off(kind, noise, seed):
    """|expected gradient - gradient of the expected score| / |the latter|."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(STATES, TOKENS, generator=generator, dtype=torch.float64)

    logits = normal().requires_grad_()
    scores = torch.rand(len(ANSWERS), generator=generator, dtype=torch.float64)
    behaviour = of_answers((logits.log_softmax(-1) + noise * normal()).detach())
    policy = of_answers(logits)
    (truth,) = torch.autograd.grad((policy.sum(dim=1).exp() * scores).sum(), logits, retain_graph=True)
    share = behaviour.sum(dim=1).exp()
    advantages = scores - (share * scores).sum()
    everywhere = torch.ones_like(policy, dtype=torch.bool)
    weights = 1.0 if kind is None else importance_weights(policy, behaviour, everywhere, **kind)
    (found,) = torch.autograd.grad((share[:, None] * weights * advantages[:, None] * policy).sum(), logits)
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", KINDS)
def test_how_far_the_expected_gradient_is_off(name):
    found = [100 * sum(off(KINDS[name], noise, seed) for seed in range(PROBLEMS)) / PROBLEMS for noise in NOISE]
    assert found == pytest.approx(PERCENT_OFF[name], abs=0.01)


def test_whole_answers_without_a_bound_are_exact():
    assert off({"level": "sequence", "kind": "truncate", "high": 1e9}, 0.2, seed=0) < 1e-12
