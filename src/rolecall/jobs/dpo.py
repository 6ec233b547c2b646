"""`rolecall dpo`: train a policy on preferences."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from accelerate import Accelerator

from rolecall.config.dpo import DPOOptions
from rolecall.config.merge import resolve
from rolecall.config.resume import saved_settings
from rolecall.jobs.arguments import trl_arguments
from rolecall.jobs.data import by_name, eval_named, labelled, preferences, steps_of, unnamed
from rolecall.jobs.models import open_policy, with_model
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import Built, Run, build_policy, execute, loop_options, prepared, unless_stopped
from rolecall.jobs.sft import task_evaluator
from rolecall.policy.model import PolicyModel
from rolecall.recipes.dpo import DPOLearner
from rolecall.recipes.rendering import rendered_pairs
from rolecall.tasks.env_names import is_task
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.reference import Reference
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")


@trl_arguments
def dpo(
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Train on preferences: `dpo(model="runs/sft-1", rows="preferences.jsonl", beta=0.1, steps=200)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets. All other settings are those of `rolecall dpo`, nested or dotted.
    """
    settings = {**with_model(settings), **by_name(rows=rows), **eval_named(eval_data)}
    saved = saved_settings(settings.get("out")) if settings.get("resume") else {}
    options = resolve(DPOOptions, [("config.json", saved), ("the call", settings)]).options
    given = {"rows": unnamed(rows), "eval_data": unnamed(eval_data)}
    return unless_stopped(run(options, **given, progress=progress, callbacks=callbacks))


def run(
    options: DPOOptions,
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run from options; rows that are objects take the place of the named ones."""
    options, build = labelled(options, rows=rows), partial(_build, rows=rows, eval_data=eval_data)
    return execute("dpo", options, build, progress=progress, callbacks=callbacks)


def _build(
    options: DPOOptions,
    accelerator: Accelerator,
    timer: Timer,
    stack: ExitStack,
    *,
    rows: RowsSource | None,
    eval_data: RowsSource | None,
) -> Built:
    train, held_out = preferences(options, rows, job="dpo", eval_data=eval_data)
    policy = open_policy(options.model, options)
    pairs, left_out = rendered_pairs(train, policy, options.chat, max_length=options.max_length)
    if left_out:
        _log.warning("%s", left_out)
    held = None
    if held_out is not None:
        held, _ = rendered_pairs(held_out, policy, options.chat, max_length=options.max_length, limit=options.eval.rows)
    module = PolicyModel(policy.model)
    options = steps_of(options, pairs, options.batch)
    updater = prepared(module, options.optim, accelerator, timer)
    learner = DPOLearner(options, updater=updater, reference=Reference(module), pairs=pairs)
    of_task = rows is None and is_task(options.rows) and options.eval.data is None
    answers = task_evaluator(options, policy, options.rows, stack) if of_task and held is not None else None
    return build_policy(
        learner,
        loop_options(options, main="reward" if answers is not None else "rewards/accuracies"),
        policy=policy,
        module=module,
        optimizer=updater.optimizer,
        evaluate=None if held is None else partial(_evaluate, learner, held, answers),
        prompts=style_of(train),
    )


def _evaluate(
    learner: DPOLearner, held: Sequence[Any], answers: Callable[[int], dict[str, float]] | None, step: int
) -> dict[str, float]:
    """Held-out pairs and, of a task, held-out problems."""
    return learner.evaluate(held) | (answers(step) if answers is not None else {})
