"""Packed matrix products: the same numbers as torch's, and the same bits for a row whatever stands beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.rollout.linear import Linear, _kernels

BANDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def sample(rows: int, inner: int, outer: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=made).to(dtype) for size in ((rows, inner), (outer, inner), (outer,))]


@pytest.mark.parametrize("kernels", ["1", "0"], ids=["compiled", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 40),
    outer=st.integers(1, 120),
    bias=st.booleans(),
    seed=st.integers(0),
)
@settings(max_examples=40, deadline=None)
def test_products_of_any_size_are_torchs(kernels, dtype, rows, inner, outer, bias, seed):
    x, weight, added = sample(rows, 2 * inner, outer, dtype, seed % 2**20)
    expected = x.double() @ weight.double().T + (added.double() if bias else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLECALL_KERNELS", kernels)
        linear = Linear(weight.clone(), added if bias else None)
    found = linear(x)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= BANDS[dtype] * (1 + expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_odd_inner_size_and_other_dtypes_go_through_torch(dtype):
    x, weight, added = sample(3, 7, 5, dtype)
    assert torch.allclose(Linear(weight, added)(x).double(), (x @ weight.T + added).double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(dtype):
    x, weight, added = sample(29, 64, 100, dtype)
    if _kernels(weight) is None:
        pytest.skip("this processor, or the environment, has no compiled product of this dtype")
    linear = Linear(weight, added)
    whole = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], whole[i]) for i in range(len(x)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x), whole)
    finally:
        torch.set_num_threads(before)


def test_what_is_given_to_write_to_is_written_to():
    x, weight, _ = sample(4, 16, 48, torch.float32)
    linear, room = Linear(weight.clone(), None), torch.full((6, 48), torch.nan)
    found = linear(x, room[:4])
    assert torch.allclose(found, x @ weight.T, atol=1e-5)
    assert room[4:].isnan().all()
