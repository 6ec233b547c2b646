"""What is known of an episode: what was asked for, who said what, what it was given and how it ended."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.agents.conversation import TokenSample
from rolecall.rewards.records import Scored
from rolecall.tasks.env import Message
from rolecall.types import Finish, Trajectory

_log = logging.getLogger("rolecall.agents")

_NAMED_FAILURES = 5
"""So many failures of a step are named one by one in the log; the rest are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """An episode to play."""

    prompt: int
    """Which prompt of the step it is."""
    sample: int
    """Which of the prompt's episodes."""
    row: Mapping[str, Any]
    """What its environment begins with."""
    seed: int
    """The seed of its environment; episodes of one prompt share it."""
    recall: "Recall | None" = None
    """Finds the lessons that it reads; None: it reads none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What was learned from an episode, in words."""

    id: int
    """Counted over the run."""
    text: str


Recall = Callable[[str], Sequence[Lesson]]
"""Lessons for a prompt, the best first."""


class Spoken(Protocol):
    """What a player has read and said."""

    @property
    def samples(self) -> list[TokenSample]:
        """What the policy read and wrote, in order."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The whole of it."""
        ...

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy has written."""
        ...


@dataclass(slots=True)
class PlayedTurn:
    """What is known of a turn beside its tokens."""

    state: int
    """What the policy had read since its last turn, as a number: equal texts are equal states."""
    reward: float = 0.0
    """What the environment gave for it."""
    summary: bool = False
    """It is a summary, which nobody answers."""


@dataclass(slots=True)
class Played:
    """An episode, while it is played and afterwards."""

    wanted: Wanted
    sides: Mapping[str, Spoken]
    """Each player's conversation."""
    speaker: str
    """Whose turn it is."""
    rewards: dict[str, float] = field(default_factory=dict)
    """What each player was given in all; none where the environment said nothing."""
    counts: dict[str, float] = field(default_factory=dict)
    """What the environment counted, and `turns` and `cut_turns`, those that ran into max_new_tokens."""
    finish: Finish | None = None
    """Why it ended; None while it is played."""
    failure: str | None = None
    """What went wrong, if it was broken off."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions see of the environment."""
    version: int = 0
    """The weights that played."""
    lessons: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Which lessons each player read."""
    turns: dict[str, list[PlayedTurn]] = field(default_factory=dict)
    """Each player's turns, where an environment answers them."""
    began: Sequence[str | None] = ()
    """Why each sample of a program's began; None: it is the first."""

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0.0) + value

    def trajectories(self, *, group: int) -> dict[str, list[Trajectory]]:
        """Each player's samples, in order. All carry the episode's finish."""
        assert self.finish is not None
        return {
            player: [
                Trajectory(
                    ids=tuple(sample.ids),
                    roles=tuple(sample.roles),
                    behaviour_logprobs=tuple(sample.logprobs),
                    agent=player,
                    episode=self.wanted.sample,
                    group=group,
                    turns=tuple(sample.turns),
                    authors=tuple(sample.authors),
                    finish=self.finish,
                    policy_version=min((version for *_, version in sample.versions), default=self.version),
                    versions=tuple(sample.versions) if len({v for *_, v in sample.versions}) > 1 else None,
                    behaviour_prompt_ids=None if sample is seen else tuple(seen.ids[: seen.turns[0][0]]),
                    supports=tuple(sample.supports) if any(sample.supports) else None,
                )
                for seen in side.samples
                for sample in [seen.stripped()]
            ]
            for player, side in self.sides.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What one player of an episode did, and its score."""

    player: str
    episode: Played
    trajectories: Sequence[Trajectory]
    """Its samples, in order."""
    scored: Scored

    @property
    def row(self) -> int:
        """The row that was played, by the number of its prompt in the step."""
        return self.episode.wanted.prompt


def env_seed(seed: int, step: int, group: int) -> int:
    """The seed of the environments of one prompt: another step or prompt gives another."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{group}".encode()).digest()[:6])


def report_failures(episodes: Sequence[Played]) -> None:
    """Say in the log which episodes were broken off, and why."""
    failed = [episode for episode in episodes if episode.failure is not None]
    for episode in failed[:_NAMED_FAILURES]:
        place = f"prompt {episode.wanted.prompt} sample {episode.wanted.sample}"
        _log.warning("the episode of %s was broken off: %s", place, episode.failure)
    if len(failed) > _NAMED_FAILURES:
        _log.warning("%d more episodes were broken off", len(failed) - _NAMED_FAILURES)
