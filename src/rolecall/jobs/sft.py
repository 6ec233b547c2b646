"""`rolecall sft`: supervised fine-tuning."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate import Accelerator

from rolecall.config.agents import AgentOptions
from rolecall.config.merge import resolve
from rolecall.config.resume import saved_settings
from rolecall.config.sft import SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.agents import env_source, episode_rows, open_arena, open_envs
from rolecall.jobs.arguments import trl_arguments
from rolecall.jobs.data import (
    by_name,
    check_kind,
    check_prompts,
    demonstrated_splits,
    eval_named,
    labelled,
    open_reward,
    prompt_rows,
    steps_of,
    unnamed,
)
from rolecall.jobs.models import open_policy, with_model
from rolecall.jobs.prompting import style_of
from rolecall.jobs.rl import sampler
from rolecall.jobs.running import Built, Run, build_policy, execute, loop_options, prepared, unless_stopped
from rolecall.policy.model import PolicyModel
from rolecall.recipes.episodes import EnvOnly, EpisodeEvaluator
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.rendering import rendered_rows
from rolecall.recipes.rl import engine_weights
from rolecall.recipes.sft import SFTLearner
from rolecall.tasks.env_names import is_task
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.timing import Timer
from rolecall.types import Sampling

_log = logging.getLogger("rolecall")


@trl_arguments
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
    settings = {**with_model(settings), **by_name(rows=rows), **eval_named(eval_data)}
    saved = saved_settings(settings.get("out")) if settings.get("resume") else {}
    options = resolve(SFTOptions, [("config.json", saved), ("the call", settings)]).options
    given = {"rows": unnamed(rows), "eval_data": unnamed(eval_data)}
    return unless_stopped(run(options, **given, progress=progress, callbacks=callbacks))


def run(
    options: SFTOptions,
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run from options; rows that are objects take the place of the named ones."""
    options, build = labelled(options, rows=rows), partial(_build, rows=rows, eval_data=eval_data)
    return execute("sft", options, build, progress=progress, callbacks=callbacks)


def _build(
    options: SFTOptions,
    accelerator: Accelerator,
    timer: Timer,
    stack: ExitStack,
    *,
    rows: RowsSource | None,
    eval_data: RowsSource | None,
) -> Built:
    source = options.rows if rows is None else rows
    found, held = demonstrated_splits(source, options.eval, seed=options.seed, eval_data=eval_data)
    policy = open_policy(options.model, options)
    trajectories, too_long = rendered_rows(found, policy, options.chat, max_length=options.max_length)
    if too_long:
        _log.warning("%d of %d rows are longer than max_length and were left out", too_long, len(found))
    options = steps_of(options, trajectories, options.batch)
    module = PolicyModel(policy.model)
    updater = prepared(module, options.optim, accelerator, timer)
    learner = SFTLearner(options, updater=updater, demonstrations=trajectories)
    # A task answers its own test prompts; of other rows the loss is known, and the reward if one is named.
    asked = options.eval.data if options.eval.data is not None and is_task(options.eval.data) else source
    evaluate = task_evaluator(options, policy, asked, stack) if held is None else None
    if held is not None:
        evaluate = _held_out_evaluator(options, policy, learner, held, stack)
    scored = held is None or bool(options.eval.reward)
    return build_policy(
        learner,
        loop_options(options, main="reward" if scored else "loss", lower=not scored),
        policy=policy,
        module=module,
        optimizer=updater.optimizer,
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
        reward = open_reward(options.eval.reward, None, stack, weights=None, **options.reward_limits(), rows=held)
        answers = _answering(options, policy, reward, held)
    elif known is None:
        raise UserError(
            "the evaluation rows are no demonstrations, so they have no loss: give `completion` too, or eval.reward"
        )

    def evaluate(step: int) -> dict[str, float]:
        return (learner.evaluate(known) if known else {}) | (answers(step) if answers is not None else {})

    return evaluate


def _answering(options: Any, policy: Any, reward: Any, rows: Rows) -> Any:
    """Greedy answers to held-out prompts, scored."""
    engine = sampler(policy, options)
    evaluator = Evaluator(
        policy=policy, engine=engine, reward=reward, rows=rows, chat=options.chat, **_how_to_sample(options)
    )

    def evaluate(step: int) -> dict[str, float]:
        engine.load(engine_weights(policy), step)
        return evaluator(step)

    return evaluate


def _how_to_sample(options: Any) -> dict[str, Any]:
    return {
        "sampling": Sampling(max_new_tokens=options.max_new_tokens),
        "samples": options.eval.samples,
        "seed": options.seed,
    }


def task_evaluator(options: Any, policy: Any, source: Any, stack: ExitStack) -> Any:
    """Greedy answers to a task's held-out prompts, scored by the task; None if there shall be no evaluation."""
    if not options.eval.every:
        return None
    env = env_source(None, source)
    evaluation = replace(options.eval, data=None)
    if env is None:
        found = prompt_rows(source, evaluation, seed=options.seed)
        assert found.test is not None
        reward = open_reward(options.eval.reward, found.test_reward, stack, weights=None, **options.reward_limits())
        return _answering(options, policy, reward, found.test)
    engine = sampler(policy, options)
    _, held_out = episode_rows(env, None, evaluation, n=1, seed=options.seed)
    assert held_out is not None
    limits = AgentOptions()
    envs = open_envs(env, limits, stack)
    arena = open_arena(envs, limits, policy=policy, engine=engine, reward=EnvOnly(), chat=options.chat)
    evaluator = EpisodeEvaluator(arena, rows=held_out, **_how_to_sample(options))

    def evaluate(step: int) -> dict[str, float]:
        engine.load(engine_weights(policy), step)
        return evaluator(step)

    return evaluate
