"""`rolecall dpo`: train a policy on preferences."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rolecall.config.training import DPOOptions
from rolecall.jobs.building import Built, Job, build_policy, loop_options, make_updater
from rolecall.jobs.data import preferences, steps_of
from rolecall.jobs.evaluators import task_evaluator
from rolecall.jobs.models import open_policy
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import Run, train
from rolecall.policy.model import PolicyModel
from rolecall.recipes.dpo import DPOLearner
from rolecall.recipes.rendering import rendered_pairs
from rolecall.tasks.names import is_task
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.reference import Reference

_log = logging.getLogger("rolecall")


def dpo(
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Train on preferences: `dpo(model="runs/sft-1", rows="preferences.jsonl", beta=0.1, steps=200)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets. All other settings are those of
    `rolecall dpo`, nested or dotted.
    """
    arguments = {**settings, "rows": rows, "eval_data": eval_data}
    return train(DPOOptions, arguments, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options = job.options
    rows, held_out = preferences(options, job="dpo")
    policy = open_policy(options.model, options)
    found = rendered_pairs(rows, policy, options.chat, max_length=options.max_length)
    pairs = found.pairs
    if found.too_long or found.same:
        _log.warning("%s", found.in_words())
    held = None
    if held_out is not None:
        limits = {"max_length": options.max_length, "limit": options.eval.rows}
        held = rendered_pairs(held_out, policy, options.chat, **limits).pairs
    module = PolicyModel(policy.model)
    options = steps_of(options, pairs, options.batch)
    reference = Reference(module)
    updater = make_updater(module, job, reference=reference)
    learner = DPOLearner(options, updater=updater, reference=reference, pairs=pairs)
    of_task = is_task(options.rows) and options.eval.data is None
    answers = (
        task_evaluator(options, policy, options.rows, job.stack, updater.ranks)
        if of_task and held is not None
        else None
    )
    return build_policy(
        learner,
        loop_options(options, main="reward" if answers is not None else "rewards/accuracies"),
        policy=policy,
        module=module,
        updater=updater,
        evaluate=None if held is None else partial(_evaluate, learner, held, answers),
        prompts=style_of(rows),
    )


def _evaluate(
    learner: DPOLearner, held: Sequence[Any], answers: Callable[[int], dict[str, float]] | None, step: int
) -> dict[str, float]:
    """Held-out pairs and, of a task, held-out problems."""
    return learner.evaluate(held) | (answers(step) if answers is not None else {})
