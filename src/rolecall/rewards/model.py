"""A reward model as the reward.

It has its own tokenizer and chat template, which need not be the policy's: answers reach it as text and messages, and it
renders them as it did when it was trained. It runs in the process that trains, because its code is ours.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rolecall.errors import out_of_range
from rolecall.policy.chat_template import template_kwargs
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import Dtype, LoadError
from rolecall.policy.packing import micro_batches, right_padded
from rolecall.policy.sharded import rounds
from rolecall.rewards.records import Messages, Sample, Scored, report_failures

SETTINGS_FILE = "reward_model.json"
"""In the model's directory, beside `config.json`. A reward model made elsewhere has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """What a trained reward model needs beside its weights and tokenizer to score as it was trained."""

    system_prompt: str | None = None
    """Put before every conversation that has no system message."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template."""
    offset: float = 0.0
    """Subtracted from every score. Preferences only fix differences of scores, so the level is free: training ends by
    choosing it such that the scores of the pairs it learned from have mean 0. The scale is not free (a difference is a
    log-odds) and stays."""


def write_settings(directory: str | Path, settings: RewardSettings) -> None:
    """Put the settings beside the model."""
    text = json.dumps(asdict(settings), indent=2, ensure_ascii=False, allow_nan=False)
    (Path(directory) / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")


def read_settings(directory: str | Path) -> RewardSettings:
    """The settings of a reward model; the defaults if it has none."""
    path = Path(directory).expanduser() / SETTINGS_FILE
    if not path.is_file():
        return RewardSettings()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings = RewardSettings(**found)
        if not (isinstance(settings.offset, float | int) and isfinite(settings.offset)):
            raise ValueError(f"offset is {settings.offset!r}")
    except (ValueError, TypeError) as error:
        known = ", ".join(f.name for f in fields(RewardSettings))
        raise LoadError(f"{path} cannot be read ({error}); it is a JSON object with {known}, or not there") from error
    return settings


def encode_answer(
    model: RewardModel,
    prompt: str | Messages,
    completion: str | Messages,
    settings: RewardSettings,
    row: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Ids of a prompt with its answer, whose last one the score is read at; `row` brings tools and template settings.

    Two texts are joined as they are and closed with the model's end-of-text token, if it has one. If either is a list of
    messages, a text beside it counts as one message: a user's prompt, an assistant's answer.
    """
    plain = isinstance(prompt, str) and isinstance(completion, str)
    kwargs = template_kwargs(row or {}, settings.chat_template_kwargs, plain=plain)
    if isinstance(prompt, str) and isinstance(completion, str):
        end = model.tokenizer.eos_token_id
        ids = model.encode(prompt + completion, system_prompt=settings.system_prompt)
        return ids if end is None else (*ids, int(end))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return model.encode(
        [*before, *answer],
        system_prompt=settings.system_prompt,
        chat_template_kwargs=kwargs,
    )


@torch.no_grad()
def score_ids(model: RewardModel, sequences: Sequence[Sequence[int]], *, token_budget: int) -> Tensor:
    """[sequences] float64 on the CPU: the model's raw scores, computed in micro-batches of `token_budget` tokens."""
    scores = torch.zeros(len(sequences), dtype=torch.float64)
    parts = micro_batches(torch.tensor([len(s) for s in sequences]), token_budget=token_budget)
    passes = rounds(model, len(parts))
    for rows in parts:
        ids, lengths = right_padded([sequences[i] for i in rows.tolist()])
        scores[rows] = model(ids, lengths).double().cpu()
    for _ in range(passes - len(parts)):  # other ranks have more
        model(*right_padded([(0,)]))
    return scores


class RewardModelReward:
    """The `Reward` of a reward model: its score of prompt and answer, minus its offset.

    An answer that it cannot score (too long for its context, not renderable in its template, a score that is not finite)
    has no score, is counted and named.
    """

    def __init__(
        self,
        model: RewardModel,
        *,
        settings: RewardSettings | None = None,
        name: str = "reward_model",
        weight: float = 1.0,
        token_budget: int = 8192,
    ) -> None:
        """`weight` multiplies the score in the total; `token_budget` bounds a micro-batch, padding included."""
        self.model, self.settings = model, settings or RewardSettings()
        self.name, self.weight, self.token_budget = name, weight, token_budget
        self._failed = 0

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        name: str = "reward_model",
        weight: float = 1.0,
        dtype: Dtype = "float32",
        token_budget: int = 8192,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The reward model of a directory, with its settings if it has any."""
        model = RewardModel.load(directory, dtype=dtype).to(device)
        model.requires_grad_(False)
        return cls(model, settings=read_settings(directory), name=name, weight=weight, token_budget=token_budget)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        encoded = [self._encode(sample) for sample in samples]
        whole = [ids for ids in encoded if not isinstance(ids, str)]
        scores = iter((score_ids(self.model, whole, token_budget=self.token_budget) - self.settings.offset).tolist())
        scored = [
            self._scored(sample, ids if isinstance(ids, str) else next(scores))
            for sample, ids in zip(samples, encoded, strict=True)
        ]
        self._failed += report_failures(self.name, scored)
        return scored

    def take_metrics(self) -> dict[str, float]:
        """Answers it could not score since the last call."""
        failed, self._failed = self._failed, 0
        return {f"rewards/{self.name}/failed": float(failed)}

    def close(self) -> None:
        """There is nothing to end."""

    def _encode(self, sample: Sample) -> tuple[int, ...] | str:
        """Its ids, or why there are none."""
        try:
            ids = encode_answer(self.model, sample.prompt, sample.completion, self.settings, sample.row)
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            return f"it cannot be rendered in the reward model's template: {error}"
        if len(ids) > self.model.context_length:
            return f"it has {len(ids)} tokens, the reward model can read {self.model.context_length}"
        return ids or "it has no tokens to read a score from"

    def _scored(self, sample: Sample, score: float | str) -> Scored:
        if isinstance(score, float) and not out_of_range(self.weight * score):
            return Scored(scores={self.name: score}, total=self.weight * score)
        why = score if isinstance(score, str) else f"its score is {score}, which {out_of_range(self.weight * score)}"
        failure = f"reward `{self.name}` failed on {sample.place}: {why}"
        return Scored(scores={self.name: None}, total=None, failure=failure)
