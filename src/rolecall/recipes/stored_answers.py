"""Experience that is read in place of being sampled: the rollouts of another run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.errors import UserError
from rolecall.experience.store import Rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.recipes.collect import Collected
from rolecall.rewards.records import Sample, Scored
from rolecall.train.ranks import Ranks


class StoredAnswers:
    """A `Collector` that reads. Files are taken in order, again from the first when all were taken."""

    def __init__(self, store: RolloutStore, *, ranks: Ranks | None = None) -> None:
        self.store, self.ranks, self.taken = store, ranks or Ranks(), 0

    def collect(self, step: int) -> Collected:
        index = self.taken % len(self.store)
        self.taken += 1
        found = self.store.read(index)
        rows = self._rows(found)
        if not rows:
            raise UserError(
                f"{self.store.files[index]} has fewer groups than there are processes; use {self.ranks.count - 1} or fewer"
            )
        return Collected(
            trajectories=[found.trajectories[i] for i in rows],
            prompts=[found.details[i].prompt_text for i in rows],
            answers=[found.details[i].answer_text for i in rows],
            scored=[_scored(found, i) for i in rows],
            rows=[found.details[i].prompt or 0 for i in rows],
            seed=found.details[rows[0]].seed or 0,
        )

    def state_dict(self) -> dict[str, Any]:
        """How many files were taken, and which there are."""
        return {"taken": self.taken, "files": self.store.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last file that was taken."""
        if list(state.get("files", [])) != self.store.names:
            raise UserError(
                f"{self.store.place} does not hold the rollouts that the run began with; bring them back, or start a new run"
            )
        self.taken = int(state["taken"])

    def _rows(self, found: Rollouts) -> list[int]:
        groups = set(self.ranks.share(list(dict.fromkeys(t.group for t in found.trajectories))))
        return [i for i, t in enumerate(found.trajectories) if t.group in groups]


class NoReward:
    """Stands for the reward of a run that scores nothing."""

    names: tuple[str, ...] = ()

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """Never called: stored answers have their scores."""
        raise AssertionError("a reward was asked for in a run that trains on stored answers")

    def take_metrics(self) -> dict[str, float]:
        return {}


def _scored(found: Rollouts, row: int) -> Scored:
    details = found.details[row]
    failure = details.reward_failure
    if details.total is None and failure is None:
        failure = "there is no score in the store"
    return Scored(
        scores=dict(found.trajectories[row].scores),
        total=None if failure is not None else details.total,
        failure=failure,
        extras=dict(details.extras),
    )
