"""The numbers of an RL step, by TRL's names where it has one (docs/metrics.md), and the step in words."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rolecall.config.rl import AlgorithmOptions
from rolecall.maths.advantages import flat_groups
from rolecall.maths.kl import kl_estimate
from rolecall.maths.losses import ratio
from rolecall.maths.roles import Role, TrainRule, Verdict
from rolecall.recipes.algorithms import clipped, required
from rolecall.recipes.collect import Resampled
from rolecall.recipes.experience import MiniStep, Rollout, nan_for_none
from rolecall.train.metrics import Meter
from rolecall.train.step import trained
from rolecall.types import Finish

_LEFT_OUT = (Verdict.BLACKOUT, Verdict.TRUNCATED, Verdict.REWARD_FAILED, Verdict.FLAT_GROUP, Verdict.BAD_RECORD)
"""Verdicts by which tokens that could train do not."""


def measure_rollout(meter: Meter, rollout: Rollout, *, rule: TrainRule) -> None:
    """What was sampled and what it scored, by sequence: the samples of an episode count once."""
    joined, batch = rollout.joined, rollout.sequences
    firsts = [rows[0] for rows in joined.rows]
    assert batch.scores is not None
    scores, include = batch.scores, ~batch.scores.isnan()
    scored, trajectories = [rollout.scored[i] for i in firsts], [rollout.trajectories[i] for i in firsts]
    kl = None if rollout.kl is None else joined.join(rollout.kl)
    meter.mean("reward", scores, include)
    meter.mean("reward_squared", scores.square(), include)
    for name in scored[0].scores:
        part = nan_for_none([s.scores.get(name) for s in scored])
        meter.mean(f"rewards/{name}/mean", part, ~part.isnan())
        meter.mean(f"rewards/{name}/squared", part.square(), ~part.isnan())
    meter.mean("rewards/failed", torch.tensor([float(s.failure is not None) for s in scored]))
    meter.mean("frac_reward_zero_std", flat_groups(scores, batch.groups, include=include).float(), include)

    answer = (batch.roles == Role.CONTENT) | (batch.roles == Role.STOP)
    lengths = answer.sum(dim=1).float()
    ended = torch.tensor([t.finish in (Finish.STOP, Finish.ENVIRONMENT) for t in trajectories])
    meter.mean("completions/mean_length", lengths)
    meter.largest("completions/max_length", lengths)
    meter.smallest("completions/min_length", lengths)
    meter.mean("completions/mean_terminated_length", lengths, ended)
    meter.mean("completions/clipped_ratio", torch.tensor([float(t.finish.truncated) for t in trajectories]))
    meter.total("num_tokens", (batch.roles != Role.PAD).sum())

    eligible = rule.eligible(batch.roles)
    meter.mean("untrainable", (~eligible.any(dim=1)).float())
    recomputed = rollout.batch.old_logprobs is not rollout.batch.behaviour_logprobs
    if recomputed and batch.old_logprobs is not None and batch.behaviour_logprobs is not None:
        alike = eligible if batch.guided is None else eligible & ~batch.guided[:, None]
        _mismatch(meter, batch.old_logprobs, batch.behaviour_logprobs, alike)
    if batch.weights is not None:
        meter.mean("sampling/weight", batch.weights, trained(batch))
        meter.mean("sampling/weight_second", batch.weights.square(), trained(batch))
    if kl is not None:
        meter.mean("kl", kl, eligible)
        meter.mean("kl_per_answer", kl.sum(dim=1))
    if batch.values is not None:
        meter.mean("policy/value", batch.values, eligible)
    if batch.returns is not None and batch.values is not None:
        _explained_variance(meter, batch.returns, batch.values, eligible)
    assert batch.advantages is not None
    assert batch.verdicts is not None
    mask = trained(batch)
    meter.mean("policy/advantage", batch.advantages, mask)
    meter.mean("policy/advantage_abs", batch.advantages.abs(), mask)
    meter.mean("trained_share", mask.float(), batch.roles != Role.PAD)
    for verdict in _LEFT_OUT:
        meter.total(f"untrained_tokens/{verdict.name.lower()}", (batch.verdicts == verdict).sum())


def measure_resampled(meter: Meter, drawn: Resampled) -> None:
    """What dynamic sampling went through."""
    meter.largest("resample/rounds", torch.tensor([float(drawn.rounds)]))
    meter.total("resample/prompts", float(drawn.prompts))
    meter.total("resample/flat", float(drawn.flat))
    # Every score weighs the same, whichever rank has it.
    mean = drawn.score_sum / drawn.scores if drawn.scores else 0.0
    meter.mean("resample/reward", torch.full((drawn.scores,), mean))


def measure_update(
    meter: Meter,
    steps: Sequence[MiniStep],
    o: AlgorithmOptions,
    *,
    engine_alike: bool,
    guided_high: float | None = None,
) -> None:
    """What the optimiser steps did. The first one of a fresh rollout has ratio 1. `guided_high`: upper clip of guided rows.

    With `engine_alike` the first step's outputs show how far trainer and engine are apart: not if old log-probs were
    recomputed, which show it already, and not if the step drops inputs.
    """
    for mini in steps:
        batch, out = mini.batch, mini.result.outputs
        mask = trained(batch) if batch.replayed is None else trained(batch) & ~batch.replayed[:, None]
        if batch.guided is not None:
            _guided(
                meter,
                mini,
                mask & batch.guided[:, None],
                o if guided_high is None else replace(o, clip_high=guided_high),
            )
            mask = mask & ~batch.guided[:, None]
        meter.mean("entropy", out.entropy, mask)
        first = mini.epoch == mini.minibatch == 0
        if first and engine_alike and batch.behaviour_logprobs is not None:
            _mismatch(meter, out.logprobs, batch.behaviour_logprobs, mask)
        old = batch.old_logprobs if batch.old_logprobs is not None else out.logprobs
        rho = ratio(out.logprobs, old, mask)
        meter.mean("policy/ratio", rho, mask)
        meter.largest("policy/ratio_max", rho, mask)
        meter.mean("policy/approx_kl", kl_estimate(old, out.logprobs, mask, kind="k3"), mask)
        low, high = clipped(o, out.logprobs, old, required(batch.advantages), mask)
        meter.mean("clip_ratio/low_mean", low.float(), mask)
        meter.mean("clip_ratio/high_mean", high.float(), mask)
        meter.mean("clip_ratio/region_mean", (low | high).float(), mask)


def _guided(meter: Meter, mini: MiniStep, mask: Tensor, o: AlgorithmOptions) -> None:
    """Rows whose behaviour read lessons: the ratio to it, whatever the loss takes it to, and where their upper clip holds."""
    batch, new = mini.batch, mini.result.outputs.logprobs
    rho = ratio(new, required(batch.behaviour_logprobs), mask)
    meter.mean("lessons/ratio", rho, mask)
    meter.largest("lessons/ratio_max", rho, mask)
    old = new if batch.old_logprobs is None else batch.old_logprobs
    meter.mean("lessons/clip_high", clipped(o, new, old, required(batch.advantages), mask)[1].float(), mask)


def finish(found: dict[str, float]) -> dict[str, float]:
    """Standard deviations from second moments, and aliases."""
    out = dict(found)
    for name in [n for n in out if n.endswith(("squared", "_second"))]:
        second = out.pop(name)
        if name == "reward_squared":
            out["reward_std"] = max(0.0, second - out["reward"] ** 2) ** 0.5
        elif name.startswith("rewards/"):
            base = name.removesuffix("squared")
            out[base + "std"] = max(0.0, second - out[base + "mean"] ** 2) ** 0.5
    if found.get("sampling/weight_second"):
        out["sampling/weight_ess"] = found["sampling/weight"] ** 2 / found["sampling/weight_second"]
    if "critic/residual_second" in found and "critic/return_second" in found:
        residual = found["critic/residual_second"] - found["critic/residual_mean"] ** 2
        spread = found["critic/return_second"] - found["critic/return_mean"] ** 2
        for name in ("critic/residual_mean", "critic/return_mean"):
            out.pop(name, None)
        if spread > 0:
            out["critic/explained_variance"] = 1 - residual / spread
    if "entropy" in out:
        out["policy/entropy"] = out["entropy"]
    return out


def in_words(m: dict[str, float], terms: Sequence[str]) -> str:
    """A short line with the step's numbers; then, a line each, what they mean: of what the loss is made, what is wrong."""
    parts = [f"reward {m['reward']:.3f}" if "reward" in m else "no reward succeeded"]
    if "completions/mean_length" in m:
        parts.append(f"length {m['completions/mean_length']:.1f}")
    if "kl" in m:
        parts.append(f"KL {m['kl']:.4f}")
    if m.get("replay/groups"):
        parts.append(f"{m['replay/groups']:.0f} groups replayed")
    if not terms:
        parts.append("nothing trained")
    return "\n".join([", ".join(parts), *_remarks(m, terms)])


def _remarks(m: dict[str, float], terms: Sequence[str]) -> list[str]:
    if not terms:
        return [f"no position trained, so there was no optimiser step: {_why_untrained(m)}"]
    if m.get("policy/advantage_abs", 1.0) == 0 and m.get("grad_norm", 1.0) == 0:
        return ["every group is flat: all answers to a prompt scored the same, so the gradient is 0"]
    said = [f"the loss is {' + '.join(terms)}{_why_small(m)}"]
    if m.get("weights_moved") == 0 and m.get("learning_rate", 0.0) > 0 and not m.get("skipped"):
        said.append("the weights did not move")
    if m.get("engine_in_sync") == 0:
        said.append("the engine is OUT OF SYNC with the trainer")
    return said


def _why_untrained(m: dict[str, float]) -> str:
    """By what most tokens were left out for."""
    found = {verdict: m.get(f"untrained_tokens/{verdict.name.lower()}", 0.0) for verdict in _LEFT_OUT}
    most = max(found, key=found.__getitem__)
    return (
        f"{most.sentence[0].lower()}{most.sentence[1:].rstrip('.')}"
        if found[most]
        else "no answer has a token to train"
    )


def _why_small(m: dict[str, float]) -> str:
    if abs(m.get("loss", 0.0)) < 1e-3 and abs(m.get("policy/ratio", 1.0) - 1) < 1e-3:
        return ", near 0 since advantages are centred and the ratio is 1; its gradient is not 0"
    return ""


def _mismatch(meter: Meter, trainer: Tensor, engine: Tensor, mask: Tensor) -> None:
    """How far the trainer's log-probs are from those the engine sampled with."""
    mask = mask & engine.isfinite()
    gap = torch.where(mask, trainer - engine, 0).abs()
    meter.mean("sampling/sampling_logp_difference/mean", gap, mask)
    meter.largest("sampling/sampling_logp_difference/max", gap, mask)
    rho = ratio(trainer, engine, mask)
    meter.mean("sampling/importance_sampling_ratio/mean", rho, mask)
    meter.largest("sampling/importance_sampling_ratio/max", rho, mask)
    meter.smallest("sampling/importance_sampling_ratio/min", rho, mask)


def _explained_variance(meter: Meter, returns: Tensor, values: Tensor, mask: Tensor) -> None:
    residual = returns - values
    meter.mean("critic/residual_mean", residual, mask)
    meter.mean("critic/residual_second", residual.square(), mask)
    meter.mean("critic/return_mean", returns, mask)
    meter.mean("critic/return_second", returns.square(), mask)
