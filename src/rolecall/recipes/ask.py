"""Rows are asked: each prompt is answered a number of times, and the answers are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.config.parts import ChatOptions
from rolecall.policy.load import LoadedModel
from rolecall.recipes.sampling import answer_text, answered, as_completion, prompt_request, trajectory_of
from rolecall.rewards.records import Reward, Sample, Scored, why_unscored
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows, place_of
from rolecall.train.timing import Timer
from rolecall.types import Completion, Request, Sampling, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A row with its answers; one entry per answer everywhere."""

    row: int
    """Which row of the data it is."""
    request: Request
    prompt: str
    """The prompt as text."""
    completions: Sequence[Completion]
    answers: Sequence[str]
    """As text, without the stop token."""
    scored: Sequence[Scored]
    greedy: Scored | None = None
    """What the greedy answer scored, if one was asked for."""

    @property
    def flat(self) -> bool:
        """True if no two answers score differently, so that there is nothing to compare. Failed rewards do not count."""
        return len({s.total for s in self.scored if s.total is not None}) < 2

    def trajectories(self, group: int) -> list[Trajectory]:
        """The answers as trajectories of this group."""
        return [
            replace(trajectory_of(self.request, c, group=group), scores=dict(s.scores))
            for c, s in zip(self.completions, self.scored, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Asks a policy. It keeps no state: the same rows, step and seed give the same answers."""

    policy: LoadedModel
    engine: Engine
    reward: Reward
    rows: Rows
    chat: ChatOptions
    sampling: Sampling
    timer: Timer

    def ask(
        self,
        chosen: Mapping[int, int],
        *,
        samples: int,
        seed: int,
        step: int,
        state: Mapping[str, Any],
        greedy: bool = False,
    ) -> list[Answered]:
        """Answer the chosen rows, given by their prompts' numbers in the step, `samples` times each.

        `state` is what rewards see as `trainer_state`. With `greedy`, also once with the likeliest tokens; that answer
        is scored and reported beside the others.
        """
        rows = {number: self.rows[i] for number, i in chosen.items()}
        requests = [self._request(row, samples, seed, step, number) for number, row in rows.items()]
        likeliest = [replace(r, n=1, sampling=replace(r.sampling, temperature=0.0)) for r in requests] if greedy else []
        with self.timer.phase("generate"):
            completions = answered(self.engine, requests, self.timer)
            completions_greedy = answered(self.engine, likeliest, self.timer) if greedy else []
        both = [*completions, *completions_greedy]
        answers = [answer_text(self.policy, c) for c in both]
        with self.timer.phase("reward"):
            scored = self.reward.score(
                [self._sample(rows[c.prompt], c, a) for c, a in zip(both, answers, strict=True)],
                state=state,
            )
        beside = {
            c.prompt: (answer, s)
            for c, answer, s in zip(
                completions_greedy, answers[len(completions) :], scored[len(completions) :], strict=True
            )
        }
        found: dict[int, list[tuple[Completion, str, Scored]]] = {request.prompt: [] for request in requests}
        for c, answer, s in zip(completions, answers, scored, strict=False):
            found[c.prompt].append((c, answer, _with_greedy(s, beside.get(c.prompt))))
        return [
            Answered(
                row=row,
                request=request,
                prompt=self.policy.tokenizer.decode(request.prompt_ids),
                completions=[c for c, _, _ in found[request.prompt]],
                answers=[answer for _, answer, _ in found[request.prompt]],
                scored=[s for _, _, s in found[request.prompt]],
                greedy=beside[request.prompt][1] if greedy else None,
            )
            for row, request in zip(chosen.values(), requests, strict=True)
        ]

    def samples_of(self, group: Answered) -> list[Sample]:
        """A row's answers as another reward sees them."""
        row = self.rows[group.row]
        return [self._sample(row, c, answer) for c, answer in zip(group.completions, group.answers, strict=True)]

    def _request(self, row: Any, samples: int, seed: int, step: int, prompt: int) -> Request:
        return prompt_request(
            self.policy, row, self.chat, self.sampling, n=samples, seed=seed, step=step, prompt=prompt
        )

    def _sample(self, row: Any, completion: Completion, answer: str) -> Sample:
        return Sample(
            prompt=row["prompt"],
            completion=as_completion(row["prompt"], answer),
            completion_ids=completion.ids,
            row=row,
            prompt_index=completion.prompt,
            sample_index=completion.sample,
        )


def unscored(rows: Rows, groups: Sequence[Answered]) -> str | None:
    """Why no answer has a score; None if any has."""
    answered = [(group.row, scored) for group in groups for scored in group.scored]
    return why_unscored([scored for _, scored in answered], lambda i: place_of(rows, answered[i][0]))


def _with_greedy(scored: Scored, beside: tuple[str, Scored] | None) -> Scored:
    """The greedy answer is kept on record beside each answer that is compared with it."""
    if beside is None:
        return scored
    answer, greedy = beside
    return replace(scored, extras={**scored.extras, "greedy_answer": answer, "greedy_score": greedy.total})
