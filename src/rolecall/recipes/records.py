"""The record of a run: `rollouts/` and `updates/`, a file each per step, the newest and every 50th kept.

What was sampled goes to disk in a thread while the step trains on it, and is there before the step ends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolecall.config.rl import RLOptions
from rolecall.experience.batches import collate
from rolecall.experience.mirror import Mirror
from rolecall.experience.parquet import first_table
from rolecall.experience.store import RolloutDetails, rollouts_file, write_rollouts
from rolecall.experience.updates import MiniBatch, write_updates
from rolecall.files import DiskError, plain
from rolecall.maths.losses import ratio
from rolecall.maths.roles import TrainRule, Verdict
from rolecall.recipes.collect import Answered
from rolecall.recipes.experience import MiniStep, Rollout, nan_for_none
from rolecall.train.rundir import RunDir
from rolecall.train.step import trained
from rolecall.types import Sampling, Trajectory

KEPT_EVERY = 50
"""Steps whose files stay for good."""

_log = logging.getLogger(__name__)


class Records:
    """The watch that writes. One per run, on the rank that holds the run's directory; it records that rank's answers.

    A file that finds no room is counted and said, and training goes on.
    """

    def __init__(
        self,
        run: RunDir,
        options: RLOptions,
        *,
        model: Callable[[], str],
        tokenizer: str,
        pieces: Callable[[Sequence[int]], list[bytes]] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`model()` is the fingerprint of the weights at this moment, such as `engine.hash`; `tokenizer` is one too.

        `pieces(ids)` is what each token writes; without it the record holds ids alone. `mirror` copies the rollouts.
        """
        self.run, self.options, self.model, self.tokenizer = run, options, model, tokenizer
        self._spelt = None if pieces is None else _Spelt(pieces)
        self.rule = TrainRule(stop=options.algorithm.train_stop)
        self._lost, self._mirror = 0, mirror
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="records")
        first_table()  # now, not in the first step
        self._writing: Future[None] | None = None

    def rolled_out(self, rollout: Rollout) -> None:
        """Write what was sampled and what was computed from it; goes on aside until `updated`."""
        self._finish()
        step, last = rollout.step + 1, self.options.save.rollouts
        if path := _path(self.run.rollouts, step, last):
            self._writing = self._aside.submit(self._write, step, last, path, self._rollouts(path, rollout))

    def updated(self, rollout: Rollout, steps: Sequence[MiniStep]) -> None:
        """Write what every optimiser step did with every token, and what became of the lessons."""
        self._finish()
        for line in rollout.lessons:
            self.run.lessons.append({"step": rollout.step + 1, **line})
        step, last = rollout.step + 1, self.options.save.updates
        if path := _path(self.run.updates, step, last):
            self._write(step, last, path, lambda: write_updates(path, self._updates(rollout, steps)))

    def metrics(self) -> dict[str, float]:
        """`records_lost`: files that found no room so far."""
        return {"records_lost": float(self._lost)}

    def _finish(self) -> None:
        """Wait for what is being written aside; its error is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, last: int, path: Path, write: Callable[[], None]) -> None:
        """Write a step's file, then remove those whose time is over."""
        try:
            write()
        except DiskError as error:
            self._lost += 1
            _log.warning("the record of step %d was not written, the run continues: %s", step, error)
            return
        mirror = self._mirror if path.parent == self.run.rollouts else None
        if mirror is not None:
            mirror.add(path.name)
        if last:
            try:
                spare = () if mirror is None else mirror.pending
                self.run.thin(path.parent, last=last, every=KEPT_EVERY, spare=spare)
            except OSError as error:
                _log.warning("old records in %s could not be removed, the run continues: %s", path.parent, error)

    def _rollouts(self, path: Path, rollout: Rollout) -> Callable[[], None]:
        details = [
            RolloutDetails(
                prompt_text=prompt,
                answer_text=answer,
                messages=None if rollout.messages is None else tuple(rollout.messages[i]),
                seed=rollout.seed,
                sampling=self.options.sampling,
                prompt=row,
                sample=trajectory.episode,
                total=scored.total,
                reward_failure=scored.failure,
                pieces=None if self._spelt is None else tuple(map(self._spelt.__getitem__, trajectory.ids)),
                extras=as_json(scored.extras),
            )
            for i, (prompt, answer, row, trajectory, scored) in enumerate(
                zip(rollout.prompts, rollout.answers, rollout.rows, rollout.trajectories, rollout.scored, strict=True)
            )
        ]
        batch = rollout.batch
        eligible = self.rule.eligible(batch.roles)
        # Scoring leaves 0 where it was not asked; on disk that is null.
        batch = replace(
            batch,
            old_logprobs=_only(eligible, batch.old_logprobs),
            ref_logprobs=_only(eligible, batch.ref_logprobs),
            values=_only(eligible, batch.values),
        )
        return rollouts_file(
            path,
            rollout.trajectories,
            batch,
            step=rollout.step + 1,
            details=details,
            model=self.model(),
            tokenizer=self.tokenizer,
        )

    def _updates(self, rollout: Rollout, steps: Sequence[MiniStep]) -> list[MiniBatch]:
        minibatches = _observed(rollout)
        places, trajectories = rollout.trained_places, rollout.trained_trajectories
        for mini in steps:
            batch, logprobs = mini.batch, mini.result.outputs.logprobs
            assert batch.verdicts is not None
            mask = trained(batch)
            old = logprobs if batch.old_logprobs is None else batch.old_logprobs
            if batch.replayed is not None and not self.options.replay.decoupled:
                assert batch.behaviour_logprobs is not None
                old = torch.where(batch.replayed[:, None], batch.behaviour_logprobs, old)
            chosen = mini.rows.tolist()
            minibatches.append(
                MiniBatch(
                    step=rollout.step + 1,
                    epoch=mini.epoch,
                    minibatch=mini.minibatch,
                    rollout_steps=[places[i][0] for i in chosen],
                    trajectories=[places[i][1] for i in chosen],
                    lengths=[len(trajectories[i].ids) for i in chosen],
                    verdicts=batch.verdicts,
                    contributions=mini.result.contributions,
                    logprobs=_only(mask, logprobs),
                    ratio=_only(mask, ratio(logprobs, old, mask)),
                    weights=batch.weights,
                )
            )
        return minibatches


def _path(folder: Path, step: int, last: int) -> Path | None:
    """Where a step's file goes; None if it would not stay."""
    return folder / f"step-{step:06d}.parquet" if last or step % KEPT_EVERY == 0 else None


class _Spelt(dict[int, bytes]):
    """What each token writes, by its id; each is asked for once."""

    def __init__(self, spell: Callable[[Sequence[int]], list[bytes]]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        (self[token],) = self._spell([token])
        return self[token]


def _observed(rollout: Rollout) -> list[MiniBatch]:
    """What was only looked at: log-probs now and their ratio to those recorded, without a share in any loss."""
    replay = rollout.replay
    if replay is None or replay.batch is None or replay.joined is not None:
        return []
    batch = replay.batch
    assert batch.verdicts is not None
    assert batch.old_logprobs is not None
    assert batch.behaviour_logprobs is not None
    mask = batch.verdicts == Verdict.REPLAY_OBSERVED
    return [
        MiniBatch(
            step=rollout.step + 1,
            epoch=0,
            minibatch=0,
            rollout_steps=[step for step, _ in replay.places],
            trajectories=[place for _, place in replay.places],
            lengths=[len(t.ids) for t in replay.trajectories],
            verdicts=batch.verdicts,
            logprobs=_only(mask, batch.old_logprobs),
            ratio=_only(mask, ratio(batch.old_logprobs, batch.behaviour_logprobs, mask)),
        )
    ]


def _only(mask: Tensor, tensor: Tensor | None) -> Tensor | None:
    """NaN where it was not computed."""
    return None if tensor is None else torch.where(mask, tensor, torch.nan)


def write_answers(
    path: Path,
    groups: Sequence[Answered],
    trajectories: Sequence[Trajectory],
    extras: Sequence[Mapping[str, Any]],
    *,
    sampling: Sampling,
    **file: Any,
) -> None:
    """Record answers to rows, which need not train; `extras` are of each answer, `file` is what `write_rollouts` takes."""
    details = [
        RolloutDetails(
            prompt_text=group.prompt,
            answer_text=group.answers[i],
            seed=group.request.seed,
            sampling=sampling,
            prompt=group.row,
            sample=i,
            total=group.scored[i].total,
            reward_failure=group.scored[i].failure,
        )
        for group in groups
        for i in range(len(group.answers))
    ]
    details = [replace(held, extras=more) for held, more in zip(details, extras, strict=True)]
    scores = nan_for_none([held.total for held in details])
    write_rollouts(path, trajectories, replace(collate(trajectories), scores=scores), details=details, **file)


def as_json(extras: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward said beside its score; what JSON cannot hold is spelt out."""
    held: dict[str, Any] = {}
    for name, value in extras.items():
        try:
            held[str(name)] = plain(value)
        except TypeError:
            held[str(name)] = repr(value)
    return held
