"""`rolecall expert-iteration`: sample, keep the good answers, imitate them, again."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rolecall.config.training import ExpertIterationOptions
from rolecall.jobs.building import Built, Job, build_policy, loop_options, make_updater
from rolecall.jobs.data import check_prompts, open_judge, open_training_reward, prompt_rows
from rolecall.jobs.models import fingerprint, open_policy, sampler
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import Run, train
from rolecall.policy.model import PolicyModel
from rolecall.recipes.collect import Asker, run_state
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress


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

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets, `reward` a function or a list of
    them. All other settings are those of `rolecall expert-iteration`, nested or dotted.
    """
    arguments = {**settings, "rows": rows, "eval_data": eval_data, "reward": reward}
    return train(ExpertIterationOptions, arguments, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options, timer, stack = job.options, job.timer, job.stack
    found = prompt_rows(options.rows, options.eval, seed=options.seed)
    reward = open_training_reward(job, found)
    policy = open_policy(options.model, options)
    for some in (found.train, found.test):
        if some is not None:
            check_prompts(some, policy, options.chat)
    module = PolicyModel(policy.model)
    updater = make_updater(module, job)
    engine = sampler(policy, options, updater=updater)
    parts: dict[str, Any] = {"policy": policy, "engine": engine, "timer": timer}
    asker = Asker.of(options, reward=reward, rows=found.train, **parts)
    learner = ExpertIterationLearner(
        options, policy=policy, updater=updater, asker=asker, tokenizer=fingerprint(policy)
    )

    evaluate = None
    if found.test is not None:
        judge, beside = open_judge(options, reward, found.test_reward, stack, rows=found.test)
        evaluate = Evaluator(
            **parts,
            reward=judge,
            train_reward=beside,
            rows=found.test,
            sampling=options.sampling,
            chat=options.chat,
            samples=options.eval.samples,
            seed=options.seed,
            state_at=partial(run_state, options, learner.order),
            ranks=updater.ranks,
        )
    return build_policy(
        learner,
        loop_options(options, main="reward"),
        policy=policy,
        module=module,
        updater=updater,
        evaluate=evaluate,
        watch_run=partial(setattr, learner, "run"),
        prompts=style_of(found.train),
    )
