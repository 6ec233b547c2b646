"""Lessons from finished episodes: which episodes are asked about, and who answers.

Of the groups whose scores differ most, the best episode and the worst. Whoever distils reads the task, what was said, and the
score beside the mean of its group.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.agents.conversation import Dialect
from rolecall.errors import UserError
from rolecall.remote.plain import PlainServer
from rolecall.rollout.engine import Engine, in_order
from rolecall.tasks.env import Message
from rolecall.types import Request, Sampling

_log = logging.getLogger("rolecall.agents")

_ASK = (
    "Task:\n{task}\n\nAn attempt:\n{said}\n\nIt scored {score:g}; the mean of the attempts at this task is {mean:g}. "
    "Write one short lesson for the next attempt at a task like this, in one sentence."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An episode that a lesson is asked for, as one of its players saw it."""

    number: int
    """Its place among the step's attempts."""
    prompt: Sequence[Message]
    """The task's messages."""
    completion: Sequence[Message]
    """What was said and heard then."""
    score: float
    mean: float
    """Of its group's scores."""
    row: Mapping[str, Any]
    """What its environment began with."""

    def question(self, *, keep: float = 1.0) -> Message:
        """What a model is asked; of what was said, the last part if not all of it is kept."""
        said = "\n".join(f"{m.get('author', m['role'])}: {m['content']}" for m in self.completion)
        task = "\n".join(m["content"] for m in self.prompt)
        shown = said[len(said) - int(keep * len(said)) :]
        return {"role": "user", "content": _ASK.format(task=task, said=shown, score=self.score, mean=self.mean)}


Distil = Callable[[Sequence[Attempt], int], Sequence[str | None]]
"""(attempts, step) -> a lesson from each, None where there is none."""


def chosen(
    scored: Mapping[tuple[int, str], Sequence[tuple[int, float]]],
) -> list[tuple[float, tuple[int, str], int, float]]:
    """(less its group's spread, group, sample, the group's mean) of the best and the worst of each group's (sample, score)."""
    found = []
    for group, sides in scored.items():
        best, worst = max(sides, key=lambda s: (s[1], -s[0])), min(sides, key=lambda s: (s[1], s[0]))
        mean = sum(score for _, score in sides) / len(sides)
        if best[1] > worst[1]:
            found += [(worst[1] - best[1], group, sample, mean) for sample, _ in (best, worst)]
    return found


def by_policy(
    engine: Engine, dialect: Dialect, sampling: Sampling, *, seed: int, first_prompt: int, context: int
) -> Distil:
    """The policy itself, with the weights that played. Its words here do not train. Random numbers are those of prompts from
    `first_prompt` on, which no episode has."""

    def ids_of(attempt: Attempt) -> tuple[int, ...]:
        keep, ids = 1.0, dialect.prompt([attempt.question()], given=1).ids
        while len(ids) + sampling.max_new_tokens > context and keep > 0.01:
            keep /= 2
            ids = dialect.prompt([attempt.question(keep=keep)], given=1).ids
        return ids[: max(1, context - sampling.max_new_tokens)]

    def distil(attempts: Sequence[Attempt], step: int) -> list[str | None]:
        requests = [
            Request(prompt_ids=ids_of(a), sampling=sampling, seed=seed, step=step, prompt=first_prompt + a.number)
            for a in attempts
        ]
        return [dialect.text(completion) for completion in in_order(requests, engine.stream(requests))]

    return distil


def by_server(server: PlainServer, sampling: Sampling, *, seed: int) -> Distil:
    """Another model, by OpenAI's API. A step in which it cannot be asked has no lessons, and the run continues."""
    how = replace(sampling, temperature=0.0, top_p=None, top_k=None, min_p=None)

    def distil(attempts: Sequence[Attempt], step: int) -> list[str | None]:
        prompts = [[attempt.question()] for attempt in attempts]
        try:
            answers = server.answers(prompts, how, n=1, seed=seed + step, template={})
        except UserError as error:
            _log.warning("step %d has no lessons: %s", step + 1, error)
            return [None] * len(attempts)
        return [texts[0].text for texts in answers]

    return distil


def by_function(function: Callable[..., Any], name: str) -> Distil:
    """A function of the user's: a list of attempts -> a list of texts, None where there is no lesson."""

    def distil(attempts: Sequence[Attempt], step: int) -> list[str | None]:
        try:
            found = function(list(attempts))
        except Exception as error:
            _log.warning("step %d has no lessons: %s raised %s: %s", step + 1, name, type(error).__name__, error)
            return [None] * len(attempts)
        texts = isinstance(found, list | tuple) and all(text is None or isinstance(text, str) for text in found)
        if not texts or len(found) != len(attempts):
            raise UserError(
                f"{name}, which distils lessons, got {len(attempts)} attempts and returned {found!r:.80}; it must return a "
                "list with a text for each, or None where there is no lesson"
            )
        return list(found)

    return distil
