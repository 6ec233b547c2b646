"""`rolecall expert-iteration`: sample, keep the good answers, imitate them, again."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from accelerate import Accelerator

from rolecall.config.expert_iteration import ExpertIterationOptions
from rolecall.config.merge import resolve
from rolecall.config.resume import saved_settings
from rolecall.jobs.arguments import trl_arguments
from rolecall.jobs.data import (
    by_name,
    check_prompts,
    eval_named,
    labelled,
    listed,
    open_judge,
    open_reward,
    prompt_rows,
    unnamed,
)
from rolecall.jobs.models import open_policy, with_model
from rolecall.jobs.prompting import style_of
from rolecall.jobs.rl import fingerprint, sampler
from rolecall.jobs.running import Built, Run, build_policy, execute, loop_options, prepared, unless_stopped
from rolecall.policy.model import PolicyModel
from rolecall.recipes.ask import Asker
from rolecall.recipes.collect import run_state
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.rundir import RunDir
from rolecall.train.timing import Timer


@trl_arguments
def expert_iteration(
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    reward: Any = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Expert iteration: `expert_iteration(model="runs/sft-1", rows="data.jsonl", reward=my_reward, steps=5)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets, `reward` a function or a list of them. All other settings are those of
    `rolecall expert-iteration`, nested or dotted.
    """
    rewards = listed(reward)
    given = {**with_model(settings), **by_name(rows=rows, reward=rewards), **eval_named(eval_data)}
    saved = saved_settings(given.get("out")) if given.get("resume") else {}
    options = resolve(ExpertIterationOptions, [("config.json", saved), ("the call", given)]).options
    given_rows = {"rows": unnamed(rows), "eval_data": unnamed(eval_data)}
    return unless_stopped(run(options, **given_rows, rewards=rewards or None, progress=progress, callbacks=callbacks))


def run(
    options: ExpertIterationOptions,
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    rewards: Sequence[Any] | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run from options; rows and rewards that are objects take the place of the named ones."""
    options = labelled(options, rows=rows, reward=rewards)
    build = partial(_build, rows=rows, eval_data=eval_data, rewards=rewards)
    return execute("expert-iteration", options, build, progress=progress, callbacks=callbacks)


def _build(
    options: ExpertIterationOptions,
    accelerator: Accelerator,
    timer: Timer,
    stack: ExitStack,
    *,
    rows: RowsSource | None,
    eval_data: RowsSource | None,
    rewards: Sequence[Any] | None,
) -> Built:
    source = options.rows if rows is None else rows
    found = prompt_rows(source, options.eval, seed=options.seed, eval_data=eval_data)
    train, test = found.train, found.test
    reward = open_reward(
        rewards or options.reward,
        found.reward,
        stack,
        weights=options.reward_weights,
        **options.reward_limits(),
        rows=train,
        timer=timer,
    )
    policy = open_policy(options.model, options)
    for some in (train, test):
        if some is not None:
            check_prompts(some, policy, options.chat)
    module = PolicyModel(policy.model)
    updater = prepared(module, options.optim, accelerator, timer)
    engine = sampler(policy, options)
    asker = Asker(
        policy=policy,
        engine=engine,
        reward=reward,
        rows=train,
        chat=options.chat,
        sampling=options.sampling,
        timer=timer,
    )
    learner = ExpertIterationLearner(
        options, policy=policy, updater=updater, asker=asker, tokenizer=fingerprint(policy)
    )

    def watch(run: RunDir) -> None:
        learner.run = run

    evaluate = None
    if test is not None:
        judge, beside = open_judge(options, reward, found.test_reward, stack, rows=test)
        evaluate = Evaluator(
            policy=policy,
            engine=engine,
            reward=judge,
            train_reward=beside,
            rows=test,
            sampling=options.sampling,
            chat=options.chat,
            samples=options.eval.samples,
            seed=options.seed,
            timer=timer,
            state_at=partial(run_state, options, learner.order),
        )
    return build_policy(
        learner,
        loop_options(options, main="reward"),
        policy=policy,
        module=module,
        optimizer=updater.optimizer,
        evaluate=evaluate,
        watch_run=watch,
        prompts=style_of(train),
    )
