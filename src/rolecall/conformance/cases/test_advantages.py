"""Advantages from the scores of a group of answers to one prompt."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolecall.conformance import references
from rolecall.conformance.compare import close, reals

Function = Callable[..., Tensor]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
SCORES = reals(10, 20, 30, 5, 5, 20)
ALL = [True] * 6


def _random_scores() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [10 * torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(16)]


def test_grpo_golden(grpo: Function) -> None:
    """Scores 10 20 30 have mean 20 and unbiased deviation 10 (the biased one is 8.16)."""
    close(grpo(SCORES, GROUPS)[:3], reals(-1, 0, 1))


@pytest.mark.parametrize("scale", ["group", "batch", None])
def test_grpo_equals_the_loop(grpo: Function, scale: str | None) -> None:
    """Random scores, against a loop in float64."""
    for scores in _random_scores():
        expected = references.grpo(scores.tolist(), GROUPS.tolist(), ALL, scale, 0.0)
        close(grpo(scores, GROUPS, scale=scale), reals(*expected))


def test_grpo_of_a_flat_group(grpo: Function) -> None:
    """Equal scores carry no signal: 0, also in float32, in which the mean of eight times 0.7 is not 0.7."""
    for score in (0.7, 0.1, 3.3):
        scores = torch.full((8,), score, dtype=torch.float32)
        close(grpo(scores, torch.zeros(8, dtype=torch.long)), torch.zeros(8))


def test_grpo_of_a_single_answer(grpo: Function) -> None:
    """A group of one has nothing to be compared with: 0, not the bare score and not NaN."""
    close(grpo(reals(7), torch.tensor([0])), reals(0))


def test_grpo_leaves_out_a_failed_reward(grpo: Function) -> None:
    """A reward that failed is not a score of 0: scores 10 20 30 and a failure give -1 0 1 and 0."""
    include = torch.tensor([True, True, True, False])
    got = grpo(reals(10, 20, 30, 0), torch.zeros(4, dtype=torch.long), include=include)
    close(got, reals(-1, 0, 1, 0))


def test_rloo_golden(rloo: Function) -> None:
    """Scores 10 20 30: each less the mean of the other two."""
    close(rloo(SCORES, GROUPS)[:3], reals(-15, 0, 15))


def test_rloo_equals_the_loop(rloo: Function) -> None:
    """Random scores, against a loop in float64."""
    for scores in _random_scores():
        close(rloo(scores, GROUPS), reals(*references.rloo(scores.tolist(), GROUPS.tolist(), ALL)))


def test_rloo_baseline_does_not_depend_on_the_answer(rloo: Function) -> None:
    """Raising one score by 1 raises its own advantage by 1 and lowers the others' by 1 / (n - 1)."""
    moved = SCORES + reals(1, 0, 0, 0, 0, 0)
    close(rloo(moved, GROUPS) - rloo(SCORES, GROUPS), reals(1, -0.5, -0.5, 0, 0, 0))


def test_rloo_of_a_single_answer(rloo: Function) -> None:
    """There are no others to take a mean of: 0, not the bare score and not NaN."""
    close(rloo(reals(7), torch.tensor([0])), reals(0))


def test_rloo_leaves_out_a_failed_reward(rloo: Function) -> None:
    """A failed reward is in nobody's baseline."""
    include = torch.tensor([True, True, True, False])
    got = rloo(reals(10, 20, 30, 0), torch.zeros(4, dtype=torch.long), include=include)
    close(got, reals(-15, 0, 15, 0))
