"""The compiled pieces of a decoding step against the same maths in torch."""

import shutil

import numpy as np
import pytest
import torch
from small_models import small_model

from rolecall.policy import compiled
from rolecall.rollout.kernels import kernels_for
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.sampler import draw, uniforms
from rolecall.types import Request, Sampling

DTYPES = [torch.float32, torch.bfloat16]
needs_compiler = pytest.mark.skipif(kernels_for(torch.float32) is None, reason="there is no C compiler here")


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_in_place_and_norms(dtype):
    generator = torch.Generator().manual_seed(0)
    x, added, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((3, 40), (3, 40), (40,)))
    expected = x + added
    normed = kernels_for(dtype).add_norm(x, added, weight, 1e-6, out=torch.empty_like(x))
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(
        normed.float(),
        torch.nn.functional.rms_norm(expected.float(), (40,), weight.float(), 1e-6),
        atol=2e-2,
        rtol=2e-2,
    )
    if dtype == torch.float32:
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(expected, (40,), weight, 1e-6))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_is_silu_times_up(dtype):
    gate_up = torch.randn(5, 26, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    ours = kernels_for(dtype).gated(gate_up, out=torch.empty(5, 13, dtype=dtype)).float()
    torch.testing.assert_close(ours, torch.nn.functional.silu(gate) * up, atol=1e-2, rtol=1e-2)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "width"), [(9, 3, 64), (8, 2, 32), (5, 1, 128), (4, 4, 24)])
def test_attention_looks_at_the_tokens_of_its_own_slot(dtype, heads, kv, width):
    made, rows, room = torch.Generator().manual_seed(0), 4, 50
    qkv = torch.randn(rows, (heads + 2 * kv) * width, generator=made).to(dtype)
    angles = torch.rand(rows, width // 2, generator=made)
    keys, values = (torch.randn(rows + 1, kv, room, width, generator=made).to(dtype) for _ in range(2))
    lengths = torch.tensor([0, 1, 17, 49])
    before = keys.clone()
    held = torch.full((rows + 1, heads * width), torch.nan, dtype=dtype)
    out = held[:rows]
    kernels_for(dtype).attend(qkv, angles.cos(), angles.sin(), keys, values, lengths, out=out)
    q, k, v = qkv.double().view(rows, -1, width).split([heads, kv, kv], dim=1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]

    def turned(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    band = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for r, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(keys[r, :, n].double(), turned(k)[r], **band)
        assert torch.equal(values[r, :, n].double(), v[r])
        seen = [x[r, :, : n + 1].double().repeat_interleave(heads // kv, dim=0) for x in (keys, values)]
        weights = torch.einsum("hd,htd->ht", turned(q)[r], seen[0]).mul(width**-0.5).softmax(-1)
        expected = torch.einsum("ht,htd->hd", weights, seen[1]).flatten()
        torch.testing.assert_close(out[r].double(), expected, **band)
        keys[r, :, n] = before[r, :, n]
    assert torch.equal(keys, before), "nothing else was written"
    assert held[rows].isnan().all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 256, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draw_gives_the_tokens_and_log_probs_of_the_torch_path(dtype, vocab, temperature):
    n = 2000
    logits = (3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)
    u = torch.from_numpy(uniforms(np.arange(n).astype(np.uint64), np.zeros(n, dtype=np.int64)))
    sampling = Sampling(temperature=temperature)
    ours = draw(logits, sampling, u, kernels=kernels_for(dtype))
    theirs = draw(logits, sampling, u)
    same = ours.tokens == theirs.tokens
    assert int((~same).sum()) <= 2  # a draw may lie within rounding of a boundary
    torch.testing.assert_close(ours.logprobs[same], theirs.logprobs[same], atol=2e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 600])
def test_a_logit_far_above_the_others_is_drawn_wherever_it_stands(dtype, vocab):
    logits = torch.zeros(vocab, vocab).fill_diagonal_(1e4).to(dtype)
    u = torch.linspace(0, 0.999, vocab, dtype=torch.float64)
    drawn = draw(logits, Sampling(), u, kernels=kernels_for(dtype))
    assert torch.equal(drawn.tokens, torch.arange(vocab))
    assert torch.equal(drawn.logprobs, torch.zeros(vocab))


@needs_compiler
def test_draw_never_takes_a_token_of_weight_zero_and_refuses_broken_logits():
    logits = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).log().expand(5, 4).contiguous()
    u = torch.tensor([0.0, 0.49, 0.5, 0.75, 1 - 1e-16], dtype=torch.float64)
    compiled = kernels_for(torch.float32)
    assert draw(logits, Sampling(), u, kernels=compiled).tokens.tolist() == [0, 0, 1, 3, 3]
    for broken in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or inf"):
            draw(torch.full((1, 4), broken), Sampling(), u[:1], kernels=compiled)


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_with_and_without_kernels(family, dtype, monkeypatch):
    model = small_model(family)
    requests = [
        Request(prompt_ids=tuple(range(1, 4 + 5 * i)), sampling=Sampling(max_new_tokens=12), n=3, prompt=i)
        for i in range(3)
    ]
    quick = NativeEngine(model, None, stop_ids=(), context_length=64, dtype=dtype)
    monkeypatch.setenv("ROLECALL_KERNELS", "0")
    plain = NativeEngine(model, None, stop_ids=(), context_length=64, dtype=dtype)
    assert quick._decoder.kernels is not None
    assert plain._decoder.kernels is None
    pairs = list(zip(quick.generate(requests), plain.generate(requests), strict=True))
    if dtype == torch.float32:
        assert all(a.ids == b.ids for a, b in pairs)
        for a, b in pairs:
            torch.testing.assert_close(torch.tensor(a.behaviour_logprobs), torch.tensor(b.behaviour_logprobs))
    else:  # where rounding makes them part, they part; before that the log-probs are near
        first = torch.tensor(
            [a.behaviour_logprobs[0] - b.behaviour_logprobs[0] for a, b in pairs if a.ids[0] == b.ids[0]]
        )
        assert len(first) >= 6
        assert float(first.abs().mean()) < 0.05


@pytest.mark.usefixtures("fast_paths")
def test_without_a_compiler_the_torch_path_is_used_with_one_line(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    compiled.library.cache_clear()
    compiled._fall_back.cache_clear()
    try:
        with caplog.at_level("INFO", logger="rolecall"):
            assert kernels_for(torch.float32) is None
            assert kernels_for(torch.bfloat16) is None
        (line,) = [r.getMessage() for r in caplog.records]
        assert "no C compiler" in line
        assert "1.4 to 1.8 times as long" in line
    finally:
        compiled.library.cache_clear()


def test_float64_has_no_kernels():
    assert kernels_for(torch.float64) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("fast_paths")
def test_where_there_is_a_compiler_decoding_is_compiled():
    assert all(kernels_for(dtype) is not None for dtype in (torch.float32, torch.bfloat16))
    assert kernels_for(torch.float64) is None
