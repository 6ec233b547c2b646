"""What is known of turns, from the record of an episode to the positions of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rolecall.errors import UserError
from rolecall.experience.joined import Joined
from rolecall.types import Trajectory

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
