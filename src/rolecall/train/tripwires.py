"""What must hold at every step, checked while training: tensors in, a finding or None out.

A finding names the rule that was broken, the numbers, the worst rows, and what to do. Whoever checks turns it into a
`Tripwire`, which ends the run: a run that breaks one of these rules learns something else than it was asked to.

Bands for log-probs are stated per dtype. Largest differences measured on the built-in model over 25 updates of 48
answers, micro-batches cut differently each time, with and without an adapter:

| policy, engine       | |log ratio| at the first step, max | engine against trainer, mean |
|----------------------|------------------------------------|------------------------------|
| float32, float32     | 5e-7                               | 4e-7                         |
| float32, bfloat16    | 2e-6                               | 8e-3                         |
| bfloat16, bfloat16   | 5e-3                               | 2e-3                         |
| bfloat16, float32    | 9e-3                               | 7e-3                         |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rolecall.errors import UserError
from rolecall.maths.reduce import position_weights, sequence_lengths
from rolecall.policy.model import Outputs
from rolecall.train.step import Loss, Term, trained
from rolecall.types import Batch

SHOWN = 3
"""Rows that a finding names."""

_RATIO_BOUND, _RATIO_BOUND_BF16 = 1e-4, 0.1
_ENGINE_BAND, _ENGINE_BAND_BF16 = 1e-4, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A broken rule."""

    name: str
    """The tripwire, such as reward-sum."""
    what: str
    """What was found, as the beginning of a sentence."""
    remedy: str
    """What it usually means and what to do."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured, and what is allowed."""
    rows: Sequence[int] = ()
    """The worst rows of the checked batch, worst first."""


class Tripwire(UserError, RuntimeError):
    """Something that must hold while training does not. The run ends; the last checkpoint is from before."""

    def __init__(self, finding: Finding, *, step: int, samples: Sequence[tuple[int, int]]) -> None:
        """`step` counts from 1; `samples` are (group, episode) of the worst offenders."""
        self.finding, self.name, self.step, self.samples = finding, finding.name, step, tuple(samples)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in finding.numbers.items())
        worst = ", ".join(f"group {group} episode {episode}" for group, episode in samples)
        super().__init__(
            f"tripwire {finding.name} at step {step}: {finding.what}"
            + (f" ({numbers})" if numbers else "")
            + (f"; worst: {worst}" if worst else "")
            + f". {finding.remedy}",
            exit_code=1,
        )


def ratio_bound(policy: torch.dtype) -> float:
    """The largest |log ratio| two forward passes of the same weights may show."""
    return _RATIO_BOUND if policy in (torch.float32, torch.float64) else _RATIO_BOUND_BF16


def engine_band(policy: torch.dtype, engine: torch.dtype) -> float:
    """How far the engine's log-probs may be from the trainer's, as the mean of |difference|."""
    exact = {torch.float32, torch.float64}
    return _ENGINE_BAND if policy in exact and engine in exact else _ENGINE_BAND_BF16


def reward_sum(
    rewards: Tensor, scores: Tensor, kl: Tensor | None, eligible: Tensor, *, kl_coef: float
) -> Finding | None:
    """Invariant 3: rewards on eligible positions add up to score + KL part in every row, and lie nowhere else.

    `kl` is None if it is not part of the reward. A failed score (NaN) counts as 0, and so does all of a row without an
    eligible position.
    """
    part = torch.zeros_like(rewards) if kl is None else -kl_coef * torch.where(eligible, kl, 0)
    wanted = torch.where(eligible.any(dim=1), scores.nan_to_num(nan=0.0), 0).double() + part.double().sum(dim=1)
    inside = torch.where(eligible, rewards, 0).double()
    stray = torch.where(eligible, 0, rewards).double().abs().sum(dim=1)
    slack = 1e-5 * (1 + scores.nan_to_num(nan=0.0).double().abs() + part.double().abs().sum(dim=1))
    off = (inside.sum(dim=1) - wanted).abs()
    bad = ~(off <= slack) | ~(stray == 0)
    if not bad.any():
        return None
    worst = _worst(torch.where(bad, off + stray, 0))
    return Finding(
        name="reward-sum",
        what=f"in {int(bad.sum())} of {len(bad)} answers the rewards do not add up to the score and its KL part",
        numbers={
            "rewards on eligible positions": float(inside[worst[0]].sum()),
            "score + KL part": float(wanted[worst[0]]),
            "rewards elsewhere": float(stray[worst[0]]),
        },
        rows=worst,
        remedy="A score that sits on a position that does not train is lost: place it on the last eligible one with "
        "shaping.shape_rewards, by role and never by token value.",
    )


def first_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, bound: float) -> Finding | None:
    """Invariant 6: at the first optimiser step of fresh data the policy is the one the ratio is taken from."""
    gap = _gap(logprobs, old_logprobs, mask)
    if bool((gap <= bound).all()):
        return None
    return Finding(
        name="ratio-at-first-step",
        what="the ratio is not 1 at the first optimiser step of a fresh rollout",
        numbers={"max |log ratio|": _max(gap), "allowed": bound},
        rows=_worst(gap.amax(dim=1)),
        remedy="Old log-probs come from other weights, another temperature or other tokens than the update: score them "
        "with the policy as it is right before the update, without dropout.",
    )


def kl_at_start(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, bound: float) -> Finding | None:
    """Invariant 6: before the first update the policy is the reference."""
    gap = _gap(logprobs, ref_logprobs, mask)
    if bool((gap <= bound).all()):
        return None
    return Finding(
        name="kl-at-start",
        what="the policy differs from the reference before anything was trained",
        numbers={"max |log-prob - reference log-prob|": _max(gap), "allowed": bound},
        rows=_worst(gap.amax(dim=1)),
        remedy="The reference is not the model that training starts from (another checkpoint, an adapter that is not "
        "empty, another temperature): make it from the policy before the first step.",
    )


def engine_mismatch(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, band: float) -> Finding | None:
    """Invariant 7: the engine's log-probs are the trainer's, on average over the answers' tokens."""
    gap = _gap(logprobs, behaviour_logprobs, mask)
    mean = float(gap.sum() / mask.sum().clamp(min=1))
    if mean <= band:
        return None
    return Finding(
        name="engine-mismatch",
        what="the engine does not sample from the policy that is trained",
        numbers={"mean |difference| of log-probs": mean, "allowed": band, "max": _max(gap)},
        rows=_worst(gap.sum(dim=1) / mask.sum(dim=1).clamp(min=1)),
        remedy="The engine has old weights, or scores at another temperature, in another dtype or with other tokens: "
        "compare sampling.temperature and engine.dtype with the trainer's, and look at engine.load.",
    )


def contributions(parts: Mapping[str, Tensor], mask: Tensor) -> Finding | None:
    """Invariant 2, in the value: positions that do not train contribute exactly 0, the others something finite."""
    for name, part in parts.items():
        stray = torch.where(mask, 0, part)
        if bool((stray != 0).any()):  # NaN is not 0 either
            rows = stray.nan_to_num(nan=torch.inf).abs().amax(dim=1)
            return Finding(
                name="untrained-contribution",
                what=f"loss term {name!r} counts {int((stray != 0).sum())} positions that do not train",
                numbers={"sum of |contribution| there": float(stray.abs().sum())},
                rows=_worst(rows),
                remedy="The term's mask lets through what its verdict leaves out: use step.trained(batch), or a part "
                "of it.",
            )
        if not bool(part.isfinite().all()):
            return Finding(
                name="not-finite",
                what=f"loss term {name!r} is not finite at {int((~part.isfinite()).sum())} trained positions, though "
                "the gradient is",
                rows=_worst((~part.isfinite()).sum(dim=1).double()),
                remedy="An advantage, a log-prob or a return is NaN or infinite there: look at the step's rollouts file.",
            )
    return None


def loss_sum(summed: float, loss: float, *, size: float) -> Finding | None:
    """Invariant 2, in the sum: contributions of all positions (and ranks) add up to the loss that is logged.

    `size` is the sum of |contribution|, which says what rounding may do.
    """
    slack = 1e-6 * max(size, abs(loss)) + 1e-12
    if abs(summed - loss) <= slack:
        return None
    return Finding(
        name="loss-sum",
        what="the contributions of all positions do not add up to the logged loss",
        numbers={"sum of contributions": summed, "loss": loss, "allowed difference": slack},
        remedy="Something is counted twice, not at all, or divided again after the step: a mean over micro-batches or "
        "ranks in place of the sum over one denominator.",
    )


def denominators(
    terms: Mapping[str, Term],
    counts: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    episodes: Tensor | None = None,
) -> Finding | None:
    """Invariant 1, on the step as it was: each term was divided by the count of what it adds up.

    `terms` is the loss of the whole mini-batch as it came out, `counts` the denominators of their masks over all ranks,
    `parts` the contributions that were recorded, computed micro-batch by micro-batch. `episodes` are the batch's.
    """
    for name, term in terms.items():
        lengths = sequence_lengths(term.mask, episodes)
        weights = position_weights(term.mask, mode=term.mode, denominator=counts[name], norm=term.norm, lengths=lengths)
        wanted = term.coef * weights * torch.where(term.mask, term.values, 0).double()
        off = (wanted - parts[name]).abs()
        slack = 1e-5 * float(wanted.abs().max() if wanted.numel() else 0) + 1e-9  # a rank may have no row
        if bool((off <= slack).all()):
            continue
        return Finding(
            name="denominators",
            what=f"loss term {name!r} is not what its mask and mode say for the whole mini-batch",
            numbers={
                "term as recorded": float(parts[name].sum()),
                "term recounted": float(wanted.sum()),
                "denominator": float(counts[name]),
            },
            rows=_worst(off.amax(dim=1)),
            remedy="The mask changes with the outputs, or a value depends on which rows share its micro-batch: masks "
            "come from verdicts, and what depends on a ratio is a weight.",
        )
    return None


def untrained_gradient(loss: Loss, outputs: Outputs, batch: Batch) -> Finding | None:
    """Invariant 2, in the gradient: a real backward through the loss of a few rows, twice.

    Positions that do not train hold 0 in the first, and get a gradient of exactly 0. In the second they hold NaN, in the
    outputs and in all that was computed for the batch, and nothing changes at the positions that do.
    """
    mask = trained(batch)
    total, plain = _gradients(loss, outputs, batch, mask, fill=0.0)
    filled_total, filled = _gradients(loss, outputs, batch, mask, fill=torch.nan)
    for name, gradient in plain.items():
        leak = torch.where(mask, 0, gradient).abs()
        if bool((leak != 0).any()):
            return Finding(
                name="untrained-gradient",
                what=f"the loss has a gradient at {int((leak != 0).sum())} positions that do not train, through {name}",
                numbers={"max |gradient| there": float(leak.max())},
                rows=_worst(leak.amax(dim=1)),
                remedy="An untrained position reaches the loss before it is masked: replace it with torch.where before "
                "any mean or sum over the row, not afterwards.",
            )
    same = all(torch.equal(gradient[mask], filled[name][mask]) for name, gradient in plain.items())
    if same and total == filled_total:
        return None
    return Finding(
        name="untrained-gradient",
        what="what untrained positions hold changes the loss or the gradient of the others",
        numbers={"loss with 0 there": total, "with NaN": filled_total},
        remedy="NaN times 0 is NaN: replace untrained positions with torch.where before any arithmetic.",
    )


def weights_moved(*, moved: bool, could: bool, should: bool, exact: bool) -> Finding | None:
    """Invariant 8: weights moved if and only if the optimiser's update was not zero.

    `could` is False if no step was taken or every learning rate is 0; `should` is True if a step with a gradient and a
    learning rate above 0 was taken; `exact` is False where bfloat16 weights may round an update away.
    """
    if moved and not could:
        return Finding(
            name="weights-moved",
            what="the weights changed though no optimiser step could have changed them",
            remedy="Something else writes to them: a merge that is not undone, an evaluation that trains, an optimiser "
            "that steps after a gradient that was not finite.",
        )
    if should and not moved:
        rounding = (
            "The parameters that the optimiser holds are not those of the policy, or they do not require a gradient"
        )
        return Finding(
            name="weights-moved",
            what="the optimiser took a step with a gradient, and not one bit of the weights changed",
            remedy=rounding
            + (
                ": make the optimiser from the module that trains."
                if exact
                else "; or bfloat16 rounds "
                "every change away: train float32 weights (policy.dtype), or raise the learning rate."
            ),
        )
    return None


def engine_sync(*, engine: str, trainer: str, version: int, expected: int) -> Finding | None:
    """Invariant 8: after a sync the engine holds the trainer's weights, and says so by its version."""
    if engine == trainer and version == expected:
        return None
    what = "the engine's weights are not the trainer's" if engine != trainer else "the engine has the wrong version"
    return Finding(
        name="engine-sync",
        what=f"{what} after a sync (engine {engine[:12]}, trainer {trainer[:12]})",
        numbers={"engine version": version, "expected": expected},
        remedy="The update never reached the sampler: engine.load must take every weight, with an adapter merged in.",
    )


def _gradients(
    loss: Loss, outputs: Outputs, batch: Batch, mask: Tensor, *, fill: float
) -> tuple[float, dict[str, Tensor]]:
    """The loss of some rows and its gradient with respect to each output, untrained positions set to `fill`."""
    given = outputs._asdict().items()
    leaves = {
        name: torch.where(mask, tensor.detach().float(), fill).requires_grad_()
        for name, tensor in given
        if tensor is not None
    }
    held = Outputs(leaves["logprobs"], leaves["entropy"], leaves.get("values"), leaves.get("kl"))
    computed: dict[str, Any] = {
        name: torch.where(mask, tensor, fill)
        for name, tensor in batch.tensors()
        if tensor.is_floating_point() and tensor.dim() == 2
    }
    with torch.enable_grad():
        total = torch.zeros((), dtype=torch.float64)
        for term in loss(held, replace(batch, **computed)).values():
            weights = position_weights(term.mask, mode=term.mode, norm=term.norm)
            total = total + term.coef * (weights * torch.where(term.mask, term.values, 0)).sum()
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if total.requires_grad:
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return float(total.detach()), gradients


def _gap(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, a - b, 0).double().abs()


def _max(gap: Tensor) -> float:
    return float(gap.max()) if gap.numel() else 0.0


def _worst(badness: Tensor) -> list[int]:
    """Rows by how bad they are, worst first; those that are fine are left out."""
    order = badness.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True)[:SHOWN]
    return [int(row) for row in order if badness[row] != 0]
