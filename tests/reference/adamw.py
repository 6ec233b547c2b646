"""AdamW with a clipped gradient, as written in the paper (arXiv 1711.05101), in float64."""

import math
from typing import Any

import torch
from torch import Tensor


class AdamW:
    """Moves `parameters` in place; `how` holds the options of `optim`."""

    def __init__(self, parameters: dict[str, Tensor], how: dict[str, Any]) -> None:
        self.parameters, self.how, self.updates = parameters, how, 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}

    def step(self, loss: Tensor, *, done: int) -> float:
        """One step down the gradient of the loss, `done` steps of the run being done; returns the norm before clipping."""
        names, how = list(self.parameters), self.how
        found = torch.autograd.grad(loss, [self.parameters[name] for name in names], allow_unused=True)
        grads = {n: torch.zeros_like(self.parameters[n]) if g is None else g for n, g in zip(names, found, strict=True)}
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        limit = how["max_grad_norm"]
        clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        warm = min(1.0, (done + 1) / how["warmup_steps"]) if how["warmup_steps"] else 1.0
        self.updates += 1
        with torch.no_grad():
            for name, p in self.parameters.items():
                critic = name.startswith(("value_head.", "critic."))
                lr = warm * (how["critic_lr"] if critic and how["critic_lr"] is not None else how["lr"])
                first, second = self.moments[name]
                grad = clip * grads[name]
                first.mul_(how["beta1"]).add_((1 - how["beta1"]) * grad)
                second.mul_(how["beta2"]).add_((1 - how["beta2"]) * grad**2)
                if p.dim() >= 2:
                    p.mul_(1 - lr * how["weight_decay"])
                mean = first / (1 - how["beta1"] ** self.updates)
                spread = (second / (1 - how["beta2"] ** self.updates)).sqrt()
                p.sub_(lr * mean / (spread + 1e-8))
        return norm
