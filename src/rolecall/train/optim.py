"""The optimiser and its learning rate over time."""

import math

import torch
from torch import nn

from rolecall.config.parts import OptimOptions


def make_optimizer(module: nn.Module, options: OptimOptions) -> torch.optim.AdamW:
    """AdamW over the parameters that train: matrices decay, the critic has its own learning rate."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            critic = name.startswith(("value_head.", "critic."))
            groups.setdefault((critic, parameter.dim() >= 2), []).append(parameter)
    made = []
    for (critic, matrix), parameters in groups.items():
        lr = options.critic_lr if critic and options.critic_lr is not None else options.lr
        decay = options.weight_decay if matrix else 0.0
        made.append({"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(made, betas=(options.beta1, options.beta2), fused=True)


def lr_factor(step: int, *, steps: int, options: OptimOptions) -> float:
    """What the learning rate is multiplied by at a step (counted from 0): warm-up, then the schedule down to the end."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
    if options.schedule == "linear":
        return max(0.0, 1 - done)
    if options.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return 1.0


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's learning rate; the policy's is returned."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
