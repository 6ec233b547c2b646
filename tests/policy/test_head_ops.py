"""The head's compiled functions say what the same maths in torch says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.policy.compiled import library
from rolecall.policy.head_ops import _SOURCE, Head, HeadPass

pytestmark = pytest.mark.usefixtures("fast_paths")
needs_compiler = pytest.mark.skipif(library(_SOURCE) is None, reason="no C compiler")


def passes(monkeypatch, head):
    """(compiled, in torch)."""
    compiled = HeadPass(head)
    monkeypatch.setenv("ROLECALL_KERNELS", "0")
    plain = HeadPass(head)
    assert compiled._kernels is not None
    assert plain._kernels is None
    return compiled, plain


@needs_compiler
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_compiled_and_torch_agree(monkeypatch, dtype, close, temperature, which):
    torch.manual_seed(0)
    head = Head(weight=torch.randn(3001, 8).to(dtype), temperature=temperature, logit_scale=1.5)
    compiled, plain = passes(monkeypatch, head)
    raw, targets = torch.randn(7, 3001).mul_(4).to(dtype), torch.randint(0, 3001, (7,))
    found, wanted = compiled.score(raw, targets), plain.score(raw, targets)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    grads = [torch.randn(7) if which in (name, "both") else None for name in ("logprobs", "entropy")]
    a = compiled.gradient(raw.clone(), targets, wanted[2], wanted[1], *grads)
    b = plain.gradient(raw.clone(), targets, wanted[2], wanted[1], *grads)
    assert a.dtype == b.dtype == dtype
    torch.testing.assert_close(a.float(), b.float(), rtol=close, atol=1e-5)


@needs_compiler
def test_the_gradient_is_that_of_autograd():
    torch.manual_seed(1)
    head = Head(weight=torch.randn(97, 8), temperature=1.3)
    raw, targets = torch.randn(5, 97, dtype=torch.float64), torch.randint(0, 97, (5,))
    up, sideways = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    leaf = raw.clone().requires_grad_()
    logprobs = (leaf / 1.3).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    (wanted,) = torch.autograd.grad((chosen * up + entropy * sideways).sum(), leaf)
    over, single = HeadPass(head), raw.float()
    _, h, lse = over.score(single, targets)
    found = over.gradient(single, targets, lse, h, up.float(), sideways.float())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9), vocab=st.integers(1, 2500), scale=st.sampled_from([0.0, 1.0, 80.0]), seed=st.integers(0, 99)
)
def test_scores_are_those_of_float64(rows, vocab, scale, seed):
    torch.manual_seed(seed)
    raw, targets = torch.randn(rows, vocab) * scale, torch.randint(0, vocab, (rows,))
    logprobs, entropy, lse = HeadPass(Head(weight=torch.zeros(vocab, 2))).score(raw, targets)
    exact = raw.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), raw.double().logsumexp(-1), rtol=1e-5, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_stay_visible(bad):
    raw = torch.zeros(2, 50)
    raw[1, 7] = bad
    logprobs, _, _ = HeadPass(Head(weight=torch.zeros(50, 2))).score(raw, torch.tensor([3, 3]))
    assert logprobs[0].isfinite()
    assert not logprobs[1].isfinite()
