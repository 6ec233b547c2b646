"""A reward model from preferences: of two answers to a prompt, the better one shall score higher.

    loss = mean over pairs of  - log sigmoid(score(chosen) - score(rejected) - margin)        Bradley & Terry 1952

A score is read at the last token of prompt and answer. The mean is over all pairs of the step, however they are cut into
micro-batches and spread over ranks. Left out: answers are never cut to fit, and there is no penalty on the level of the
scores, which the loss leaves free; `centre` sets it when training ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite, nan, sqrt
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
from rolecall.policy.packing import micro_batches, right_padded
from rolecall.rewards.model import RewardSettings, encode_answer, score_ids, write_settings
from rolecall.tasks.kinds import kind_of, record
from rolecall.tasks.rows import Row, RowError, Rows
from rolecall.tasks.streams import Stream
from rolecall.train.data import order_of
from rolecall.train.manifest import RefusedCheckpointError
from rolecall.train.metrics import Meter
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.persist import NotFinite
from rolecall.train.state import first_non_finite, read_state, write_state
from rolecall.train.step import Updater

_STATE = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers to one prompt as the reward model reads them, prompt included."""

    chosen: tuple[int, ...]
    """Ids of the better one."""
    rejected: tuple[int, ...]
    """Ids of the worse one."""
    margin: float = 0.0
    """By how much the better one should score higher before the loss is at its middle, log 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs to learn from or to be measured on, and what was left out."""

    pairs: Any
    """A tuple of `Pair` in the order of the rows; of rows that are streamed, a stream of them."""
    too_long: int
    """Rows with a side longer than the limit."""
    same: int
    """Rows whose sides are the same, as written or as the model reads them."""

    def in_words(self) -> str:
        """One sentence for people."""
        left_out = [f"{n} {why}" for n, why in ((self.too_long, "too long"), (self.same, "the same twice")) if n]
        return f"{len(self.pairs)} pairs" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def settings_of(chat: ChatOptions, *, offset: float = 0.0) -> RewardSettings:
    """What is saved beside a model that was trained with these options."""
    return RewardSettings(
        system_prompt=chat.system_prompt, chat_template_kwargs=chat.chat_template_kwargs, offset=offset
    )


def make_pairs(
    model: RewardModel, rows: Rows, *, chat: ChatOptions, max_length: int, limit: int | None = None
) -> Pairs:
    """Rows as the model reads them, the first `limit` of them; of a stream, as they come.

    A row that is no preference is an error with its number.
    """
    kind_of(rows, among=("preference",), job="a preference needs")
    settings, longest = settings_of(chat), min(max_length, model.context_length)
    too_long = same = 0

    def made(number: int, row: Row) -> Pair | None:
        nonlocal too_long, same
        if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
            same += 1
            return None
        pair = _pair(model, row, settings, number)
        if pair.chosen == pair.rejected:
            same += 1
        elif max(len(pair.chosen), len(pair.rejected)) > longest:
            too_long += 1
        else:
            return pair
        return None

    if isinstance(rows, Stream):
        return Pairs(pairs=rows.kept(made), too_long=0, same=0)
    numbered = zip(range(len(rows) if limit is None else limit), rows, strict=False)
    pairs = [pair for number, row in numbered if (pair := made(number, row)) is not None]
    if not pairs:
        raise RowError(
            f"no pair is left of {too_long + same} rows: {too_long} have a side longer than {longest} tokens, in {same} "
            "both sides are the same; raise max_length, or look at the rows"
        )
    return Pairs(pairs=tuple(pairs), too_long=too_long, same=same)


def _pair(model: RewardModel, row: Mapping[str, Any], settings: RewardSettings, number: int) -> Pair:
    found, margin = record(row, "preference", number=number), row.get("margin")
    assert found.prompt is not None
    assert found.chosen is not None
    assert found.rejected is not None
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
        raise RowError(f"row {number}: `margin` must be a finite number, it is {margin!r}")
    try:
        chosen, rejected = (
            encode_answer(model, found.prompt, answer, settings, row) for answer in (found.chosen, found.rejected)
        )
    except Exception as error:  # a chat template is a program of the model's author and may raise anything
        raise RowError(f"row {number} cannot be rendered: {error}") from error
    if not chosen or not rejected:
        raise RowError(f"row {number}: prompt and answer are empty, and the tokenizer has no end-of-text token")
    return Pair(chosen=chosen, rejected=rejected, margin=float(margin))


class RewardModelLearner:
    """The reward model's side of `train.loop.Learner`. The updater's module is a `RewardModel`, wrapped or not."""

    def __init__(self, options: RMOptions, *, updater: Updater, pairs: Any) -> None:
        self.options, self.updater, self.pairs = options, updater, pairs
        self.order = order_of(pairs, seed=options.seed)
        self._metrics: dict[str, float] = {}

    def collect(self, step: int) -> list[Pair]:
        """This rank's part of the next pairs."""
        accelerator = self.updater.accelerator
        chosen = self.order.take(self.options.batch)[accelerator.process_index :: accelerator.num_processes]
        set_lr(self.updater.optimizer, lr_factor(step, steps=self.options.steps, options=self.options.optim))
        return [self.pairs[i] for i in chosen]

    def update(self, pairs: Sequence[Pair]) -> None:
        """One optimiser step, unless the gradient is not finite."""
        updater = self.updater
        everywhere = float(updater.all_sum(torch.tensor(float(len(pairs)))))
        scores = torch.zeros(2, len(pairs), dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)

        def backward(rows: Tensor) -> None:
            nonlocal loss
            part = [pairs[i] for i in rows.tolist()]
            found = self._scores(part)
            if part:
                margins = torch.tensor([pair.margin for pair in part], dtype=found.dtype, device=found.device)
                total = bradley_terry(found[0], found[1], margin=margins).sum() / everywhere
                scores[:, rows] = found.detach().double().cpu()
            else:
                # Other ranks have more micro-batches: this one still reaches every parameter, with gradient 0.
                total = 0.0 * found.sum()
            loss = loss + total.detach().double().cpu()
            # DDP averages gradients over ranks; the denominator already counts them all.
            updater.accelerator.backward(total * updater.accelerator.num_processes)

        sizes = torch.tensor([2 * max(len(pair.chosen), len(pair.rejected)) for pair in pairs])
        grad_norm, finite = updater.descend(micro_batches(sizes, token_budget=updater.token_budget), backward)
        self._metrics = {
            "loss": float(updater.all_sum(loss)),
            "grad_norm": float(grad_norm),
            "learning_rate": float(updater.optimizer.param_groups[0]["lr"]),
            "skipped": float(not finite),
            **self._measure(pairs, scores),
        }

    def _scores(self, part: Sequence[Pair]) -> Tensor:
        """[2, pairs] scores of chosen and rejected in one forward; of nothing, the score of one token."""
        rows = [pair.chosen for pair in part] + [pair.rejected for pair in part] or [(0,)]
        ids, lengths = right_padded(rows)
        device = self.updater.accelerator.device
        found: Tensor = self.updater.module(ids.to(device), lengths.to(device))
        return found.view(2, -1) if part else found

    def _measure(self, pairs: Sequence[Pair], scores: Tensor) -> dict[str, float]:
        meter = Meter()
        chosen, rejected = scores
        meter.mean("accuracy", _right(chosen - rejected))
        meter.mean("margin", chosen - rejected)
        for name, side in (("chosen", chosen), ("rejected", rejected)):
            meter.mean(f"rewards/{name}/mean", side)
            meter.mean(f"rewards/{name}/std", side.square())  # until it is known over all ranks
        meter.total("num_tokens", float(sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)))
        found = meter.result(self.updater.all_sum)
        for name in ("chosen", "rejected"):
            variance = found[f"rewards/{name}/std"] - found[f"rewards/{name}/mean"] ** 2
            found[f"rewards/{name}/std"] = sqrt(variance) if variance > 0 else 0.0 * variance  # NaN stays NaN
        return found

    def metrics(self) -> dict[str, float]:
        """The numbers of the last step."""
        return self._metrics

    def explain(self) -> str:
        """The last step in words."""
        m = self._metrics
        return f"loss {m['loss']:.4f}, {m['accuracy']:.0%} ranked right, margin {m['margin']:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """The data position."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])


def evaluate_reward_model(model: RewardModel, pairs: Sequence[Pair], *, token_budget: int = 8192) -> dict[str, float]:
    """How well it ranks pairs, and whether it is as sure as it should be.

    accuracy: the share of pairs whose better answer scores higher; a tie counts half. log_loss: the mean of
    - log sigmoid(margin). calibration_error: see `calibration_error`. margin and the mean reward of both sides beside.
    """
    both = score_ids(
        model, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], token_budget=token_budget
    )
    chosen, rejected = both.chunk(2)
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


def centre(model: RewardModel, pairs: Iterable[Pair], *, token_budget: int, limit: int = 512) -> float:
    """The mean score of both sides of the first pairs: the offset that gives rewards mean 0."""
    some = list(islice(pairs, limit))
    return float(score_ids(model, [s for p in some for s in (p.chosen, p.rejected)], token_budget=token_budget).mean())


def save_reward_model(model: RewardModel, directory: str | Path, settings: RewardSettings) -> None:
    """Write a directory that `RewardModelReward.load`, `Critic.load` and transformers read."""
    model.save(directory)
    write_settings(directory, settings)


def write_checkpoint(
    directory: Path,
    *,
    model: RewardModel,
    settings: RewardSettings,
    optimizer: torch.optim.Optimizer,
    learner: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write the model and all that the run needs to go on exactly; refuse if any weight is not finite."""
    bad = first_non_finite(dict(model.named_parameters()))
    if bad is not None:
        raise NotFinite(f"{bad} is not finite: this checkpoint was not written, the last one is good")
    save_reward_model(model, directory, settings)
    write_state(
        directory, _STATE, {"optimizer": optimizer.state_dict(), "learner": dict(learner), "extra": dict(extra)}
    )


def read_checkpoint(
    directory: Path, *, model: RewardModel, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint's weights and optimiser back; returns (learner state, extra)."""
    state = read_state(directory, _STATE)
    dtype: Dtype = "bfloat16" if model.trunk.dtype == torch.bfloat16 else "float32"
    saved = RewardModel.load(directory, dtype=dtype).state_dict()
    own = model.state_dict()
    odd = [name for name in own if name not in saved or saved[name].shape != own[name].shape]
    if odd:
        there = tuple(saved[odd[0]].shape) if odd[0] in saved else "absent"
        raise RefusedCheckpointError(
            f"the checkpoint {directory} is of another model: {odd[0]} is {there} there and "
            f"{tuple(own[odd[0]].shape)} here"
        )
    model.load_state_dict(saved)
    optimizer.load_state_dict(state["optimizer"])
    return state["learner"], state["extra"]


def _right(margins: Tensor) -> Tensor:
    """1 where the better answer scores higher, 1/2 at a tie, else 0."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()
