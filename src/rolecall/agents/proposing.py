"""Tasks that a model makes for an environment: which of its proposals can be solved, are new, and are neither easy nor hopeless."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rolecall.agents.pool import Envs, Failure
from rolecall.tasks.env import SOLO, Message

_ASK = (
    "Below are tasks of an environment, each as a JSON row, and how they were played. Propose a new task: answer with one JSON object "
    '{{"row": {{…}}, "solution": ["…", …]}}, whose row has the fields {fields} and whose solution is what to say, turn by turn, to solve '
    "it.\n\n{played}"
)
_SHOWN = 1200
"""Characters of an episode that a proposer reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A task that was proposed."""

    row: Mapping[str, Any]
    solution: Sequence[str]
    """What solves it, turn by turn, says who proposed it."""


@dataclass(slots=True)
class Sieve:
    """What became of the proposals."""

    kept: list[tuple[Proposal, float]] = field(default_factory=list)
    """With the share of the policy's episodes that solved each."""
    dropped: dict[str, int] = field(default_factory=dict)
    """How many were dropped, by reason."""

    def drop(self, why: str, count: int = 1) -> None:
        """Count it."""
        self.dropped[why] = self.dropped.get(why, 0) + count


def question(rows: Sequence[Mapping[str, Any]], episodes: Sequence[Sequence[Message]]) -> str:
    """What a proposer is asked: rows, and how each was played."""
    played = []
    for row, messages in zip(rows, episodes, strict=True):
        said = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        played.append(f"{json.dumps(row, ensure_ascii=False)}\n{said[:_SHOWN]}")
    return _ASK.format(fields=", ".join(map(str, rows[0])), played="\n\n".join(played))


def proposals_in(text: str, columns: Sequence[str]) -> Iterator[Proposal | None]:
    """The proposals of an answer, None for each that cannot be read: JSON objects that begin a line or stand alone."""
    decoder, found = json.JSONDecoder(), False
    place = 0
    while (start := text.find("{", place)) >= 0:
        try:
            made, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            place = start + 1
            continue
        found = True
        yield _proposal(made, columns)
    if not found:
        yield None


def _proposal(made: Any, columns: Sequence[str]) -> Proposal | None:
    if not isinstance(made, Mapping):
        return None
    row, solution = made.get("row"), made.get("solution")
    if not isinstance(row, Mapping) or set(row) != set(columns) or not isinstance(solution, list) or not solution:
        return None
    if not all(isinstance(turn, str) for turn in solution):
        return None
    return Proposal(row=dict(row), solution=tuple(solution))


def solved(envs: Envs, proposals: Sequence[Proposal], *, seed: int, enough: float) -> list[bool]:
    """Whether each solution solves its row: the environment ends the episode, and gave `enough` in all."""
    replies = envs.ask("start", {i: (proposal.row, seed) for i, proposal in enumerate(proposals)})
    totals, done = [0.0] * len(proposals), [False] * len(proposals)
    open_ones, turn = [i for i, reply in replies.items() if not isinstance(reply, Failure)], 0
    while open_ones := [i for i in open_ones if not done[i] and turn < len(proposals[i].solution)]:
        said = {i: {"role": "assistant", "content": proposals[i].solution[turn]} for i in open_ones}
        for i, reply in envs.ask("step", said).items():
            if isinstance(reply, Failure):
                open_ones.remove(i)
                continue
            totals[i] += reply.rewards.get(SOLO, 0.0)
            done[i] = reply.done and not reply.truncated
        turn += 1
    return [ended and total >= enough for ended, total in zip(done, totals, strict=True)]


def text_of(row: Mapping[str, Any]) -> str:
    """A row as a text to compare with others."""
    return " ".join(str(value) for value in row.values())


def alike(one: str, other: str) -> float:
    """Shared words and numbers of two texts, from 0 to 1 (Jaccard)."""
    a, b = set(re.findall(r"\w+", one.lower())), set(re.findall(r"\w+", other.lower()))
    return len(a & b) / len(a | b) if a | b else 1.0


class Novelty:
    """Knows which texts there are, and whether another one is new: by its words, and by where a model puts it."""

    def __init__(self, known: Sequence[str], embed: Callable[[str], Tensor], *, words: float, meaning: float) -> None:
        """Texts that share more than `words` of their words, or lie closer than `meaning` (cosine), are not new."""
        self.embed, self.words, self.meaning = embed, words, meaning
        self.known = list(known)
        self.places = [embed(text) for text in known]

    def takes(self, text: str) -> bool:
        """True if it is new; it is known from then on."""
        if any(alike(text, other) > self.words for other in self.known):
            return False
        place = self.embed(text)
        if self.places and float(torch.stack(self.places).mv(place).max()) > self.meaning:
            return False
        self.known.append(text)
        self.places.append(place)
        return True
