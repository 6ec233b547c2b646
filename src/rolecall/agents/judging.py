"""Turns judged in words: a model reads a finished episode and says of each turn whether it helped."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rolecall.agents.played import Side
from rolecall.policy.load import LoadedModel
from rolecall.recipes.collect import answer_text
from rolecall.recipes.prepare import TURN_MARKS, TURN_REWARDS, TURN_STATES
from rolecall.remote.plain import PlainServer
from rolecall.rollout.engine import Engine, in_order
from rolecall.tasks.env import Message
from rolecall.types import Finish, Request, Sampling

_ASK = (
    "Below is an episode of several turns. It scored {score}. Say of each turn whether it helped or hurt, one line for each of the "
    "{turns} turns, in the form `1: GOOD` or `1: BAD`.\n\n{episode}"
)
_MARK = re.compile(r"^\W*(\d+)\W+(GOOD|BAD)\b", re.MULTILINE | re.IGNORECASE)
_TOKENS_OF_A_LINE = 12

Judge = Callable[[Sequence[str], Sequence[int]], list[str]]
"""Answers questions, each with room for a number of tokens."""


def question(messages: Sequence[Message], score: float | None) -> str:
    """What a judge is asked about an episode."""
    lines, turn = [], 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            lines.append(f"turn {turn}: {message['content']}")
        else:
            lines.append(f"{message.get('author', message['role'])}: {message['content']}")
    said = "nothing that is known" if score is None else f"{score:g}"
    return _ASK.format(score=said, turns=turn, episode="\n".join(lines))


def marks_of(answer: str, turns: int) -> list[float | None]:
    """1 for GOOD, -1 for BAD, None for a turn of which nothing was said. What is said first counts."""
    found: dict[int, float] = {}
    for number, word in _MARK.findall(answer):
        found.setdefault(int(number), 1.0 if word.upper() == "GOOD" else -1.0)
    return [found.get(turn) for turn in range(1, turns + 1)]


def judged(episodes: Sequence[tuple[Sequence[Message], float | None]], judge: Judge) -> list[list[float | None]]:
    """The marks of each episode's turns."""
    turns = [sum(message["role"] == "assistant" for message in messages) for messages, _ in episodes]
    questions = [question(messages, score) for messages, score in episodes]
    answers = judge(questions, [_TOKENS_OF_A_LINE * count for count in turns])
    return [marks_of(answer, count) for answer, count in zip(answers, turns, strict=True)]


def with_turns(sides: Sequence[Side], judge: Judge | None) -> list[Side]:
    """With what turns were given, where they were taken and how they are judged, for credit turn by turn.

    Marks are of assistant messages: a summary, which is a turn of its own and no message, has none.
    """
    found = [dict[str, Any](side.scored.extras) for side in sides]
    unmarked = [i for i, extras in enumerate(found) if TURN_MARKS not in extras]
    if judge is not None and unmarked:
        asked = [(sides[i].episode.sides[sides[i].player].messages, sides[i].scored.total) for i in unmarked]
        for i, said in zip(unmarked, judged(asked, judge), strict=True):
            found[i][TURN_MARKS] = said
    for side, extras in zip(sides, found, strict=True):
        turns, marks = side.episode.turns.get(side.player, []), extras.get(TURN_MARKS)
        if turns:
            extras[TURN_REWARDS], extras[TURN_STATES] = [t.reward for t in turns], [t.state for t in turns]
        if isinstance(marks, list) and len(marks) == sum(not turn.summary for turn in turns) < len(turns):
            rest = iter(marks)
            extras[TURN_MARKS] = [None if turn.summary else next(rest) for turn in turns]
    return [replace(s, scored=replace(s.scored, extras=extras)) for s, extras in zip(sides, found, strict=True)]


def served_judge(server: PlainServer) -> Judge:
    """A model behind somebody's API."""

    def ask(questions: Sequence[str], room: Sequence[int]) -> list[str]:
        asked = [[{"role": "user", "content": text}] for text in questions]
        sampling = Sampling(temperature=0.0, max_new_tokens=max(room, default=1))
        return [one.text for (one,) in server.answers(asked, sampling, n=1, seed=0, template={})]

    return ask


def policy_judge(policy: LoadedModel, engine: Engine, render: Callable[[str], Sequence[int]]) -> Judge:
    """The policy as it is now, greedily. A question that its context has no room for has no answer."""

    def ask(questions: Sequence[str], room: Sequence[int]) -> list[str]:
        prompts = {i: tuple(render(text)) for i, text in enumerate(questions)}
        requests = [
            Request(prompt_ids=ids, sampling=Sampling(temperature=0.0, max_new_tokens=room[i]), prompt=i)
            for i, ids in prompts.items()
            if len(ids) + room[i] <= policy.context_length
        ]
        answers = [""] * len(questions)
        for completion in in_order(requests, engine.stream(requests)):
            if completion.finish is not Finish.ABORT:
                answers[completion.prompt] = answer_text(policy, completion)
        return answers

    return ask
