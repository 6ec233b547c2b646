"""What is tried once, before a run trusts its servers: that every part of their weights can be exchanged, and that they draw from
the distribution they are told to.

A step of a small learning rate moves log-probs less than a server in bfloat16 is off anyway, so a head that stays stale would not be
noticed for long. Weights that were disturbed on purpose are far enough away.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rolecall.policy.load import LoadedModel
from rolecall.types import Completion, Request, Sampling

_NOISE = 0.05
"""Relative. Of SmolLM2's log-probs it moves the mean by 0.67, by 0.43 if only the head is left behind, while bfloat16 is off by
0.04, as without it; scaling whole tensors makes a model in which rounding alone is off by as much as a stale head."""
_PROMPTS, _DRAWS = 4, 64
_STEP = 2**41 + 1
_DEVIATIONS = 5.0


@contextmanager
@torch.no_grad()
def disturbed(own: Mapping[str, Tensor]) -> Iterator[None]:
    """Weights with noise, in place, for the time of the `with`; then they are what they were, to the last bit. Those that are all
    zero, such as half of a new adapter, are noise alone."""
    kept = {name: parameter.detach().clone() for name, parameter in own.items()}
    try:
        for parameter in own.values():
            random = torch.Generator(parameter.device).manual_seed(parameter.numel())
            noise = torch.randn(parameter.shape, generator=random, device=parameter.device, dtype=torch.float32)
            if parameter.any():
                parameter.mul_(1 + _NOISE * noise)
            else:
                parameter.copy_(_NOISE * noise)
        yield
    finally:
        for name, parameter in own.items():
            parameter.copy_(kept[name])


@torch.no_grad()
def draw_requests(
    policy: LoadedModel, sequences: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[Request], Tensor]:
    """Requests for many single tokens after some prompts, and [prompt, token] the log-probs they are to be drawn with.

    Prompts are beginnings of the sequences after which a wrong temperature shows best.
    """
    candidates = [tuple(ids[:n]) for ids in sequences for n in range(2, len(ids), 6)]
    temperature = sampling.scoring_temperature
    found = [_next(policy, ids, temperature) for ids in candidates]
    spread = torch.stack([_moments(logprobs)[1] for logprobs in found])
    best = spread.argsort(descending=True)[:_PROMPTS].tolist()
    plain = Sampling(temperature=temperature, max_new_tokens=1, stop_ids=())
    asked = [
        Request(prompt_ids=candidates[i], sampling=plain, n=_DRAWS, step=_STEP, prompt=number)
        for number, i in enumerate(best)
    ]
    return asked, torch.stack([found[i] for i in best])


def drawn_wrong(drawn: Sequence[Completion], logprobs: Tensor, *, band: float) -> str | None:
    """What shows that the tokens were not drawn with these log-probs; None if it may be chance.

    log p of a token is what tells one temperature from another best: it is the sufficient statistic of the family. What the
    server says of its tokens must be that too, within the `band` of a mean |difference|.
    """
    total, mean, variance, gap = 0.0, 0.0, 0.0, 0.0
    for completion in drawn:
        expected, spread = _moments(logprobs[completion.prompt])
        logprob = float(logprobs[completion.prompt, completion.ids[0]])
        gap += abs(completion.behaviour_logprobs[0] - logprob) / len(drawn)
        total, mean, variance = total + logprob, mean + float(expected), variance + float(spread)
    off = (total - mean) / max(variance, 1e-12) ** 0.5
    if abs(off) > _DEVIATIONS:
        return f"the log-probs of {len(drawn)} tokens that it drew are {off:+.1f} standard deviations off"
    if not gap <= band:
        return f"the log-probs that it gives for its tokens are {gap:.3g} from those of that temperature, {band:.1g} are allowed"
    return None


def _next(policy: LoadedModel, ids: Sequence[int], temperature: float) -> Tensor:
    logits = policy.model(input_ids=torch.tensor([list(ids)], device=policy.model.device)).logits[0, -1]
    return (logits.double().cpu() / temperature).log_softmax(dim=-1)


def _moments(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of log p of a drawn token."""
    mean = (logprobs.exp() * logprobs).sum()
    return mean, (logprobs.exp() * (logprobs - mean).square()).sum()
