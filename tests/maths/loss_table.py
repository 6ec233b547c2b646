"""Every loss as a function of the same four tensors, and random inputs for them."""

import torch

from rolecall.maths import losses


def gradient(function, x, *others, **options):
    """d(sum of the losses) / dx."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x, *others, **options).sum(), x)[0]


def random_inputs(seed, shape=(4, 6)):
    """(logprobs, old_logprobs, advantages, mask), with rows that do not count at all among them."""
    random = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, *shape, generator=random, dtype=torch.float64).unbind()
    mask = torch.rand(shape, generator=random) > 0.3
    mask[0] = False
    return logprobs - 2, old * 0.5 + logprobs - 2, advantages, mask


# Every loss of the policy, as f(logprobs, old or behaviour log-probs, advantages, mask).
POLICY = {
    "nll": lambda p, q, a, m: losses.nll(p, m),
    "reinforce": lambda p, q, a, m: losses.reinforce(p, a, m),
    "ppo_clip": lambda p, q, a, m: losses.ppo_clip(p, q, a, m, clip_low=0.2, clip_high=0.28),
    "ppo_clip dual": lambda p, q, a, m: losses.ppo_clip(p, q, a, m, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": lambda p, q, a, m: losses.gspo(p, q, a, m, clip_low=0.1, clip_high=0.2),
    "cispo": lambda p, q, a, m: losses.cispo(p, q, a, m, clip_high=0.5),
    "replay_clipped": losses.replay_clipped,
    "replay_shaped": losses.replay_shaped,
}
WEIGHTS = {
    f"{level} {kind}": lambda p, q, a, m, level=level, kind=kind: losses.importance_weights(
        p, q, m, level=level, kind=kind, low=0.5, high=1.5
    )
    for level in ("token", "sequence")
    for kind in ("truncate", "mask")
}
OTHERS = {
    "ratio": lambda p, q, a, m: losses.ratio(p, q, m),
    "value_clip": lambda p, q, a, m: losses.value_clip(p, q, a, m, clip=0.2),
    "value without clip": lambda p, q, a, m: losses.value_clip(p, q, a, m, clip=None),
    "entropy": lambda p, q, a, m: losses.entropy(torch.stack([p, q, a], dim=-1), m),
}
ALL = POLICY | WEIGHTS | OTHERS
