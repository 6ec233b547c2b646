"""Episodes of a step in `rollouts/`, one row per episode and agent, in the columns of every other record.

A position is a time step: `ids` holds the agent's actions, `roles` and `verdicts` say of each step whether the agent
chose, `rewards` what it got. docs/marl.md explains the columns.
"""

import logging
from pathlib import Path

import torch

from rolecall.config.marl import MARLOptions
from rolecall.experience.store import RolloutDetails, write_rollouts
from rolecall.files import DiskError
from rolecall.marl.envs import EnvSpec
from rolecall.marl.runner import Round
from rolecall.recipes.records import KEPT_EVERY
from rolecall.train.rundir import RunDir
from rolecall.types import Batch, Finish, Trajectory

_log = logging.getLogger(__name__)


class EpisodeRecords:
    """Writes some episodes of every so many steps."""

    def __init__(self, options: MARLOptions, spec: EnvSpec) -> None:
        self.options, self.spec = options, spec
        self.run: RunDir | None = None

    def __call__(self, step: int, found: Round) -> None:
        """Record a round of the step (counted from 0). A file that finds no room is said, and training goes on."""
        o = self.options.record
        if self.run is None or not o.every or (step + 1) % o.every:
            return
        path = self.run.rollouts / f"step-{step + 1:06d}.parquet"
        try:
            self._write(path, step + 1, found)
        except DiskError as error:
            _log.warning("the record of step %d was not written, the run goes on: %s", step + 1, error)
            return
        if self.options.save.rollouts:
            self.run.thin(self.run.rollouts, last=self.options.save.rollouts, every=KEPT_EVERY)

    def _write(self, path: Path, step: int, found: Round) -> None:
        episodes = found.episodes.rows(slice(0, self.options.record.episodes)).trimmed()
        time = int(episodes.lengths.max())
        trajectories, details = [], []
        rewards = episodes.reward.expand(-1, -1, len(self.spec.agents))
        for b, length in enumerate(episodes.lengths.tolist()):
            ended = not bool(episodes.bootstrap[b])
            for a, agent in enumerate(self.spec.agents):
                actions = episodes.actions[b, :length, a, 0].tolist()
                total = float(rewards[b, :length, a].double().sum())
                trajectories.append(
                    Trajectory(
                        ids=tuple(actions),
                        roles=tuple(episodes.roles[b, :length, a].tolist()),
                        agent=agent,
                        episode=b,
                        group=0,
                        scores={"return": total},
                        finish=Finish.ENVIRONMENT if ended else Finish.MAX_TURNS,
                        policy_version=step - 1,
                    )
                )
                details.append(
                    RolloutDetails(
                        prompt_text=f"{self.spec.name}, seed {found.seeds[b]}",
                        answer_text=" ".join(map(str, actions)),
                        seed=found.seeds[b],
                        sampling=None,
                        sample=b,
                        extras={"env": self.spec.name, "steps": length, "ended": ended, "algo": self.options.algo},
                    )
                )

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x[:, :time].transpose(1, 2).flatten(0, 1)

        lengths = episodes.lengths.repeat_interleave(len(self.spec.agents))
        inside = torch.arange(time) < lengths[:, None]
        # After a row's end a record has padding.
        batch = Batch(
            ids=torch.where(inside, rows(episodes.actions[..., 0]), 0),
            roles=torch.where(inside, rows(episodes.roles), 0).to(torch.uint8),
            verdicts=torch.where(inside, rows(episodes.verdicts), 0).to(torch.uint8),
            rewards=torch.where(inside, rows(rewards), torch.nan),
            scores=torch.tensor([t.scores["return"] for t in trajectories], dtype=torch.float64),
            groups=torch.zeros(len(trajectories), dtype=torch.long),
        )
        write_rollouts(path, trajectories, batch, step=step, details=details, model="agents", tokenizer="actions")
