"""Attention by a varlen kernel: what is handed to it, and which is chosen. The kernel here is a loop of SDPA; those of GPUs are not run."""

import logging
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from test_attend import LENGTHS, defined, segments_of
from test_flat import gradients, llama, sample

from rolecall.policy import reading, varlen
from rolecall.policy.attend_ops import Segments, attend
from rolecall.policy.flat import FlatTrunk
from rolecall.policy.reading import Trunk
from rolecall.policy.varlen import Lengths, ways

pytestmark = pytest.mark.usefixtures("in_torch")


@pytest.fixture
def in_torch(monkeypatch):
    """The compiled kernels, which are for the CPU, come first there."""
    monkeypatch.delenv("ROLECALL_FLAT", raising=False)
    monkeypatch.setenv("ROLECALL_KERNELS", "0")


def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Lengths) -> torch.Tensor:
    """Sequence by sequence, as the kernels' documentation has it: the last query is aligned with the last key."""
    assert at.queries.dtype == at.keys.dtype == torch.int32
    found = []
    for (start, stop), (first, last) in zip(pairwise(at.queries.tolist()), pairwise(at.keys.tolist()), strict=True):
        assert 0 < stop - start <= at.most_queries
        assert stop - start <= last - first <= at.most_keys
        one = (q[start:stop], k[first:last], v[first:last])
        allowed = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - (stop - start))
        heads = (x.transpose(0, 1) for x in one)
        found.append(F.scaled_dot_product_attention(*heads, attn_mask=allowed, enable_gqa=True).transpose(0, 1))
    assert at.queries[-1] == len(q)
    assert at.keys[-1] == len(k)
    return torch.cat(found)


@pytest.mark.parametrize("lengths", [LENGTHS, [[0, 7], [0, 3, 5]]], ids=["shared prefixes", "none shared"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (6, 2, 24)])
def test_attention_and_its_gradient_are_as_defined(lengths, heads, kv_heads, width):
    tokens = sum(map(sum, lengths))
    drawn = torch.randn(
        tokens, (heads + 2 * kv_heads) * width, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    plain = segments_of(lengths)
    segments = Segments(starts=plain.starts, groups=plain.groups, varlen=loop)
    up = torch.randn(tokens, heads * width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    for how in (
        lambda qkv: attend(qkv, segments, heads=heads, kv_heads=kv_heads),
        lambda qkv: defined(qkv, lengths, heads, kv_heads),
    ):
        leaf = drawn.clone().requires_grad_()
        out = how(leaf)
        out.backward(up)
        results.append((out.detach(), leaf.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_hidden_states_and_gradients_are_those_of_the_padded_model(kind):
    model, (ids, needed) = llama(torch.float64, kind), sample()
    own = model.get_decoder()(input_ids=ids).last_hidden_state[needed]
    expected = gradients(model, own)
    trunk = FlatTrunk(model)
    trunk.varlen = loop
    flat = trunk(ids, needed, dtype=torch.float64)
    found = gradients(model, flat)
    assert (flat - own).norm() <= 1e-7 * own.norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-7 * gradient.norm() + 1e-9, name


def broken(*_):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore of it")


def wrong(q, k, v, at):
    return loop(q, k, v, at) + 1


class WrongBackward(torch.autograd.Function):
    """Keys get no gradient."""

    @staticmethod
    def forward(ctx, k):
        return k.clone()

    @staticmethod
    def backward(ctx, up):
        return torch.zeros_like(up)


def wrong_backward(q, k, v, at):
    return loop(q, WrongBackward.apply(k), v, at)


def test_a_kernel_that_fails_or_differs_gives_way_to_the_next(monkeypatch, caplog):
    tried = [("one that fails", broken), ("one that differs", wrong), ("one without", wrong_backward), ("a loop", loop)]
    monkeypatch.setattr(reading, "ways", lambda device, dtype: iter(tried))
    model, (ids, needed) = llama(), sample()
    trunk = Trunk(model)
    with caplog.at_level(logging.INFO):
        found = trunk(ids, needed)
    assert trunk.is_flat
    assert trunk._flat.varlen is loop
    assert "one that fails cannot be used here: FlashAttention only supports Ampere GPUs or newer." in caplog.text
    assert "with one that differs differs from the model's own" in caplog.text
    assert "with one without differs from the model's own by" in caplog.text
    assert "of its gradients (float32 allows 0.001): going on with another" in caplog.text
    own = model.get_decoder()(input_ids=ids).last_hidden_state[needed]
    torch.testing.assert_close(found, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "names"),
    [
        (
            "cuda",
            torch.bfloat16,
            True,
            ["flash_attn's varlen kernel", "torch's varlen kernel", "SDPA on padded segments"],
        ),
        ("cuda", torch.bfloat16, False, ["torch's varlen kernel", "SDPA on padded segments"]),
        ("cuda", torch.float32, True, ["SDPA on padded segments"]),
        ("xpu", torch.bfloat16, True, ["SDPA on padded segments"]),
        ("cpu", torch.bfloat16, True, ["SDPA on padded segments"]),
    ],
)
def test_which_kernels_are_tried(monkeypatch, device, dtype, installed, names):
    monkeypatch.setattr(varlen, "find_spec", lambda name: object() if installed else None)
    assert [name for name, _ in ways(torch.device(device), dtype)] == names


def test_what_torch_s_kernel_is_called_with(monkeypatch):
    """Its own shape function, which needs no GPU, accepts the call; and causal is what it calls (-1, 0)."""
    lengths = Lengths(torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32), 3, 5)
    q, k, v = (torch.zeros(n, heads, 16, dtype=torch.bfloat16, device="meta") for n, heads in ((5, 4), (8, 2), (8, 2)))
    at = Lengths(lengths.queries.to("meta"), lengths.keys.to("meta"), 3, 5)
    assert varlen.torch_varlen(q, k, v, at).shape == (5, 4, 16)
