"""The algorithms of `rolecall rl`: each is an advantage and a policy loss, and most are one line of either.

    advantage(batch) -> [batch] or [batch, time], or a pair (advantages, returns) where there is a critic
    loss(outputs, batch) -> {term: Term}

`AlgorithmOptions` holds the choices, `Coefficients` the numbers that move while training. What an algorithm needs of the batch
(scores, rewards, values, old and reference log-probs) has been computed before it is asked. docs/algorithms has a page
for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolecall.config.rl import AlgorithmOptions
from rolecall.errors import UserError
from rolecall.maths import advantages as adv
from rolecall.maths import credit, losses
from rolecall.maths.kl import kl_estimate
from rolecall.maths.reduce import MODES, masked_mean, masked_moments, masked_whiten
from rolecall.maths.returns import discounted_returns, gae
from rolecall.maths.roles import TrainRule
from rolecall.policy.model import Outputs
from rolecall.train.step import Loss, Term, trained
from rolecall.types import Batch

Advantage = Callable[[Batch], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Numbers that move while training."""

    max_new_tokens: int
    """The longest answer: the constant length of seq-mean-token-sum-norm."""
    kl_coef: float = 0.0
    """The KL controller's coefficient now."""
    entropy_coef: float = 0.0
    """The entropy bonus's coefficient now."""
    baseline: float = 0.0
    """The moving average of scores, for REINFORCE."""
    bootstrap: Tensor | None = None
    """[batch] values after answers that were cut off, for PPO; None: 0."""
    all_sum: Callable[[Tensor], Tensor] = lambda x: x
    """Adds a tensor over ranks, for statistics of the whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What to optimise."""

    advantage: Advantage
    loss: Loss


# -- advantages: how much better an answer, or a token of it, is than was to be expected ------------------------------


def grpo(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Shao et al. 2024: score minus the group mean, in standard deviations. Or turn by turn, as `credit` says."""
    if o.credit != "episode":
        return turn_credit(o, batch)
    scores, include = effective_score(o, batch), scored(batch)
    if o.scale == "batch":
        centred = adv.grpo(scores, batch.groups, scale=None, include=include)
        return centred / (spread(scores, include, coefficients) + 1e-4)
    return adv.grpo(scores, batch.groups, scale=None if o.scale == "none" else o.scale, include=include)


def turn_credit(o: AlgorithmOptions, batch: Batch) -> Tensor:
    """[batch, time] advantages that differ from turn to turn."""
    scores, include, turns = required(batch.scores), scored(batch), required(batch.turns)
    inside = steps(o, batch) & (turns >= 0)
    if not bool(inside.any()):
        return torch.zeros(inside.shape)
    scores, scale = torch.where(include, scores, 0), None if o.scale == "none" else o.scale
    given, there = credit.by_turn(required(batch.turn_rewards).double(), turns, inside)
    rewards = credit.turn_rewards(scores, given, there)
    if o.credit == "turns":
        found = credit.turn_grpo(rewards, there, batch.groups, gamma=o.turn_gamma, scale=scale, include=include)
    elif o.credit == "adca":
        marks, _ = credit.by_turn(required(batch.turn_marks).double(), turns, inside)
        found = credit.adca(
            *(scores, batch.groups, marks, there), alpha=o.credit_weight, allocate=o.credit_allocate, include=include
        )
    else:
        states, _ = credit.by_turn(required(batch.turn_states), turns, inside)
        how = {"gamma": o.turn_gamma, "weight": o.credit_weight}
        found = credit.gigpo(scores, batch.groups, rewards, states, there, scale=scale, include=include, **how)
    return torch.where(trained(batch), credit.at_positions(found, turns, inside), 0)


def rloo(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Ahmadian et al. 2024: score minus the mean of the *other* answers of its group."""
    return adv.rloo(effective_score(o, batch), batch.groups, include=scored(batch))


def opo(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Hao et al. 2025: score minus the group mean weighted by length."""
    return adv.opo(effective_score(o, batch), trained(batch).sum(dim=1), batch.groups, include=scored(batch))


def remax(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Li et al. 2023: score minus that of the greedy answer to its prompt."""
    greedy = required(batch.baselines)
    return adv.remax(effective_score(o, batch), greedy, include=scored(batch) & ~greedy.isnan())


def reinforce(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Williams 1992: score minus a baseline."""
    scores, include = effective_score(o, batch), scored(batch)
    if o.baseline == "prompt":
        return adv.reinforce(scores, adv.group_mean(scores, batch.groups, include=include), include=include)
    if o.baseline == "mean":
        return adv.reinforce(scores, float(moments(scores, include, coefficients)[0]), include=include)
    return adv.reinforce(scores, coefficients.baseline if o.baseline == "ema" else 0.0, include=include)


def reinforce_pp(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Hu 2025: the rewards from a token on, whitened over all tokens of the batch."""
    returns = discounted_returns(required(batch.rewards), steps(o, batch), gamma=o.gamma)
    return whiten(returns, trained(batch), coefficients)


def reinforce_pp_baseline(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> Tensor:
    """Hu 2025: score minus the group mean, then whitened over all tokens of the batch."""
    scores, include, mask = effective_score(o, batch), scored(batch), trained(batch)
    centred = adv.dr_grpo(scores, batch.groups, include=include)[:, None].expand_as(mask)
    return adv.reinforce_pp_baseline(
        scores, batch.groups, mask, include=include, moments=moments(centred, mask & include[:, None], coefficients)
    )


def ppo(o: AlgorithmOptions, coefficients: Coefficients, batch: Batch) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2017: from a critic by GAE; returns from the *raw* advantages, which are then whitened."""
    rewards, walked = required(batch.rewards), steps(o, batch)
    if o.whiten_rewards:
        # On every eligible position: the score may sit on one that does not train, and GAE has to find it there.
        measured = moments(rewards, walked & trained(batch).any(dim=1, keepdim=True), coefficients)
        rewards = masked_whiten(rewards, walked, shift_mean=False, moments=measured)
    raw, returns = gae(
        rewards, required(batch.values), walked, gamma=o.gamma, lam=o.lam, bootstrap=coefficients.bootstrap
    )
    return whiten(raw, trained(batch), coefficients), returns


ADVANTAGES: dict[str, Callable[[AlgorithmOptions, Coefficients, Batch], Tensor | tuple[Tensor, Tensor]]] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "remax": remax,
    "reinforce": reinforce,
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "ppo": ppo,
}

# -- losses per position, of log-probs, old log-probs, advantages and the mask -----------------------------------------

POLICY_LOSSES: dict[str, Callable[[AlgorithmOptions, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "clip": lambda o, new, old, a, mask: losses.ppo_clip(
        new, old, a, mask, clip_low=o.clip_low, clip_high=o.clip_high, dual_clip=o.dual_clip
    ),
    "gspo": lambda o, new, old, a, mask: losses.gspo(new, old, a, mask, clip_low=o.clip_low, clip_high=o.clip_high),
    "cispo": lambda o, new, old, a, mask: losses.cispo(new, old, a, mask, clip_low=o.clip_low, clip_high=o.clip_high),
    "reinforce": lambda o, new, old, a, mask: losses.reinforce(new, a, mask),
}


def algorithm_of(o: AlgorithmOptions, coefficients: Coefficients) -> Algorithm:
    """The algorithm that the options name."""
    return Algorithm(advantage=partial(ADVANTAGES[o.name], o, coefficients), loss=partial(loss_terms, o, coefficients))


def loss_terms(o: AlgorithmOptions, coefficients: Coefficients, out: Outputs, batch: Batch) -> dict[str, Term]:
    """The policy's loss, the critic's, and what holds the policy back. Without old log-probs the ratio is exactly 1 and
    only its gradient is left."""
    old = out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    values = POLICY_LOSSES[o.policy_loss](o, out.logprobs, old, required(batch.advantages), trained(batch))
    terms = {"policy": policy_term(o, coefficients, weighted(values, batch), batch)}
    if o.critic != "none":
        terms["value"] = value_term(o, out, batch)
    return terms | regularisers(o, coefficients, out, batch)


def boosted(loss: Loss, wider: Loss) -> Loss:
    """A loss whose policy term is that of `wider`, with another upper clip, in rows whose behaviour read lessons. An upper
    clip holds where the advantage is positive: this is AgentEvolver's selective boosting."""

    def mixed(out: Outputs, batch: Batch) -> dict[str, Term]:
        terms = dict(loss(out, batch))
        if batch.guided is not None:
            values = torch.where(batch.guided[:, None], wider(out, batch)["policy"].values, terms["policy"].values)
            terms["policy"] = replace(terms["policy"], values=values)
        return terms

    return mixed


def clipped(o: AlgorithmOptions, new: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, time] bool: where the ratio lies beyond its lower, and its upper clip, and is therefore held there.

    gspo's ratio is that of the answer; cispo holds its weight there whatever the advantage's sign.
    """
    rho = losses.ratio(new, old, mask)
    if o.policy_loss == "gspo":
        mean = masked_mean(torch.where(mask, new - old, 0), mask, dim=1)[:, None]
        rho = torch.where(mask, mean.exp(), 0)
    low, high = mask & (rho < 1 - o.clip_low), mask & (rho > 1 + o.clip_high)
    return (low, high) if o.policy_loss == "cispo" else (low & (a < 0), high & (a > 0))


def value_term(o: AlgorithmOptions, out: Outputs, batch: Batch) -> Term:
    """The critic's squared error."""
    mask = trained(batch)
    value = losses.value_clip(
        required(out.values), required(batch.values), required(batch.returns), mask, clip=o.value_clip
    )
    return Term(values=value, mask=mask, mode="token-mean", coef=o.vf_coef)


def policy_term(
    o: AlgorithmOptions, coefficients: Coefficients, values: Tensor, batch: Batch, coef: float = 1.0
) -> Term:
    """A term that is added up as the options say."""
    norm = (o.norm or float(coefficients.max_new_tokens)) if o.aggregate == "seq-mean-token-sum-norm" else None
    return Term(values=values, mask=trained(batch), mode=o.aggregate, coef=coef, norm=norm)


def regularisers(o: AlgorithmOptions, coefficients: Coefficients, out: Outputs, batch: Batch) -> dict[str, Term]:
    """The KL to the reference, if it is in the loss, and the entropy bonus."""
    mask, terms = trained(batch), {}
    if o.kl_coef and o.kl_in == "loss":
        if o.kl_estimator == "exact":
            kl = torch.where(mask, required(out.kl), 0)
        else:
            kl = kl_estimate(
                out.logprobs, required(batch.ref_logprobs), mask, kind=o.kl_estimator, straight_through=True
            )
        terms["kl"] = policy_term(o, coefficients, kl, batch, coef=coefficients.kl_coef)
    if o.entropy_coef or o.entropy_target is not None:
        values = torch.where(mask, out.entropy, 0)
        terms["entropy"] = Term(values=values, mask=mask, mode="token-mean", coef=-coefficients.entropy_coef)
    return terms


def effective_score(o: AlgorithmOptions, batch: Batch) -> Tensor:
    """[batch] what each answer is worth: its score and, with the KL in the reward, less the KL of all its positions.

    In float64, unless float32 holds the scores exactly and their squares too, as it does for whole numbers and halves.
    """
    scores = required(batch.scores)
    if bool(((scores.float() == scores) | scores.isnan()).all()) and not large(scores):
        scores = scores.float()
    if not (o.kl_coef and o.kl_in == "reward"):
        return scores
    placed = steps(o, batch).any(dim=1) & scored(batch)
    return torch.where(placed, required(batch.rewards).sum(dim=1), scores)


def large(x: Tensor) -> bool:
    """Whether sums of squares may be too large for float32."""
    return bool((x.abs() > 1e15).any())


def steps(o: AlgorithmOptions, batch: Batch) -> Tensor:
    """The positions that rewards and returns walk over."""
    return TrainRule(stop=o.train_stop).eligible(batch.roles)


def moments(x: Tensor, mask: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Mean and variance over all ranks."""
    mean, variance = masked_moments(x, mask, all_sum=coefficients.all_sum)
    return mean.to(x.dtype), variance.to(x.dtype)


def whiten(x: Tensor, mask: Tensor, coefficients: Coefficients) -> Tensor:
    """Unit variance over all ranks, and zero mean."""
    x = torch.where(mask, x, 0)
    x = x.double() if large(x) else x
    return masked_whiten(x, mask, moments=moments(x, mask, coefficients))


def spread(scores: Tensor, include: Tensor, coefficients: Coefficients) -> Tensor:
    """The unbiased standard deviation of all scores on all ranks."""
    count = coefficients.all_sum(include.sum().double())
    return (moments(scores, include, coefficients)[1] * count / (count - 1).clamp(min=1)).sqrt().to(scores.dtype)


def weighted(values: Tensor, batch: Batch) -> Tensor:
    """Per-position values times the batch's importance weights, if it has any."""
    return values if batch.weights is None else values * torch.where(trained(batch), batch.weights, 0)


def scored(batch: Batch) -> Tensor:
    """[batch] bool: rows whose reward did not fail."""
    return ~required(batch.scores).isnan()


def required(tensor: Tensor | None) -> Tensor:
    """A field of the batch that must have been computed."""
    if tensor is None:
        raise ValueError("the algorithm asks for something that was not computed for this batch; see AlgorithmOptions")
    return tensor


def own_advantage(function: Callable[..., Any], *, returns: bool) -> Advantage:
    """`function`, whose results must have the shape of the batch. `returns`: it must give the critic's targets too."""

    def advantage(batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        made, shape = function(batch), batch.ids.shape
        advantages, targets = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        well = isinstance(advantages, Tensor) and advantages.shape in (shape[:1], shape)
        if targets is None:
            well = well and not returns
        else:
            well = well and isinstance(targets, Tensor) and targets.shape == shape
        if well:
            return made
        pair = "a pair (advantages, returns [batch, time]) with advantages" if returns else "a tensor"
        raise UserError(
            f"the advantage function {_name(function)} returned {_shown(made)}; it must return {pair} of shape "
            f"[batch] = {[shape[0]]} or [batch, time] = {list(shape)}"
        )

    return advantage


def own_loss(function: Callable[..., Any]) -> Loss:
    """`function`, whose result must be named terms with a value for every position."""

    def loss(outputs: Outputs, batch: Batch) -> Mapping[str, Term]:
        made, shape = function(outputs, batch), batch.ids.shape
        what = f"the loss function {_name(function)}"
        terms = isinstance(made, Mapping) and all(isinstance(term, Term) for term in made.values())
        if not terms or not made:
            raise UserError(
                f"{what} returned {_shown(made)}; it must return {{name: Term}} with a value for every position, such as "
                "{'policy': Term(values=…, mask=trained(batch), mode='token-mean')} (rolecall.train.step), and leave the "
                "mean to `mode`"
            )
        for name, term in made.items():
            for part in ("values", "mask"):
                held = getattr(term, part)
                if not isinstance(held, Tensor) or held.shape != shape:
                    raise UserError(
                        f"{what} returned {_shown(held)} as {part} of the term {name!r}; they must have the shape "
                        f"[batch, time] = {list(shape)}"
                    )
            if term.mode not in MODES:
                raise UserError(f"{what}: the term {name!r} has mode {term.mode!r}; choose one of {', '.join(MODES)}")
        return made

    return loss


def _name(function: Callable[..., Any]) -> str:
    return f"`{getattr(function, '__name__', type(function).__name__)}`"


def _shown(made: Any) -> str:
    """What was returned, in a few words."""
    if isinstance(made, Tensor):
        return f"a tensor of shape {list(made.shape)}" if made.dim() else "a single number (a tensor of shape [])"
    if isinstance(made, tuple):
        return f"a tuple of {len(made)} ({', '.join(_shown(x) for x in made[:3])})"
    if isinstance(made, Mapping) and made:
        name, value = next(iter(made.items()))
        return f"a {type(made).__name__} in which {name!r} is {_shown(value)}"
    return f"{'an empty' if isinstance(made, Mapping) else 'a'} {type(made).__name__}"
