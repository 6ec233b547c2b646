"""Replay in an RL step: groups of earlier steps beside the fresh ones, and the loss of both.

The policy term counts fresh and replayed positions over one denominator, so that an answer weighs the same whether it is
fresh or not; all other terms (KL, entropy, value) see fresh positions only. Replayed positions have the ratio to the log-probs
that were recorded when they were sampled. Observed groups never enter the update: its bits are those of a run without them.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rolecall.config.experience import ReplayOptions
from rolecall.config.rl import RLOptions
from rolecall.experience.batches import Joined, join
from rolecall.experience.replay import Drawn, Limits, ReplayBuffer, StoredGroup
from rolecall.maths import losses
from rolecall.maths.roles import Verdict
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import required, weighted
from rolecall.recipes.experience import MiniStep, Replayed, Rollout, with_advantages
from rolecall.train.metrics import Meter
from rolecall.train.ranks import Ranks
from rolecall.train.step import Loss, Term, trained
from rolecall.types import Batch, Trajectory

Prepare = Callable[[Sequence[Trajectory], Sequence[float | None]], Batch]
"""Replayed answers and what they scored as a batch with verdicts, log-probs at the start of the update where they are
needed, and advantages among themselves."""

AGES = (1, 2, 4, 8, 16)
"""Where the bins of the age histogram begin."""

_log = logging.getLogger(__name__)


class Replay:
    """The buffer of a run, and what is drawn from it for each step. All ranks hold the same one."""

    def __init__(
        self,
        options: RLOptions,
        *,
        prepare: Prepare,
        own_loss: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """A loss of the user's own (`own_loss`) is left as it is: it finds replayed rows by `batch.replayed`."""
        o = options.replay
        self.options, self._prepare, self._own_loss, self._ranks = options, prepare, own_loss, ranks or Ranks()
        self.buffer = ReplayBuffer(
            Limits(size=o.size, max_staleness=o.max_staleness, max_uses=o.max_uses),
            sampler=o.sampler,
            seed=options.seed,
            answers=o.answers,
            keep_flat=o.keep_flat,
            solved_at=o.solved_at,
            version_decay=o.version_decay,
        )
        self.started = False
        self._said = ""

    def mix(self, rollout: Rollout, *, version: int) -> Rollout:
        """The rollout with replayed groups beside it, as many as its options ask for and the buffer has."""
        o = self.options.replay
        drawn = self._draw(rollout, version)
        batch = joined = None
        if drawn.groups:
            batch = self._batch(drawn.groups, rollout)
            if o.mode != "observe":
                joined = join(rollout.batch, batch)
                if o.normalise == "joint":
                    whole = _sequences(rollout, drawn.groups, joined)
                    joined = with_advantages(joined, whole, rollout.algorithm.advantage(whole.batch(joined)))
                    rollout = dataclasses.replace(rollout, batch=_fresh_part(rollout.batch, joined))
                if not self._own_loss:
                    algorithm = dataclasses.replace(rollout.algorithm, loss=with_replay(rollout.algorithm.loss, o))
                    rollout = dataclasses.replace(rollout, algorithm=algorithm)
        replayed = Replayed(
            groups=drawn.groups,
            wanted=drawn.wanted,
            held=len(self.buffer),
            version=version,
            batch=batch,
            joined=joined,
        )
        return dataclasses.replace(rollout, replay=replayed)

    def remember(self, rollout: Rollout) -> None:
        """Take in the groups of a rollout that has been trained on."""
        rows: dict[int, list[int]] = {}
        for i, trajectory in enumerate(rollout.trajectories):
            rows.setdefault(trajectory.group, []).append(i)
        groups = [
            StoredGroup(
                step=rollout.step + 1,
                places=tuple(places),
                row=rollout.rows[places[0]],
                trajectories=tuple(rollout.trajectories[i] for i in places),
                totals=tuple(rollout.scored[i].total for i in places),
            )
            for places in rows.values()
        ]
        self.buffer.add(sorted(self._ranks.gather(groups), key=lambda group: group.group))

    def mark(self) -> Callable[[], None]:
        """This moment, to come back to, without a copy of what the buffer holds."""
        started, restore = self.started, self.buffer.mark()

        def back() -> None:
            self.started = started
            restore()

        return back

    def state_dict(self) -> dict[str, Any]:
        """The buffer, and whether replay has begun."""
        temperature = self.options.sampling.scoring_temperature
        return {"started": self.started, "temperature": temperature, "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; None is a checkpoint of a run without replay."""
        if state is None:
            return
        self.started = state["started"]
        self.buffer.load_state_dict(state["buffer"])
        now = self.options.sampling.scoring_temperature
        if state["temperature"] != now and len(self.buffer):
            _log.warning(
                "%d groups to replay were sampled at temperature %g, answers are scored at %g now: they are dropped",
                *(len(self.buffer), state["temperature"], now),
            )
            self.buffer.clear()

    def _draw(self, rollout: Rollout, version: int) -> Drawn:
        """This rank's groups: of those that are drawn, each n-th from its own number on."""
        o, batch = self.options.replay, rollout.batch
        assert batch.verdicts is not None
        totals = [scored.total for scored in rollout.scored]
        solved = sum(total >= o.solved_at for total in totals if total is not None)
        flat = batch.groups[(batch.verdicts == Verdict.FLAT_GROUP).any(dim=1)].unique().numel()
        local = torch.tensor([solved, sum(total is not None for total in totals), flat], dtype=torch.float64)
        solved_all, scored_all, flat_all = self._ranks.all_sum(local).tolist()
        self.started = self.started or solved_all >= o.start_when * max(scored_all, 1)
        if not self.started:
            return Drawn(groups=(), wanted=0)
        wanted = round(self.options.prompts * o.share / (1 - o.share))
        wanted += int(flat_all) if o.replace_flat else 0
        wanted -= wanted % self._ranks.count
        drawn = self.buffer.draw(wanted, version=version, step=rollout.step)
        self._say(drawn)
        whole = len(drawn.groups) - len(drawn.groups) % self._ranks.count
        return dataclasses.replace(
            drawn, groups=tuple(self._ranks.share(drawn.groups[:whole])), wanted=wanted // self._ranks.count
        )

    def _say(self, drawn: Drawn) -> None:
        """Once for every reason that comes up, not at every step."""
        reason = "".join(c for c in drawn.why if not c.isdigit()) if drawn.groups else drawn.why and "none"
        if reason and reason != self._said and self._ranks.number == 0:
            _log.info("replay: %s; the step trains on these and on what is fresh", drawn.why)
        self._said = reason

    def _batch(self, groups: Sequence[StoredGroup], rollout: Rollout) -> Batch:
        o = self.options.replay
        # Numbers of their own, so that no replayed group is ever taken for a fresh one.
        trajectories = [
            dataclasses.replace(t, group=-1 - i) for i, group in enumerate(groups) for t in group.trajectories
        ]
        batch = self._prepare(trajectories, [total for group in groups for total in group.totals])
        assert batch.verdicts is not None
        if o.mode == "observe":
            observed = torch.where(trained(batch), int(Verdict.REPLAY_OBSERVED), batch.verdicts)
            return dataclasses.replace(batch, verdicts=observed)
        if o.weights != "none":
            weights = start_weights(o, batch, Joined(trajectories), inside_only=not o.decoupled)
            batch = dataclasses.replace(batch, weights=weights)
        if o.normalise == "joint":
            batch = dataclasses.replace(batch, groups=self._merged(groups, rollout, batch.groups))
        return dataclasses.replace(batch, replayed=torch.ones(len(batch), dtype=torch.bool))

    def _merged(self, groups: Sequence[StoredGroup], rollout: Rollout, own: Tensor) -> Tensor:
        """Group numbers under which all answers to one row of the data are compared, fresh ones too."""
        number = dict(zip(rollout.rows, rollout.batch.groups.tolist(), strict=True))
        rows = [group.row for group in groups for _ in group.trajectories]
        for row, group in zip(rows, own.tolist(), strict=True):
            number.setdefault(row, group)
        return torch.tensor([number[row] for row in rows])


def with_replay(loss: Loss, o: ReplayOptions) -> Loss:
    """A loss whose term `policy` also counts replayed rows, over one denominator; other terms see fresh rows only."""

    def mixed(out: Outputs, batch: Batch) -> dict[str, Term]:
        replayed = required(batch.replayed)[:, None] & trained(batch)
        verdicts = torch.where(replayed, int(Verdict.REPLAY_OBSERVED), required(batch.verdicts))
        terms = dict(loss(out, dataclasses.replace(batch, verdicts=verdicts)))
        policy = terms["policy"]
        values = torch.where(replayed, o.coef * replay_loss(o, out, batch, replayed), policy.values)
        terms["policy"] = dataclasses.replace(policy, values=values, mask=policy.mask | replayed)
        return terms

    return mixed


def replay_loss(o: ReplayOptions, out: Outputs, batch: Batch, mask: Tensor) -> Tensor:
    """[batch, time] the loss of replayed positions, by mode."""
    advantages, behaviour = required(batch.advantages), required(batch.behaviour_logprobs)
    if o.mode == "shaped":
        values = losses.replay_shaped(out.logprobs, behaviour, advantages, mask, offset=o.offset)
    else:
        values = losses.replay_clipped(
            out.logprobs,
            required(batch.old_logprobs) if o.decoupled else behaviour,
            advantages,
            mask,
            clip_low=o.clip_low,
            clip_high=o.clip_high,
            dual_clip=o.dual_clip,
        )
    return weighted(values, batch)


def start_weights(o: ReplayOptions, batch: Batch, joined: Joined, *, inside_only: bool) -> Tensor:
    """[batch, time] importance weights of the policy at the start of the update against the one that sampled.

    `inside_only`: 1 within the band and 0 outside, for a loss whose ratio holds the weight already.
    """
    weights = losses.importance_weights(
        joined.join(required(batch.old_logprobs)),
        joined.join(required(batch.behaviour_logprobs)),
        joined.join(trained(batch)),
        level=o.weights_level,
        kind=o.weights,
        low=o.weights_low,
        high=o.weights_high,
    )
    weights = joined.split(weights, batch.ids.shape[1])
    return (weights > 0).to(weights.dtype) if inside_only else weights


def _sequences(rollout: Rollout, groups: Sequence[StoredGroup], joined: Batch) -> Joined:
    """Which rows of the joined batch are one sequence, under its group numbers; no episode of one group is another's."""
    rows = [
        *rollout.trajectories,
        *(
            dataclasses.replace(t, episode=t.episode + (i + 1) * 2**32)
            for i, group in enumerate(groups)
            for t in group.trajectories
        ),
    ]
    named = zip(rows, joined.groups.tolist(), strict=True)
    return Joined([dataclasses.replace(t, group=number) for t, number in named])


def _fresh_part(fresh: Batch, joined: Batch) -> Batch:
    """The fresh rows with the advantages and returns that they have in the joined batch."""
    rows, time = fresh.ids.shape
    advantages, returns = joined.advantages, joined.returns
    return dataclasses.replace(
        fresh,
        advantages=None if advantages is None else advantages[:rows, :time],
        returns=None if returns is None else returns[:rows, :time],
    )


# -- numbers -----------------------------------------------------------------------------------------------------------


def measure_replay(meter: Meter, rollout: Rollout, steps: Sequence[MiniStep], o: ReplayOptions) -> None:
    """What was replayed and what it did, under `replay/`."""
    replay = rollout.replay
    assert replay is not None
    fresh = int(rollout.batch.groups.unique().numel())
    meter.mean("replay/held", torch.tensor([float(replay.held)]))  # all ranks hold the same
    meter.total("replay/groups", float(len(replay.groups)))
    meter.total("replay/missing", float(replay.wanted - len(replay.groups)))
    meter.mean("replay/share", torch.tensor([0.0] * fresh + [1.0] * len(replay.groups)))
    if replay.batch is None:
        return
    ages = torch.tensor([float(replay.version - group.version) for group in replay.groups])
    meter.mean("replay/age", ages)
    meter.largest("replay/age_max", ages)
    for low, high in zip(AGES, (*AGES[1:], None), strict=True):
        inside = (ages >= low) & (ages < (torch.inf if high is None else high))
        meter.mean(f"replay/age/{age_bin(low, high)}", inside.float())
    batch = replay.batch
    assert batch.verdicts is not None
    assert batch.scores is not None
    meter.mean("replay/reward", batch.scores, ~batch.scores.isnan())
    meter.total("replay/bad_tokens", (batch.verdicts == Verdict.BAD_RECORD).sum())
    if batch.weights is not None:
        meter.mean("replay/weighted_out", (batch.weights == 0).float(), trained(batch))
    if replay.joined is None:
        mask = batch.verdicts == Verdict.REPLAY_OBSERVED
        _ratios(meter, required(batch.old_logprobs), batch, mask, o)
        return
    loss = 0.0
    for mini in steps:
        mask = trained(mini.batch) & required(mini.batch.replayed)[:, None]
        _ratios(meter, mini.result.outputs.logprobs, mini.batch, mask, o)
        loss += float(torch.where(mask, mini.result.contributions.get("policy", torch.zeros(mask.shape)), 0).sum())
    meter.total("replay/loss", loss / max(1, len(steps)))


def finish_replay(found: dict[str, float]) -> dict[str, float]:
    """The effective sample size from the ratio's moments: (sum w)^2 / (n sum w^2)."""
    second = found.pop("replay/ratio_second", None)
    if second:
        found["replay/ess"] = found["replay/ratio"] ** 2 / second
    return found


def age_bin(low: int, high: int | None) -> str:
    """1, 2-3, 4-7, … 16+"""
    return f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}-{high - 1}"


def _ratios(meter: Meter, logprobs: Tensor, batch: Batch, mask: Tensor, o: ReplayOptions) -> None:
    """The ratio to the behaviour, and where a clip takes the gradient away."""
    rho = losses.ratio(logprobs, required(batch.behaviour_logprobs), mask)
    meter.mean("replay/ratio", rho, mask)
    meter.largest("replay/ratio_max", rho, mask)
    meter.mean("replay/ratio_second", rho.square(), mask)
    if o.mode != "clipped":
        return
    if o.decoupled:
        rho = losses.ratio(logprobs, required(batch.old_logprobs), mask)
    advantages = required(batch.advantages)
    meter.mean("replay/clip_low", ((rho < 1 - o.clip_low) & (advantages < 0)).float(), mask)
    meter.mean("replay/clip_high", ((rho > 1 + o.clip_high) & (advantages > 0)).float(), mask)
    if o.dual_clip is not None:
        meter.mean("replay/clip_dual", ((rho > o.dual_clip) & (advantages < 0)).float(), mask)
