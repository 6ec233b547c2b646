"""`rolecall sft`: supervised fine-tuning."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rolecall.config.training import SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Built, Job, build_policy, loop_options, make_updater
from rolecall.jobs.data import check_kind, check_prompts, demonstrated_splits, open_reward, steps_of
from rolecall.jobs.evaluators import answering, task_evaluator
from rolecall.jobs.models import open_policy
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import Run, train
from rolecall.policy.model import PolicyModel
from rolecall.recipes.rendering import rendered_rows
from rolecall.recipes.sft import SFTLearner
from rolecall.tasks.names import is_task
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress

_log = logging.getLogger("rolecall")


def sft(
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Fine-tune on demonstrations: `sft(model="tiny", rows="demos.jsonl", steps=200)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets. All other settings are those of
    `rolecall sft`, nested or dotted.
    """
    arguments = {**settings, "rows": rows, "eval_data": eval_data}
    return train(SFTOptions, arguments, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options, stack = job.options, job.stack
    found, held = demonstrated_splits(options.rows, options.eval, seed=options.seed)
    policy = open_policy(options.model, options)
    trajectories, too_long = rendered_rows(found, policy, options.chat, max_length=options.max_length)
    if too_long:
        _log.warning("%d of %d rows are longer than max_length and were left out", too_long, len(found))
    options = steps_of(options, trajectories, options.batch)
    module = PolicyModel(policy.model)
    updater = make_updater(module, job)
    learner = SFTLearner(options, updater=updater, demonstrations=trajectories)
    # A task answers its own test prompts; of other rows the loss is known, and the reward if one is named.
    asked = options.eval.data if options.eval.data is not None and is_task(options.eval.data) else options.rows
    evaluate = task_evaluator(options, policy, asked, stack, updater.ranks) if held is None else None
    if held is not None:
        evaluate = _held_out_evaluator(options, policy, learner, held, stack)
    scored = held is None or bool(options.eval.reward)
    return build_policy(
        learner,
        loop_options(options, main="reward" if scored else "loss", lower=not scored),
        policy=policy,
        module=module,
        updater=updater,
        evaluate=evaluate,
        prompts=style_of(found),
    )


def _held_out_evaluator(options: SFTOptions, policy: Any, learner: SFTLearner, held: Rows, stack: ExitStack) -> Any:
    """The loss on demonstrations that do not train and, with `eval.reward`, the score of the policy's own answers."""
    known: Any = None
    if any(set(needs) <= set(held.columns) for needs in (("prompt", "completion"), ("messages",), ("text",))):
        known, _ = rendered_rows(held, policy, options.chat, max_length=options.max_length)
    answers = None
    if options.eval.reward:
        check_kind(held, ("prompt",), "a column `prompt` in the rows that eval.reward scores answers to")
        check_prompts(held, policy, options.chat)
        reward = open_reward(options.eval.reward, None, stack, options, rows=held)
        answers = answering(options, policy, reward, held, learner.updater.ranks)
    elif known is None:
        raise UserError(
            "the evaluation rows are not demonstrations, so they have no loss: give `completion` too, or eval.reward"
        )

    def evaluate(step: int) -> dict[str, float]:
        return (learner.evaluate(known) if known else {}) | (answers(step) if answers is not None else {})

    return evaluate
