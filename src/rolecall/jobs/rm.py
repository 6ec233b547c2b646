"""`rolecall rm`: train a reward model on preferences."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.config.training import RMOptions
from rolecall.jobs.building import Built, Job, build_model, loop_options, make_updater
from rolecall.jobs.data import preferences, steps_of
from rolecall.jobs.models import start_reward_model
from rolecall.jobs.running import Run, train
from rolecall.recipes.reward_model import (
    RewardModelLearner,
    centre,
    evaluate_reward_model,
    make_pairs,
    reward_model_files,
    save_reward_model,
    settings_of,
)
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress

_log = logging.getLogger("rolecall")


def rm(
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Train a reward model: `rm(model="runs/sft-1", rows="preferences.jsonl", steps=200)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets. All other settings are those of
    `rolecall rm`, nested or dotted.
    """
    arguments = {**settings, "rows": rows, "eval_data": eval_data}
    return train(RMOptions, arguments, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options = job.options
    budget = options.optim.token_budget
    model = start_reward_model(options.model, options)
    rows, held_out = preferences(options, job="rm")
    pairs = make_pairs(model, rows, chat=options.chat, max_length=options.max_length)
    if pairs.too_long or pairs.same:
        _log.warning("%s", pairs.in_words())
    how = {"chat": options.chat, "max_length": options.max_length, "limit": options.eval.rows}
    held = None if held_out is None else make_pairs(model, held_out, **how).pairs
    options = steps_of(options, pairs.pairs, options.batch)
    updater = make_updater(model, job)
    learner = RewardModelLearner(options, updater=updater, pairs=pairs.pairs)

    def save_model(directory: Path | None) -> None:
        settings = settings_of(options.chat, offset=centre(model, pairs.pairs, token_budget=budget))
        save_reward_model(model, directory, settings)

    def evaluate(step: int) -> dict[str, float]:
        assert held is not None
        return evaluate_reward_model(model, held, token_budget=budget, ranks=updater.ranks)

    return build_model(
        learner,
        loop_options(options, main="accuracy"),
        module=model,
        updater=updater,
        files=reward_model_files(model, settings_of(options.chat)),
        save_model=save_model,
        evaluate=evaluate if held else None,
    )
