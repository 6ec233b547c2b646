"""What is counted of episodes, on whichever rank they were played."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.agents.played import Played, Side
from rolecall.train.ranks import Ranks
from rolecall.types import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What is counted of an episode, on whichever rank it was played."""

    row: int
    sample: int
    finish: Finish | None
    counts: Mapping[str, float]
    sides: Mapping[str, "Result"]
    """Of each player who had a turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What is counted of one side of an episode."""

    total: float | None
    """Its score."""
    tokens: int
    """That the policy wrote."""
    samples: int
    """Its trajectories."""
    kl: Sequence[float] = ()
    """Of each trajectory to the reference, where that is asked for."""
    text: str = ""
    """What was said, where it is shown."""


def result_of(side: Side, **more: Any) -> Result:
    tokens = side.episode.sides[side.player].policy_tokens
    return Result(total=side.scored.total, tokens=tokens, samples=len(side.trajectories), **more)


def ended_here(episodes: Sequence[Played], sides: Sequence[tuple[Side, Result]]) -> list[Ended]:
    """What is counted of the episodes of this rank."""
    of: dict[int, dict[str, Result]] = {id(episode): {} for episode in episodes}
    for side, result in sides:
        of[id(side.episode)][side.player] = result
    return [
        Ended(
            row=episode.wanted.prompt,
            sample=episode.wanted.sample,
            finish=episode.finish,
            counts=dict(episode.counts),
            sides=of[id(episode)],
        )
        for episode in episodes
    ]


def ended_everywhere(own: list[Ended], ranks: Ranks) -> list[Ended]:
    """What is counted of the episodes of all ranks, in the order of one process: all ranks ask."""
    return sorted(ranks.gather(own), key=lambda episode: (episode.row, episode.sample))


def measured(episodes: Sequence[Ended], players: Sequence[str]) -> dict[str, float]:
    """Means over episodes of what was counted, how they ended, and each player's reward where there are several."""
    names = sorted({"turns", *(name for episode in episodes for name in episode.counts)})
    ends = Counter(str(episode.finish) for episode in episodes)
    found = {f"agents/{name}": sum(e.counts.get(name, 0.0) for e in episodes) / len(episodes) for name in names}
    found |= {f"agents/finish/{finish}": ends[finish] / len(episodes) for finish in Finish if ends[finish]}
    found["agents/samples"] = sum(s.samples for e in episodes for s in e.sides.values()) / len(episodes)
    if len(players) > 1:
        for player in players:
            totals = [e.sides[player].total for e in episodes if player in e.sides]
            known = [total for total in totals if total is not None]
            if known:
                found[f"agents/reward/{player}"] = sum(known) / len(known)
    return found
