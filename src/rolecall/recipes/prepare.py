"""From scored trajectories to a batch that trains: verdicts, log-probs, values, KL, rewards, advantages.

The samples of an episode whose context was cut are joined wherever a sequence counts as one (scores, rewards,
advantages) and split again; for all others joining does nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.experience.batches import Joined, collate, lengths_of, runs_in
from rolecall.maths import shaping
from rolecall.maths.advantages import flat_groups
from rolecall.maths.kl import kl_estimate
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.load import LoadedModel
from rolecall.policy.model import Against, Outputs, PolicyModel
from rolecall.policy.sharded import is_sharded
from rolecall.recipes.algorithms import Algorithm, Coefficients, required
from rolecall.recipes.experience import or_nan, with_advantages
from rolecall.recipes.replay import start_weights
from rolecall.train.reference import Reference
from rolecall.train.score import score
from rolecall.train.step import Updater
from rolecall.train.timing import Timer
from rolecall.types import Batch, Finish, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A batch that is ready to train."""

    batch: Batch
    joined: Joined
    kl: Tensor | None
    """[batch, time] KL to the reference at eligible positions, if it was measured."""
    algorithm: Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the answers come from, and what that means for them."""

    old_logprobs: str
    """detach, recompute or behaviour."""
    fresh: bool = True
    """False: answers of earlier steps. They are no samples of the policy, so there is no KL to the reference."""
    recorded: bool = False
    """True: log-probs of the behaviour are needed, and a position without one cannot train."""


class Preparer:
    """Does it with the policy and the reference as they are now."""

    def __init__(
        self,
        options: RLOptions,
        *,
        policy: LoadedModel,
        module: PolicyModel,
        updater: Updater,
        reference: Reference | None,
        timer: Timer,
    ) -> None:
        self.options, self.module, self.updater, self.reference = options, module, updater, reference
        self.timer, self.rule = timer, TrainRule(stop=options.algorithm.train_stop)
        encode = policy.tokenizer
        self._blackout = [tuple(encode(text, add_special_tokens=False)["input_ids"]) for text in options.blackout]

    @property
    def against(self) -> Against | None:
        """What the exact KL is measured to, if it is asked for."""
        if self.reference is None or self.options.algorithm.kl_estimator != "exact":
            return None
        return self.reference.read

    @property
    def _first_step_is_all(self) -> bool:
        """True if the first optimiser step trains on what was just scored. Ranks wait for each other in backward passes,
        so there the two stay apart; and a pass that drops inputs is not the one that scored."""
        one = self.updater.ranks.count == 1 and not (is_sharded(self.module) or self.options.policy.lora_dropout)
        return one and self.options.algorithm.minibatches == 1 and not self.options.replay.on

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        totals: Sequence[float | None],
        source: Source,
        coefficients: Coefficients,
        make: Callable[[Coefficients], Algorithm],
        *,
        baselines: Sequence[float | None] | None = None,
        extras: Sequence[Mapping[str, Any]] = (),
    ) -> Prepared:
        """`make` gives the algorithm once the coefficients are complete; `baselines` are scores of greedy answers, `extras` what
        else is known of each trajectory."""
        joined = Joined(trajectories)
        batch, known = self._scored(trajectories, totals, joined, source, baselines)
        facts = self._facts(trajectories, batch, known, joined, source)
        batch = replace(batch, verdicts=self.rule.verdicts(batch.roles, **facts))
        if self.options.algorithm.credit != "episode":
            batch = replace(batch, **turn_fields(trajectories, extras, joined, width=batch.ids.shape[1]))  # type: ignore[arg-type]
        eligible = self.rule.eligible(batch.roles)
        batch, exact = self._with_logprobs(batch, eligible, source, joined)
        batch, kl = self._with_reference(batch, eligible, known, exact, source)
        batch = self._to_behaviour(batch)
        batch = self._with_rewards(batch, eligible, kl, joined, coefficients)
        cut_off = torch.tensor([t.finish.truncated for t in trajectories])
        if self.options.algorithm.bootstrap_truncated and self.module.has_values:
            coefficients = replace(coefficients, bootstrap=joined.last(self._values_behind(batch, cut_off)))
        algorithm = make(coefficients)
        batch = with_advantages(batch, joined, algorithm.advantage(joined.batch(batch)))
        return Prepared(batch=batch, joined=joined, kl=kl, algorithm=algorithm)

    def score(
        self,
        module: torch.nn.Module,
        batch: Batch,
        wanted: Tensor,
        *,
        against: Against | None = None,
        keep: bool = False,
    ) -> Outputs:
        """What a model says of the wanted positions, without gradient, in the precision of the update."""
        with self.updater.autocast():
            return score(
                module,
                batch,
                wanted,
                temperature=self.options.sampling.scoring_temperature,
                token_budget=self.options.optim.token_budget,
                against=against,
                timer=self.timer,
                keep=keep,
            )

    def _scored(
        self,
        trajectories: Sequence[Trajectory],
        totals: Sequence[float | None],
        joined: Joined,
        source: Source,
        baselines: Sequence[float | None] | None,
    ) -> tuple[Batch, Tensor]:
        """The batch with its scores, and [batch, time] where what is needed of the record is known."""
        batch = collate(trajectories)
        if joined.cut:
            batch = replace(batch, episodes=joined.names)
        aborted = torch.tensor([t.finish is Finish.ABORT for t in trajectories])
        ended = torch.tensor([t.finish in (Finish.STOP, Finish.ENVIRONMENT) for t in trajectories])
        scores = torch.where(aborted, torch.nan, self._shaped_scores(batch, totals, stopped=ended))
        if baselines is not None:  # without its baseline an answer has nothing to be compared with
            batch = replace(batch, baselines=or_nan(baselines))
            scores = torch.where(or_nan(baselines).isnan(), torch.nan, scores)
        if source.fresh and self.options.lessons.on:
            batch = replace(batch, guided=torch.tensor([t.behaviour_prompt_ids is not None for t in trajectories]))
        known = torch.ones(batch.ids.shape, dtype=torch.bool)
        if source.recorded or batch.guided is not None:
            batch, known = _recorded(batch, self.rule.eligible(batch.roles))
        return replace(batch, scores=scores), known

    def _facts(
        self, trajectories: Sequence[Trajectory], batch: Batch, known: Tensor, joined: Joined, source: Source
    ) -> dict[str, Tensor | None]:
        """What speaks against training on a position, for `TrainRule.verdicts`."""
        o, scores = self.options.algorithm, required(batch.scores)
        aborted = torch.tensor([t.finish is Finish.ABORT for t in trajectories])
        include, flat = ~scores.isnan(), None
        if o.drop_flat or (source.fresh and self.options.replay.replace_flat):
            flat = joined.split(flat_groups(joined.first(scores), joined.groups, include=joined.first(include)), 0)
        return {
            "bad_record": aborted[:, None] | ~known,
            "reward_failed": ~include,
            "blackout": runs_in(batch, self._blackout) if self._blackout else None,
            "truncated": torch.tensor([t.finish.truncated for t in trajectories]) if o.drop_truncated else None,
            "flat_group": flat,
        }

    def _shaped_scores(self, batch: Batch, totals: Sequence[float | None], *, stopped: Tensor) -> Tensor:
        """[batch] scores with the recipe's clipping and penalties; NaN where the reward failed."""
        o, scores = self.options.algorithm, or_nan(totals)
        if o.score_clip is not None:
            scores = shaping.clip_scores(scores, limit=o.score_clip)
        if o.missing_stop_penalty:
            scores = shaping.missing_stop_penalty(scores, stopped, penalty=o.missing_stop_penalty)
        if o.overlong_buffer is not None:
            lengths = ((batch.roles == Role.CONTENT) | (batch.roles == Role.STOP)).sum(dim=1)
            limit = self.options.sampling.max_new_tokens
            buffer = ceil(o.overlong_buffer * limit) if o.overlong_buffer < 1 else int(o.overlong_buffer)
            scores = scores + shaping.overlong_penalty(lengths, max_length=limit, buffer=buffer)
        return scores

    def _with_logprobs(
        self, batch: Batch, eligible: Tensor, source: Source, joined: Joined
    ) -> tuple[Batch, Tensor | None]:
        """Old log-probs, values and importance weights; and the exact KL, which comes out of the same pass."""
        exact, against = None, self.against if source.fresh else None
        if source.old_logprobs == "behaviour":
            batch = replace(batch, old_logprobs=batch.behaviour_logprobs)
        if source.old_logprobs == "recompute" or self.module.has_values or against is not None:
            keep = source.fresh and self._first_step_is_all
            old = self.score(self.updater.module, batch, eligible, against=against, keep=keep)
            batch, exact = replace(batch, values=old.values), old.kl
            if source.old_logprobs == "recompute":
                batch = replace(batch, old_logprobs=old.logprobs)
        how = self.options.fresh_weights if source.fresh else None
        if how is not None:
            batch = replace(batch, weights=start_weights(how, batch, joined, inside_only=False))
        return batch, exact

    def _with_reference(
        self, batch: Batch, eligible: Tensor, known: Tensor, exact: Tensor | None, source: Source
    ) -> tuple[Batch, Tensor | None]:
        """The reference's log-probs and the KL to it."""
        if self.reference is None or not source.fresh:
            return batch, None
        with self.reference.module() as frozen:
            batch = replace(batch, ref_logprobs=self.score(frozen, batch, eligible).logprobs)
        if exact is not None:
            return batch, torch.where(eligible & known, exact, 0)
        now = batch.old_logprobs if batch.old_logprobs is not None else batch.behaviour_logprobs
        assert now is not None
        assert batch.ref_logprobs is not None
        return batch, kl_estimate(now, batch.ref_logprobs, eligible & known, kind=self.options.algorithm.kl_estimator)

    def _to_behaviour(self, batch: Batch) -> Batch:
        """The ratio of samples whose behaviour read lessons is to the log-probs that it had; then it holds the weight, too."""
        if batch.guided is None or self.options.lessons.ratio != "behaviour":
            return batch
        guided = batch.guided[:, None]
        assert batch.old_logprobs is not None
        assert batch.behaviour_logprobs is not None
        old = torch.where(guided, batch.behaviour_logprobs, batch.old_logprobs)
        return replace(
            batch, old_logprobs=old, weights=None if batch.weights is None else torch.where(guided, 1, batch.weights)
        )

    def _with_rewards(
        self, batch: Batch, eligible: Tensor, kl: Tensor | None, joined: Joined, coefficients: Coefficients
    ) -> Batch:
        """The score on the last eligible position and, if it belongs there, the KL on all of them."""
        assert batch.scores is not None
        in_reward = kl if self.options.algorithm.kl_in == "reward" else None
        rewards = shaping.shape_rewards(
            joined.first(torch.where(batch.scores.isnan(), 0, batch.scores)).to(torch.get_default_dtype()),
            None if in_reward is None else joined.join(in_reward),
            joined.join(eligible),
            kl_coef=coefficients.kl_coef,
        )
        return replace(batch, rewards=joined.split(rewards, batch.ids.shape[1]))

    def _values_behind(self, batch: Batch, cut_off: Tensor) -> Tensor:
        """[batch] the critic's value after the last token of answers that were cut off, else 0."""
        ends = lengths_of(batch)
        longer = Batch(
            ids=torch.nn.functional.pad(batch.ids, (0, 1)),
            roles=torch.nn.functional.pad(batch.roles, (0, 1)).scatter(1, ends[:, None], int(Role.CONTENT)),
            groups=batch.groups,
        )
        wanted = torch.zeros_like(longer.roles, dtype=torch.bool).scatter(1, ends[:, None], True) & cut_off[:, None]
        values = self.score(self.updater.module, longer, wanted).values
        assert values is not None
        return values.sum(dim=1)


def _recorded(batch: Batch, eligible: Tensor) -> tuple[Batch, Tensor]:
    """The batch with behaviour log-probs in it, and where they are there and finite, if a position may train at all."""
    held = batch.behaviour_logprobs
    if held is None:
        held = torch.full(batch.ids.shape, torch.nan)
    return replace(batch, behaviour_logprobs=held), held.isfinite() | ~eligible


TURN_REWARDS, TURN_STATES, TURN_MARKS = "turn_rewards", "turn_states", "turn_marks"
"""Names in a trajectory's extras: one entry per turn of the agent's whole episode. Marks come from reward functions."""


def turn_fields(
    trajectories: Sequence[Trajectory], extras: Sequence[Mapping[str, Any]], joined: Joined, *, width: int
) -> dict[str, Tensor]:
    """The fields of a batch about turns, which are counted on through the samples of an episode.

    A turn of no tokens is no turn: what was given for it belongs to the one before, or else to the first. Without marks the
    environment's rewards are the marks.
    """
    shape = (len(trajectories), width)
    turns, states = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    rewards, marks = torch.zeros(shape, dtype=torch.float64), torch.full(shape, torch.nan, dtype=torch.float64)
    for rows in joined.rows:
        spans = [(row, *span) for row in rows for span in trajectories[row].turns]
        known = extras[rows[0]] if extras else {}
        given = _of_turns(known, TURN_REWARDS, len(spans)) or [0.0] * len(spans)
        marked = _of_turns(known, TURN_MARKS, len(spans)) or given
        seen = _of_turns(known, TURN_STATES, len(spans)) or [-1 - joined.index[rows[0]].item()] * len(spans)
        number, lost, last = -1, 0.0, None
        for (row, start, end), reward, mark, state in zip(spans, given, marked, seen, strict=True):
            if start == end:
                if last is None:
                    lost += reward
                else:
                    rewards[last] += reward
                continue
            number, last = number + 1, (row, slice(start, end))
            turns[last], states[last] = number, state
            rewards[last], marks[last] = reward + lost, float("nan") if mark is None else mark
            lost = 0.0
    return {"turns": turns, "turn_rewards": rewards, "turn_marks": marks, "turn_states": states}


def _of_turns(known: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    found = known.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != count:
        said = f"{len(found)} of them" if isinstance(found, list) else repr(found)
        raise UserError(
            f"an episode has {count} turns of the policy, but its {name} are {said}: return a list with a number (or None) for "
            "each assistant message of the completion"
        )
    return found
