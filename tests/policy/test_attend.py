"""Attention on flat tokens: the compiled one, the one in torch, and the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.policy.attend_ops import Segments, attend
from rolecall.policy.compiled import wanted


def segments_of(lengths: list[list[int]]) -> Segments:
    """From the lengths of each group's segments, its prefix first."""
    flat = [length for group in lengths for length in group]
    counts = [len(group) for group in lengths]
    return Segments(
        starts=torch.tensor([0, *flat]).cumsum(0),
        groups=torch.tensor([0, *counts]).cumsum(0),
    )


def defined(qkv: torch.Tensor, lengths: list[list[int]], heads: int, kv_heads: int) -> torch.Tensor:
    """Token by token, as the sentence says."""
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(len(qkv), -1, width).split([heads, kv_heads, kv_heads], dim=1)
    rows, start = [], 0
    for group in lengths:
        prefix = list(range(start, start + group[0]))
        for number, length in enumerate(group):
            for token in range(start, start + length):
                seen = (prefix if number else []) + list(range(start, token + 1))
                for head in range(heads):
                    of = head * kv_heads // heads
                    weights = (k[seen, of] @ q[token, head] * width**-0.5).softmax(0)
                    rows.append(weights @ v[seen, of])
            start += length
    return torch.stack(rows).view(len(qkv), -1)


def outcome(qkv: torch.Tensor, lengths: list[list[int]], heads: int, kv_heads: int, how=None) -> list[torch.Tensor]:
    leaf = qkv.clone().requires_grad_()
    if how is None:
        out = attend(leaf, segments_of(lengths), heads=heads, kv_heads=kv_heads)
    else:
        out = how(leaf, lengths, heads, kv_heads)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out.backward(up.to(out.dtype))
    return [out.detach(), leaf.grad]


LENGTHS = [[5, 3, 31, 1], [0, 27], [40, 50, 2], [8, 44, 30]]
"""A short prefix, none, and a long one; more and fewer tokens than a block of queries; and one where the first block of a
branch ends exactly with a vector of keys."""


@pytest.mark.parametrize("kernels", ["1", "0"], ids=["compiled", "torch"])
@pytest.mark.parametrize(("dtype", "band"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (6, 2, 24)])
def test_attention_and_its_gradient_are_as_defined(kernels, dtype, band, heads, kv_heads, width, monkeypatch):
    monkeypatch.setenv("ROLECALL_KERNELS", kernels)
    n = sum(map(sum, LENGTHS))
    qkv = torch.randn(n, (heads + 2 * kv_heads) * width, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = outcome(qkv, LENGTHS, heads, kv_heads)
    expected = outcome(qkv.double(), LENGTHS, heads, kv_heads, how=defined)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= band * other.norm()


@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**20),
    kind=st.sampled_from([(torch.float32, 1e-4), (torch.bfloat16, 3e-2)]),
)
@settings(max_examples=40, deadline=None)
def test_any_lengths_will_do(lengths, seed, kind):
    groups, (dtype, band) = [[prefix, *branches] for prefix, branches in lengths], kind
    qkv = torch.randn(sum(map(sum, groups)), 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for one, other in zip(outcome(qkv, groups, 2, 1), outcome(qkv.double(), groups, 2, 1), strict=True):
        assert (one - other).norm() <= band * other.norm()


@pytest.mark.skipif(not wanted(), reason="kernels are turned off")
def test_the_number_of_threads_changes_no_bit():
    qkv = torch.randn(sum(map(sum, LENGTHS)), 8 * 16, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outcome(qkv, LENGTHS, 4, 2)
        torch.set_num_threads(3)
        three = outcome(qkv, LENGTHS, 4, 2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_extreme_scores_stay_finite():
    qkv = 100 * torch.randn(35, 8 * 16, generator=torch.Generator().manual_seed(3))
    assert all(t.isfinite().all() for t in outcome(qkv, [[5, 30]], 4, 2))
