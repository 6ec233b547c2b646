"""A reward model from preferences: of two answers to a prompt, the better one shall score higher.

    loss = mean over pairs of  - log sigmoid(score(chosen) - score(rejected) - margin)        Bradley & Terry 1952

A score is read at the last token of prompt and answer. The mean is over all pairs of the step, however they are cut into
micro-batches and spread over ranks. Left out: answers are never cut to fit, and there is no penalty on the level of the
scores, which the loss leaves free; `centre` sets it when training ends.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from math import nan, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rolecall.config.parts import ChatOptions
from rolecall.config.training import RMOptions
from rolecall.maths.losses import bradley_terry
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import Dtype
from rolecall.policy.packing import right_padded
from rolecall.recipes.given_rows import RowsLearner
from rolecall.recipes.rendering import Pair, Pairs, read_pairs
from rolecall.rewards.model import RewardSettings, encode_answer, score_ids, write_settings
from rolecall.tasks.kinds import Record
from rolecall.tasks.rows import Rows
from rolecall.train.metrics import Meter
from rolecall.train.persist import ModelFiles
from rolecall.train.ranks import Ranks
from rolecall.train.step import Updater
from rolecall.transfer import to_device

Ids = tuple[int, ...]


def settings_of(chat: ChatOptions, *, offset: float = 0.0) -> RewardSettings:
    """What is saved beside a model that was trained with these options."""
    return RewardSettings(
        system_prompt=chat.system_prompt, chat_template_kwargs=chat.chat_template_kwargs, offset=offset
    )


def make_pairs(
    model: RewardModel, rows: Rows, *, chat: ChatOptions, max_length: int, limit: int | None = None
) -> Pairs:
    """Rows as the model reads them, the first `limit` of them; of a stream, as they come."""
    settings = settings_of(chat)

    def render(found: Record, answer: Any, number: int) -> tuple[int, ...]:
        assert found.prompt is not None
        return encode_answer(model, found.prompt, answer, settings, found.row)

    return read_pairs(rows, render, longest=min(max_length, model.context_length), limit=limit)


class RewardModelLearner(RowsLearner):
    """Learns from `preferences.Pair`s of ids. The updater's module is a `RewardModel`, wrapped or not."""

    unit = "pairs"
    line = "loss {loss:.4f}, {accuracy:.0%} ranked right, margin {margin:.3g}"

    def __init__(self, options: RMOptions, *, updater: Updater, pairs: Any) -> None:
        super().__init__(options, updater=updater, rows=pairs)

    def collect(self, step: int) -> list[Pair[Ids]]:
        return self.take(step)

    def update(self, pairs: Sequence[Pair[Ids]]) -> None:
        def read(rows: Tensor) -> tuple[Tensor, Tensor]:
            part = [pairs[i] for i in rows.tolist()]
            found = self._scores(part)
            margins = to_device(torch.tensor([pair.margin for pair in part], dtype=found.dtype), found.device)
            return found, bradley_terry(found[0], found[1], margin=margins) if part else found

        sizes = torch.tensor([2 * max(len(pair.chosen), len(pair.rejected)) for pair in pairs])
        scores, step = self.descend(sizes, read)
        meter = Meter()
        chosen, rejected = scores
        meter.mean("accuracy", _right(chosen - rejected))
        meter.mean("margin", chosen - rejected)
        for name, side in (("chosen", chosen), ("rejected", rejected)):
            meter.mean(f"rewards/{name}/mean", side)
            meter.mean(f"rewards/{name}/std", side.square())  # until it is known over all ranks
        meter.total("num_tokens", float(sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)))
        self.measured(meter, **step)
        m = self._metrics
        for name in ("chosen", "rejected"):
            variance = m[f"rewards/{name}/std"] - m[f"rewards/{name}/mean"] ** 2
            m[f"rewards/{name}/std"] = sqrt(variance) if variance > 0 else 0.0 * variance  # NaN stays NaN

    def _scores(self, part: Sequence[Pair[Ids]]) -> Tensor:
        """[2, pairs] scores of chosen and rejected in one forward; of nothing, the score of one token."""
        rows = [pair.chosen for pair in part] + [pair.rejected for pair in part] or [(0,)]
        ids, lengths = right_padded(rows)
        found: Tensor = self.updater.module(ids, lengths)
        return found.view(2, -1) if part else found


def evaluate_reward_model(
    model: RewardModel, pairs: Sequence[Pair[Ids]], *, token_budget: int = 8192, ranks: Ranks | None = None
) -> dict[str, float]:
    """How well it ranks pairs, which ranks share, and whether it is as sure as it should be.

    accuracy: the share of pairs whose better answer scores higher; a tie counts half. log_loss: the mean of
    - log sigmoid(margin). calibration_error: see `calibration_error`. margin and the mean reward of both sides beside.
    """
    ranks = ranks or Ranks()
    numbers = ranks.share(range(len(pairs)))
    sides = [pairs[i].chosen for i in numbers] + [pairs[i].rejected for i in numbers]
    scores = score_ids(model, sides, token_budget=token_budget).view(2, -1).T.tolist()
    found = sorted(ranks.gather(list(zip(numbers, scores, strict=True))))
    chosen, rejected = torch.tensor([both for _, both in found], dtype=torch.float64).T.contiguous()
    margins = chosen - rejected
    return {
        "accuracy": float(_right(margins).mean()),
        "log_loss": float(-logsigmoid(margins).mean()),
        "calibration_error": calibration_error(margins),
        "margin": float(margins.mean()),
        "rewards/chosen/mean": float(chosen.mean()),
        "rewards/rejected/mean": float(rejected.mean()),
        "pairs": float(len(pairs)),
    }


def calibration_error(margins: Tensor, *, bins: int = 10) -> float:
    """The expected calibration error of the model's confidence in the answer it scores higher.

        confidence = sigmoid(|margin|), in 0.5 to 1        right = 1 if margin > 0, 1/2 if it is 0, else 0
        error = sum over bins of  (pairs in the bin / pairs) |mean right - mean confidence|

    Bins cut 0.5 to 1 into equal parts, each with its lower end. Which side is called chosen matters only through what
    is right, so a model that prefers nothing has error 0. Guo et al. 2017, arXiv 1706.04599.
    """
    confidence = margins.abs().double().sigmoid()
    if bool(confidence.isnan().any()):
        return nan
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    # (pairs in the bin / pairs) |mean right - mean confidence| = |sum of right - confidence in the bin| / pairs
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, place, _right(margins) - confidence)
    return float(gaps.abs().sum() / len(margins))


def centre(model: RewardModel, pairs: Iterable[Pair[Ids]], *, token_budget: int, limit: int = 512) -> float:
    """The mean score of both sides of the first pairs: the offset that gives rewards mean 0."""
    some = list(islice(pairs, limit))
    return float(score_ids(model, [s for p in some for s in (p.chosen, p.rejected)], token_budget=token_budget).mean())


def save_reward_model(model: RewardModel, directory: str | Path | None, settings: RewardSettings) -> None:
    """Write a directory that `RewardModelReward.load`, `Critic.load` and transformers read; None as in `save`."""
    model.save(directory)
    if directory is not None:
        write_settings(directory, settings)


def reward_model_files(model: RewardModel, settings: RewardSettings) -> ModelFiles:
    """How a reward model is kept in checkpoints."""
    dtype: Dtype = "bfloat16" if model.trunk.dtype == torch.bfloat16 else "float32"
    return ModelFiles(
        save=lambda directory: save_reward_model(model, directory, settings),
        load=lambda directory: RewardModel.load(directory, dtype=dtype).state_dict(),
    )


def _right(margins: Tensor) -> Tensor:
    """1 where the better answer scores higher, 1/2 at a tie, else 0."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()
