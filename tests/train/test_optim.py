"""What the optimiser does to which weights."""

import torch
from torch import nn

from rolecall.config.parts import OptimOptions
from rolecall.train.optim import lr_factor, make_optimizer, set_lr


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.value_head = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)


def stepped(gradient, factor=1.0, **options):
    """How far each weight went in one step down the same gradient everywhere, by name."""
    module = Policy()
    for parameter in module.parameters():
        nn.init.constant_(parameter, 2.0)
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer = make_optimizer(module, OptimOptions(**options))
    if factor is not None:
        set_lr(optimizer, factor)
    optimizer.step()
    return {name: round(2.0 - float(p.detach().mean()), 5) for name, p in module.named_parameters()}


def test_matrices_decay_and_vectors_do_not():
    went = stepped(0.0, lr=0.1, weight_decay=0.5)
    assert {name for name, distance in went.items() if distance} == {"body.weight", "value_head.weight"}
    assert went["body.weight"] == 0.1


def test_the_critic_has_its_own_learning_rate_or_the_policys():
    went = stepped(1.0, lr=0.1, critic_lr=0.3, weight_decay=0.0)
    assert went["value_head.weight"] == went["value_head.bias"] == 0.3
    assert went["body.weight"] == went["norm.weight"] == 0.1
    assert set(stepped(1.0, lr=0.1, weight_decay=0.0).values()) == {0.1}
    half = stepped(1.0, factor=0.5, lr=0.1, critic_lr=0.3, weight_decay=0.0)
    assert (half["value_head.weight"], half["body.weight"]) == (0.15, 0.05)
    assert stepped(1.0, factor=None, lr=0.1, critic_lr=0.3, weight_decay=0.0) == went, "from the start"


def test_the_learning_rate_over_time():
    def factors(**options):
        return [round(lr_factor(step, steps=6, options=OptimOptions(**options)), 3) for step in range(8)]

    assert factors() == [1] * 8
    assert factors(warmup_steps=2) == [0.5] + [1] * 7
    assert factors(warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert factors(schedule="cosine") == [1, 0.933, 0.75, 0.5, 0.25, 0.067, 0, 0]
    assert factors(warmup_steps=6, schedule="cosine")[5:] == [1, 1, 0]
