"""Random scores with groups, and random batches of positions, for the property tests."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of one batch."""

    scores: Tensor
    groups: Tensor
    include: Tensor
    lengths: Tensor

    def rows(self, index: Tensor) -> "Scored":
        return Scored(
            scores=self.scores[index],
            groups=self.groups[index],
            include=self.include[index],
            lengths=self.lengths[index],
        )


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Four tensors [batch, time]; where the mask is False the others hold NaN or an infinity."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    def __iter__(self):
        return iter((self.logprobs, self.old, self.advantages, self.mask))


@st.composite
def scored(draw) -> Scored:
    """1 to 9 rows in up to 4 groups. Scores lie on a grid, so that flat groups are common; failed ones hold junk."""
    size = draw(st.integers(1, 9))

    def row(strategy):
        return draw(st.lists(strategy, min_size=size, max_size=size))

    include = torch.tensor(row(st.sampled_from([True, True, True, False])))
    scores = torch.tensor(row(st.integers(-4, 4).map(lambda x: x / 10)), dtype=torch.float64)
    junk = torch.tensor(row(st.sampled_from([float("nan"), float("inf"), float("-inf")])), dtype=torch.float64)
    return Scored(
        scores=torch.where(include, scores, junk),
        groups=torch.tensor(row(st.integers(-2, 1))),
        include=include,
        lengths=torch.tensor(row(st.integers(1, 9))),
    )


@st.composite
def positions(draw) -> Positions:
    """1 to 4 rows of 1 to 6 positions, with rows that count nowhere among them."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logprobs, old, advantages = torch.randn(3, *shape, generator=random, dtype=torch.float64).unbind()
    mask = torch.rand(shape, generator=random) > draw(st.sampled_from([0.1, 0.5, 0.9]))
    junk = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    logprobs, old, advantages = (torch.where(mask, x, junk) for x in (logprobs - 2, logprobs + old / 2 - 2, advantages))
    return Positions(logprobs=logprobs, old=old, advantages=advantages, mask=mask)
