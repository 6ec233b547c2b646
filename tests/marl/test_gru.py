"""The GRU with a gradient written out is torch's."""

import pytest
import torch
from torch import nn

from rolecall.marl.nets import GRU

TIME, ROWS, INPUTS, HIDDEN = 6, 3, 4, 5


def pair(dtype: torch.dtype = torch.float64) -> tuple[GRU, nn.GRU]:
    torch.manual_seed(0)
    ours = GRU(INPUTS, HIDDEN)
    torch.manual_seed(0)
    return ours.to(dtype), nn.GRU(INPUTS, HIDDEN).to(dtype)


def test_parameters_have_torchs_names_and_beginnings() -> None:
    ours, theirs = pair()
    held = ours.state_dict()
    assert list(held) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(held[name], tensor)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_all_gradients_are_torchs(remembers: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, memory = torch.randn(TIME, ROWS, INPUTS, dtype=dtype), torch.randn(1, ROWS, HIDDEN, dtype=dtype)
    wanted, at_end = torch.randn(TIME, ROWS, HIDDEN, dtype=dtype), torch.randn(1, ROWS, HIDDEN, dtype=dtype)
    found = []
    for net in pair(dtype):
        seen, held = x.clone().requires_grad_(), memory.clone().requires_grad_()
        out, after = net(seen, held if remembers else None)
        ((out * wanted).sum() + (after * at_end).sum()).backward()
        gradients = [seen.grad, *(p.grad for p in net.parameters()), *([held.grad] if remembers else [])]
        found.append([out.detach(), after.detach(), *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_gradient_is_that_of_finite_differences() -> None:
    ours, _ = pair()
    x = torch.randn(TIME, ROWS, INPUTS, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(1, ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    names = list(ours.state_dict())

    def walk(x: torch.Tensor, memory: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(ours, dict(zip(names, weights, strict=True)), (x, memory))[0]

    assert torch.autograd.gradcheck(walk, (x, memory, *ours.parameters()))


def test_without_gradient_step_by_step_or_all_at_once_is_the_same() -> None:
    ours, _ = pair()
    x = torch.randn(TIME, ROWS, INPUTS, dtype=torch.float64)
    trained = ours(x)[0]
    with torch.inference_mode():
        whole, after = ours(x)
        held, steps = None, []
        for t in range(TIME):
            out, held = ours(x[t : t + 1], held)
            steps.append(out)
    assert torch.equal(whole, trained)  # PPO's first ratio is exactly 1
    torch.testing.assert_close(torch.cat(steps), whole)
    torch.testing.assert_close(held, after)
