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


@pytest.mark.parametrize(
    ("row_ends", "chunk", "parts"),
    [
        ([8, 16, 24, 32, 40], 16, [(0, 16), (16, 32), (32, 40)]),
        ([8, 16, 24, 32, 40], 17, [(0, 16), (16, 32), (32, 40)]),
        ([20, 22, 40], 10, [(0, 20), (20, 22), (22, 40)]),  # rows longer than a chunk are parts of their own
        ([0, 5, 5, 40, 40], 40, [(0, 40)]),
        ([0, 5, 5, 40, 40], 5, [(0, 5), (5, 40)]),
    ],
)
@pytest.mark.parametrize("term", ["logprobs", "entropy", "values", "nothing"])
def test_a_loss_is_given_whole_rows_in_parts_and_any_of_its_terms(row_ends, chunk, parts, term):
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(n, WIDTH, generator=draw, dtype=torch.float64).requires_grad_() for n in (ROWS, VOCAB)
    )
    values = torch.randn(ROWS, generator=draw, dtype=torch.float64).requires_grad_()
    targets, seen = torch.randint(VOCAB, (ROWS,), generator=draw), []

    def loss(logprobs, entropy, values, start, stop):
        seen.append((start, stop))
        of = {"logprobs": logprobs, "entropy": entropy, "values": values, "nothing": torch.zeros(stop - start)}[term]
        return (of * torch.arange(start, stop)).sum()

    given = values if term == "values" else None
    found = fused_loss(hidden, Head(weight=weight), targets, loss, row_ends=row_ends, values=given, chunk=chunk).loss
    assert seen == parts
    logprobs = (hidden @ weight.T).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    expected = loss(logprobs.gather(1, targets[:, None])[:, 0], entropy, values, 0, ROWS)
    torch.testing.assert_close(found.detach(), expected.detach().to(found.dtype))
    if term != "nothing":
        for x in (hidden, weight, values):
            mine, right = (
                torch.autograd.grad(y, x, retain_graph=True, allow_unused=True)[0] for y in (found, expected)
            )
            torch.testing.assert_close(0 * x if mine is None else mine, 0 * x if right is None else right)


@pytest.mark.parametrize("compiled", ["1", "0"])
@pytest.mark.parametrize("way", [apart, fused])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [8, 24, 100])
def test_chunks_add_up_and_filling_adds_nothing(way, bias, chunk, compiled, monkeypatch):
    monkeypatch.setenv("ROLECALL_KERNELS", compiled)
    expected = gradients(plainly, bias=bias, mixed=False)
    for got, right in zip(gradients(way(chunk), bias=bias, mixed=True), expected, strict=True):
        assert (got - right).norm() / right.norm() < 0.02
