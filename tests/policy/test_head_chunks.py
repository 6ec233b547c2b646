"""The head's gradient in bfloat16: summed over chunks, and nothing of the rows that fill a chunk up."""

import pytest
import torch

from rolecall.policy.head_ops import Head
from rolecall.policy.logprobs import fused_loss, token_logprobs

ROWS, WIDTH, VOCAB = 40, 16, 50


def gradients(score, *, bias, mixed):
    """Of the hidden states, the head's weight and bias, for the mean of weighted log-probs."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=draw).requires_grad_()
    weight = (0.3 * torch.randn(VOCAB, WIDTH, generator=draw)).requires_grad_()
    offset = torch.randn(VOCAB, generator=draw).requires_grad_() if bias else None
    targets = torch.randint(VOCAB, (ROWS,), generator=draw)
    worth = torch.randn(ROWS, generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        score(hidden, weight, offset, targets, worth).backward()
    return [x.grad for x in (hidden, weight, offset) if x is not None]


def plainly(hidden, weight, bias, targets, worth):
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    return -(worth * logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]).sum() / ROWS


def apart(chunk):
    def score(hidden, weight, bias, targets, worth):
        found = token_logprobs(hidden, weight, targets, chunk=chunk, bias=bias)
        return -(worth * found.logprobs).sum() / ROWS

    return score


def fused(chunk):
    def score(hidden, weight, bias, targets, worth):
        def loss(logprobs, entropy, values, start, stop):
            return -(worth[start:stop] * logprobs).sum() / ROWS

        head = Head(weight=weight, bias=bias)
        return fused_loss(hidden, head, targets, loss, row_ends=range(8, ROWS + 1, 8), chunk=chunk).loss

    return score


@pytest.mark.parametrize("compiled", ["1", "0"])
@pytest.mark.parametrize("way", [apart, fused])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [8, 24, 100])
def test_chunks_add_up_and_filling_adds_nothing(way, bias, chunk, compiled, monkeypatch):
    monkeypatch.setenv("ROLECALL_KERNELS", compiled)
    expected = gradients(plainly, bias=bias, mixed=False)
    for got, right in zip(gradients(way(chunk), bias=bias, mixed=True), expected, strict=True):
        assert (got - right).norm() / right.norm() < 0.02
