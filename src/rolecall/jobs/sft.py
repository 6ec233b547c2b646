"""`rolecall sft`: supervised fine-tuning."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from rolecall.jobs.data import by_name, demonstrated, labelled, open_reward, prompt_rows, rendered_rows, unnamed
from rolecall.jobs.models import open_policy, with_model
from rolecall.jobs.prompting import style_of
from rolecall.jobs.rl import sampler
from rolecall.jobs.running import Built, Run, build_policy, execute, loop_options, prepared, unless_stopped
from rolecall.policy.model import PolicyModel
from rolecall.recipes.episodes import EnvOnly, EpisodeEvaluator
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.rl import engine_weights
from rolecall.recipes.sft import SFTLearner
from rolecall.tasks.names import resolve as resolve_rows
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.timing import Timer
from rolecall.types import Sampling

_log = logging.getLogger("rolecall")


@trl_arguments
def sft(
    *,
    rows: str | Sequence[Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Fine-tune on demonstrations: `sft(model="tiny", rows="demos.jsonl", steps=200)`.

    `rows` may be a list of dicts. All other settings are those of `rolecall sft`, nested or dotted.
    """
    settings = {**with_model(settings), **by_name(rows=rows)}
    saved = saved_settings(settings.get("out")) if settings.get("resume") else {}
    options = resolve(SFTOptions, [("config.json", saved), ("the call", settings)]).options
    return unless_stopped(run(options, rows=unnamed(rows), progress=progress, callbacks=callbacks))


def run(
    options: SFTOptions,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run from options; rows that are objects take the place of the named ones."""
    options = labelled(options, rows=rows)
    return execute("sft", options, partial(_build, rows=rows), progress=progress, callbacks=callbacks)


def _build(
    options: SFTOptions,
    accelerator: Accelerator,
    timer: Timer,
    stack: ExitStack,
    *,
    rows: Sequence[Mapping[str, Any]] | None,
) -> Built:
    source = options.rows if rows is None else rows
    found = demonstrated(source, seed=options.seed)
    policy = open_policy(options.model, options)
    trajectories, too_long = rendered_rows(found, policy, options.chat, max_length=options.max_length)
    if too_long:
        _log.warning("%d of %d rows are longer than max_length and were left out", too_long, len(found))
    module = PolicyModel(policy.model)
    updater = prepared(module, options.optim, accelerator, timer)
    return build_policy(
        SFTLearner(options, updater=updater, demonstrations=trajectories),
        loop_options(options, main="reward"),
        policy=policy,
        module=module,
        optimizer=updater.optimizer,
        evaluate=task_evaluator(options, policy, source, stack),
        prompts=style_of(found),
    )


def task_evaluator(options: Any, policy: Any, source: Any, stack: ExitStack) -> Any:
    """Greedy answers to a task's held-out prompts, scored by the task; None if there shall be no evaluation."""
    if not options.eval.every:
        return None
    engine = sampler(policy, options)
    how: dict[str, Any] = {
        "sampling": Sampling(max_new_tokens=options.max_new_tokens),
        "samples": options.eval.samples,
        "seed": options.seed,
    }
    evaluator: Evaluator | EpisodeEvaluator
    env = env_source(None, source)
    if env is not None:
        _, held_out = episode_rows(env, None, options.eval, n=1, seed=options.seed)
        assert held_out is not None
        limits = AgentOptions()
        envs = open_envs(env, limits, stack)
        arena = open_arena(envs, limits, policy=policy, engine=engine, reward=EnvOnly(), chat=options.chat)
        evaluator = EpisodeEvaluator(arena, rows=held_out, **how)
    else:
        test = task_reward = None
        if isinstance(source, str) and hasattr(resolve_rows(source), "gold"):
            _, test, task_reward = prompt_rows(source, options.eval, seed=options.seed)
        if task_reward is None or test is None:
            raise UserError(
                "sft evaluates with a task's own reward, and these rows are of no task: leave out eval.every"
            )
        reward = open_reward(options.eval.reward, task_reward, stack, weights=None, deadline_s=60.0)
        evaluator = Evaluator(policy=policy, engine=engine, reward=reward, rows=test, chat=options.chat, **how)

    def evaluate(step: int) -> dict[str, float]:
        engine.load(engine_weights(policy), step)
        return evaluator(step)

    return evaluate
