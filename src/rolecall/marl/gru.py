"""A GRU over whole episodes whose gradient is written out: a few operations per step instead of a graph of them.

    r, z = sigmoid(x W_r + h U_r), sigmoid(x W_z + h U_z)        biases left out
    n = tanh(x W_n + r (h U_n))
    h' = (1 - z) n + z h

Parameters, their names, their random beginning and the numbers are torch.nn.GRU's with one layer. What does not depend on
the step before is one product for all steps: the inputs' part going forward, the gradients of weights and inputs going
back. Episodes have tens of steps with tens of rows, where recording every operation costs more than the arithmetic.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class GRU(nn.Module):
    """`torch.nn.GRU(inputs, hidden)`."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [time, rows, inputs] -> [time, rows, hidden], and the memory [1, rows, hidden] after the last step."""
        weights = self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0
        before = x.new_zeros(x.shape[1], self.weight_hh_l0.shape[1]) if memory is None else memory[0]
        out: Tensor
        if torch.is_grad_enabled():
            out = _Walk.apply(x, before, *weights)
        elif len(x) == 1:  # agents that act
            out = torch.gru_cell(x[0], before, *weights)[None]
        else:
            out = _walk(x, before, *weights)[0][1:]
        return out, out[-1:]


class _Walk(torch.autograd.Function):
    """The steps one after the other, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor, *weights: Tensor) -> Tensor:
        states, gates, new = _walk(x, before, *weights)
        ctx.save_for_backward(x, states, gates, new, weights[0], weights[1])
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With d the gradient of h' at a step, that of what goes into r, z and n is d times factors known beforehand."""
        x, states, gates, new, w_in, w_state = ctx.saved_tensors
        hidden, time = new.shape[-1], len(new)
        reset, keep, remembered = gates.chunk(3, -1)  # r, z, h U_n
        into_new = (1 - keep) * (1 - new.square())
        factors = torch.empty_like(gates)
        r, z, n = factors.chunk(3, -1)
        torch.mul(into_new, reset, out=n)
        torch.mul(n, (1 - reset) * remembered, out=r)
        torch.mul(states[:-1] - new, keep * (1 - keep), out=z)
        back = torch.empty(time + 1, *grad.shape[1:], dtype=grad.dtype)
        back[0] = 0
        back[1:] = grad
        d = gates.new_empty(gates.shape)  # of h U + bias, all steps
        wide, steps = factors.unflatten(-1, (3, hidden)).unbind(), d.unflatten(-1, (3, hidden)).unbind()
        at, flat, kept = back.unbind(), d.unbind(), keep.unbind()
        for t in reversed(range(time)):
            torch.mul(at[t + 1][:, None], wide[t], out=steps[t])
            at[t].addcmul_(at[t + 1], kept[t]).addmm_(flat[t], w_state)
        rows = d.flatten(0, 1)
        grad_state, grad_bias_state = rows.t() @ states[:-1].flatten(0, 1), rows.sum(0)
        torch.mul(back[1:], into_new, out=d[..., 2 * hidden :])  # of x W + bias: the same but for n
        grad_x = (rows @ w_in).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, back[0], rows.t() @ x.flatten(0, 1), grad_state, rows.sum(0), grad_bias_state


def _walk(
    x: Tensor, before: Tensor, w_in: Tensor, w_state: Tensor, b_in: Tensor, b_state: Tensor
) -> tuple[Tensor, ...]:
    """The states [1 + time, rows, hidden], the first being `before`; r, z and h U_n side by side; and n."""
    (time, rows, _), hidden = x.shape, before.shape[-1]
    states = x.new_empty(time + 1, rows, hidden)
    states[0] = before
    gates = torch.addmm(b_in, x.flatten(0, 1), w_in.t()).view(time, rows, 3 * hidden)
    new = gates[..., 2 * hidden :].contiguous()
    gates[..., 2 * hidden :] = 0
    gates += b_state
    w_state = w_state.t()
    at, both, news = states.unbind(), gates.unbind(), new.unbind()
    opened, remembered = gates[..., : 2 * hidden].unbind(), gates[..., 2 * hidden :].unbind()
    reset, keep = gates[..., :hidden].unbind(), gates[..., hidden : 2 * hidden].unbind()
    for t in range(time):
        both[t].addmm_(at[t], w_state)
        opened[t].sigmoid_()
        news[t].addcmul_(reset[t], remembered[t]).tanh_()
        torch.lerp(news[t], at[t], keep[t], out=at[t + 1])
    return states, gates, new
