"""Best of n: sample n answers to every prompt, keep the one that scores highest, train nothing.

What the best of k answers is worth is estimated for every k up to n from the same n answers, without bias; a judge that
has no say in the choice shows where the score that chooses stops being a good guide.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from rolecall.config.training import BestOfNOptions
from rolecall.experience.store import Rollouts, read_rollouts
from rolecall.files import write_atomically
from rolecall.maths.best_of import best_of_kl, expected_best
from rolecall.recipes.collect import Answered, Asker, unscored
from rolecall.recipes.records import as_json, write_answers
from rolecall.rewards.records import Reward, trainer_state
from rolecall.train.rundir import RunDir

ANSWERS, CURVE = "answers.jsonl", "best_of_n.json"
"""The files that a run leaves beside its metrics."""


class BestOfN:
    """The sampling side of `train.loop.Learner`: a step is some prompts. It has no state but the step."""

    def __init__(
        self, options: BestOfNOptions, *, asker: Asker, judge: Reward | None, model: Callable[[], str], tokenizer: str
    ) -> None:
        """`model()` and `tokenizer` are fingerprints for the record."""
        self.options, self.asker, self.judge = options, asker, judge
        self.model, self.tokenizer = model, tokenizer
        self.run: RunDir | None = None
        self._metrics: dict[str, float] = {}
        self.unscored: str | None = None
        """Why no answer of the last step has a score; None if any has."""

    def collect(self, step: int) -> tuple[int, list[Answered]]:
        """Answers to the step's prompts, in the order of the rows."""
        o = self.options
        chosen = range(len(self.asker.rows))[step * o.prompts : (step + 1) * o.prompts]
        return step, self.asker.ask(
            dict(enumerate(chosen)), samples=o.n, seed=o.seed, step=step, state=self._state(step)
        )

    def update(self, experience: tuple[int, list[Answered]]) -> None:
        """Ask the judge, put all answers on record, and measure."""
        step, groups = experience
        self.unscored = unscored(self.asker.rows, groups)
        judged = [self._judged(group, step) for group in groups]
        if self.run is not None:
            self._record(self.run.rollouts / f"step-{step + 1:06d}.parquet", step, groups, judged)
        scores = [[s.total for s in group.scored] for group in groups]
        known = [s for row in scores for s in row if s is not None]
        self._metrics = {
            **({"reward": sum(known) / len(known)} if known else {}),
            "rewards/failed": 1 - len(known) / max(1, sum(map(len, scores))),
            **{f"best_of/{k}": mean for k, mean, _ in curve(scores, None, self.options.ks)},
        }
        if self.judge is not None:
            self._metrics |= {f"judge/best_of/{k}": mean for k, mean, _ in curve(scores, judged, self.options.ks)}
        self._metrics |= self.asker.reward.take_metrics()

    def _state(self, step: int) -> dict[str, Any]:
        rows, per_step = len(self.asker.rows), self.options.prompts
        steps = -(-rows // per_step)
        return trainer_state(step=step, steps=steps, taken=step * per_step, rows=rows, per_step=per_step)

    def _judged(self, group: Answered, step: int) -> list[float | None] | None:
        if self.judge is None:
            return None
        found = self.judge.score(self.asker.samples_of(group), state=self._state(step))
        self.judge.take_metrics()
        return [s.total for s in found]

    def _record(
        self, path: Path, step: int, groups: Sequence[Answered], judged: Sequence[list[float | None] | None]
    ) -> None:
        trajectories = [t for group in groups for t in group.trajectories(group.row)]
        extras: list[dict[str, Any]] = [
            {} if verdicts is None else {"judge": verdicts[i]}
            for group, verdicts in zip(groups, judged, strict=True)
            for i in range(len(group.answers))
        ]
        facts = {"step": step + 1, "model": self.model(), "tokenizer": self.tokenizer}
        write_answers(path, groups, trajectories, extras, sampling=self.options.sampling, **facts)

    def finish(self, run: RunDir) -> None:
        """Write the best answers and the curve, from the record of all steps."""
        files = sorted(run.rollouts.glob("step-*.parquet"))
        lines: list[dict[str, Any]] = []
        scores: list[list[float | None]] = []
        judged: list[list[float | None]] = []
        for held in map(read_rollouts, files):
            for row, members in _by_row(held).items():
                totals = [_none(held.batch.scores, i) for i in members]
                judges = [held.details[i].extras.get("judge") for i in members]
                scores.append(totals)
                judged.append(judges)  # type: ignore[arg-type]
                if any(total is not None for total in totals):
                    lines.append(self._line(row, held, members, totals, judges))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomically(run.path / ANSWERS, text.encode("utf-8", "backslashreplace"))
        found: dict[str, Any] = {"prompts": len(scores), "unscored": len(scores) - len(lines), "n": self.options.n}
        found["best_of"] = _table(curve(scores, None, self.options.ks))
        if self.judge is not None:
            found["judge_of_best"] = _table(curve(scores, judged, self.options.ks))
        write_atomically(run.path / CURVE, json.dumps(found, indent=1).encode())

    def _line(
        self,
        row: int,
        held: Rollouts,
        members: Sequence[int],
        totals: Sequence[float | None],
        judges: Sequence[object],
    ) -> dict[str, Any]:
        """The row with its best answer as `completion`: what `rolecall sft` imitates."""
        known = {i: total for i, total in enumerate(totals) if total is not None}
        best = max(known, key=known.__getitem__)  # of equals the first
        line = as_json(self.asker.rows[row])
        line |= {"completion": held.details[members[best]].answer_text, "score": known[best], "scores": list(totals)}
        return line if self.judge is None else line | {"judge": judges[best]}

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def explain(self) -> str:
        known = [k for k in self.options.ks if f"best_of/{k}" in self._metrics]
        ends = dict.fromkeys([*known[:1], *known[-1:]])
        return ", ".join(f"best of {k} {self._metrics[f'best_of/{k}']:.3f}" for k in ends) or "no reward succeeded"

    def state_dict(self) -> dict[str, Any]:
        """Nothing: answers depend on seed, step and prompt alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to bring back."""


def curve(
    scores: Sequence[Sequence[float | None]],
    values: Sequence[Sequence[float | None] | None] | None,
    ks: Sequence[int],
) -> list[tuple[int, float, float]]:
    """(k, mean over prompts of the expected value of the best of k, its standard error).

    Answers without a score, or without a value, are left out; so is a prompt with fewer than k left.
    """
    found: list[tuple[int, float, float]] = []
    rows = []
    for i, row in enumerate(scores):
        judged = row if values is None else values[i]
        assert judged is not None
        rows.append([(s, v) for s, v in zip(row, judged, strict=True) if s is not None and v is not None])
    for k in ks:
        each = [
            float(
                expected_best(
                    torch.tensor([s for s, _ in row], dtype=torch.float64),
                    k=k,
                    values=torch.tensor([v for _, v in row], dtype=torch.float64),
                )
            )
            for row in rows
            if len(row) >= k
        ]
        if each:
            mean = sum(each) / len(each)
            spread = sqrt(sum((x - mean) ** 2 for x in each) / max(1, len(each) - 1))
            found.append((k, mean, spread / sqrt(len(each))))
    return found


def _table(found: Sequence[tuple[int, float, float]]) -> list[dict[str, float]]:
    return [{"k": k, "mean": mean, "standard_error": error, "kl_bound": best_of_kl(k)} for k, mean, error in found]


def _by_row(held: Rollouts) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for i, detail in enumerate(held.details):
        assert detail.prompt is not None
        rows.setdefault(detail.prompt, []).append(i)
    return rows


def _none(scores: torch.Tensor | None, i: int) -> float | None:
    assert scores is not None
    return None if bool(scores[i].isnan()) else float(scores[i])
