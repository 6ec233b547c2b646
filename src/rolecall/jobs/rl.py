"""`rolecall rl`: train a language model with reinforcement learning."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rolecall.config.merge import resolve
from rolecall.config.resume import saved_settings
from rolecall.config.rl import RLOptions, weights_line
from rolecall.errors import UserError
from rolecall.experience.parquet import StoreError
from rolecall.experience.stored import RolloutStore
from rolecall.jobs.agents import (
    EnvSource,
    check_episodes,
    env_label,
    env_source,
    episode_rows,
    open_arena,
    open_envs,
    try_out,
)
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
    steps_of,
    unnamed,
)
from rolecall.jobs.models import open_policy, open_reward_model, with_model
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import (
    Built,
    Run,
    build_policy,
    execute,
    loop_options,
    prepared,
    unless_stopped,
)
from rolecall.policy.heads import Critic, ScalarHead
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import has_adapter, merged
from rolecall.policy.model import PolicyModel
from rolecall.policy.token_text import token_bytes
from rolecall.recipes.collect import Collector, run_state
from rolecall.recipes.episodes import Arena, EnvOnly, EpisodeEvaluator, Episodes
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.guard import Guard
from rolecall.recipes.records import Records
from rolecall.recipes.rl import RLLearner
from rolecall.recipes.stored import StoredAnswers, Unasked
from rolecall.rewards.records import Reward
from rolecall.rollout.engine import Engine, warn_if_support_is_cut
from rolecall.rollout.open import open_engine
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.reference import Reference
from rolecall.train.rundir import RunDir
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")


@trl_arguments
def rl(
    *,
    preset: str = "grpo",
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    env: EnvSource | None = None,
    reward: Any = None,
    advantage: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Train with RL: `rl(model="tiny", rows="data.jsonl", reward=my_reward, preset="grpo", steps=50)`.

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets, `reward` a function or a list of them, `env` a class of environments to play episodes
    of several turns in; `advantage(batch)` and `loss(outputs, batch)` replace the preset's own. All other settings are those of `rolecall rl`, nested or dotted.
    """
    if preset not in RLOptions.presets:
        raise UserError(f"unknown preset {preset!r}; choose one of {', '.join(RLOptions.presets)}")
    rewards = listed(reward)
    given = {**with_model(settings), **by_name(rows=rows, env=env, reward=rewards), **eval_named(eval_data)}
    base = (f"preset {preset}", RLOptions.presets[preset])
    if given.get("resume"):
        base = ("config.json", saved_settings(given.get("out")))
    options = resolve(RLOptions, [base, ("the call", given)]).options
    return unless_stopped(
        run(
            options,
            rows=unnamed(rows),
            eval_data=unnamed(eval_data),
            env=unnamed(env),
            rewards=rewards or None,
            advantage=advantage,
            loss=loss,
            progress=progress,
            callbacks=callbacks,
        )
    )


def run(
    options: RLOptions,
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    env: EnvSource | None = None,
    rewards: Sequence[Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run from options; rows, environments and rewards that are objects take the place of the named ones."""
    if env is not None:
        options = replace(options, env=env_label(env))
    options = labelled(options, rows=rows, reward=rewards)
    build = partial(_build, rows=rows, eval_data=eval_data, env=env, rewards=rewards, advantage=advantage, loss=loss)
    return execute("rl", options, build, progress=progress, callbacks=callbacks)


def _build(
    options: RLOptions,
    accelerator: Accelerator,
    timer: Timer,
    stack: ExitStack,
    *,
    rows: RowsSource | None,
    eval_data: RowsSource | None,
    env: EnvSource | None,
    rewards: Sequence[Any] | None,
    advantage: Callable[..., Any] | None,
    loss: Callable[..., Any] | None,
) -> Built:
    given = options.rows if rows is None else rows
    played = env_source(options.env if env is None else env, given)
    train: Rows | None = None
    test: Rows | None = None
    reward: Reward = Unasked() if played is None else EnvOnly()
    asked = options.sampled_now or bool(options.eval.every)
    task_reward = test_reward = None
    if played is not None:
        check_episodes(options)
    if asked and played is not None:
        train, test = episode_rows(
            played, given, options.eval, seed=options.seed, prompt=options.agent.prompt, eval_data=eval_data
        )
    elif asked:
        source = "addition" if given is None else given
        found = prompt_rows(source, options.eval, seed=options.seed, eval_data=eval_data)
        train, test, task_reward, test_reward = found.train, found.test, found.reward, found.test_reward
    if train is not None:
        options = steps_of(options, train, options.prompts)
    if train is not None and (played is None or rewards or options.reward):
        reward = open_reward(
            rewards or options.reward,
            task_reward,
            stack,
            weights=options.reward_weights,
            **options.reward_limits(),
            rows=train,
            timer=timer,
        )
    envs = open_envs(played, options.agent, stack) if asked and played is not None else None
    if envs is not None and played is not None and train is not None:
        try_out(played, envs, train[0])
    policy = open_policy(options.model, options)
    for some in (train, test):
        if some is not None and played is None:
            check_prompts(some, policy, options.chat)
    module = _module(policy, options)
    updater = prepared(module, options.optim, accelerator, timer)
    reference = Reference(module) if options.algorithm.kl_coef > 0 else None  # now on the module's device
    engine = sampler(policy, options)
    guard = Guard(
        options, policy=policy, updater=updater, engine=engine, engine_dtype=_dtype(options) or policy.model.dtype
    )
    warn_if_support_is_cut(options.sampling)
    if line := weights_line(options):
        _log.info(line)
    arena = None
    if envs is not None:
        arena = open_arena(
            envs, options.agent, policy=policy, engine=engine, reward=reward, chat=options.chat, timer=timer
        )
    collector: Collector | None = None
    if options.from_run is not None:
        collector = _stored_answers(options, policy, engine, accelerator)
    elif arena is not None and train is not None:
        collector = _episodes(options, arena, train, accelerator)
    learner = RLLearner(
        options,
        policy=policy,
        module=module,
        updater=updater,
        engine=engine,
        reward=reward,
        rows=train,
        reference=reference,
        watches=[guard],
        timer=timer,
        advantage=advantage,
        loss=loss,
        collector=collector,
    )

    def record(run: RunDir) -> None:
        spell = partial(token_bytes, policy.tokenizer)
        learner.watches.append(Records(run, options, model=engine.hash, tokenizer=fingerprint(policy), pieces=spell))

    evaluate: Evaluator | EpisodeEvaluator | None = None
    how: dict[str, Any] = {
        "sampling": options.sampling,
        "samples": options.eval.samples,
        "seed": options.seed,
        "reference": reference,
        "state_at": partial(run_state, options, getattr(learner.collector, "order", None)),
    }
    if test is not None and arena is not None:
        evaluate = EpisodeEvaluator(arena, rows=test, **how)
    elif test is not None:
        judge, beside = open_judge(options, reward, test_reward, stack, rows=test)
        evaluate = Evaluator(
            policy=policy,
            engine=engine,
            reward=judge,
            train_reward=beside,
            rows=test,
            chat=options.chat,
            timer=timer,
            **how,
        )
    return build_policy(
        learner,
        loop_options(options, main="reward"),
        policy=policy,
        module=module,
        optimizer=updater.optimizer,
        evaluate=evaluate,
        watch_run=record,
        prompts="chat" if played is not None else None if train is None else style_of(train),
    )


def _episodes(options: RLOptions, arena: Arena, rows: Rows, accelerator: Accelerator) -> Episodes:
    rank, ranks = accelerator.process_index, accelerator.num_processes
    return Episodes(options, arena, rows=rows, rank=rank, ranks=ranks)


def _stored_answers(options: RLOptions, policy: LoadedModel, engine: Engine, accelerator: Accelerator) -> StoredAnswers:
    """The rollouts to train on in place of new ones, all read once and found good."""
    assert options.from_run is not None
    try:
        store = RolloutStore(Path(options.from_run).expanduser())
        facts = store.check(
            tokenizer=fingerprint(policy),
            vocabulary=policy.model.config.vocab_size,
            temperature=options.sampling.scoring_temperature,
            context=policy.context_length,
        )
    except StoreError as error:
        raise UserError(str(error)) from error
    _log.info("%d answers from %d steps of %s; nothing is sampled", facts.answers, facts.steps, store.place)
    if engine.hash() not in facts.models:
        _log.warning(
            "none of the rollouts was sampled by the weights that training starts from: every ratio is to another policy"
        )
    if facts.unrecorded:
        _log.warning(
            "%d of %d answers were drawn from a part of the vocabulary that was not recorded: they are scored over the "
            "whole of it, which biases the gradient",
            *(facts.unrecorded, facts.answers),
        )
    if facts.unknown:
        _log.warning(
            "%d of %d sampled tokens have no finite behaviour log-prob and are left out", facts.unknown, facts.tokens
        )
    return StoredAnswers(store, rank=accelerator.process_index, ranks=accelerator.num_processes)


def _module(policy: LoadedModel, options: RLOptions) -> PolicyModel:
    o = options.algorithm
    if o.critic == "shared":
        return PolicyModel(policy.model, value_head=ScalarHead(policy.model.get_output_embeddings().in_features))
    if o.critic == "separate":
        if o.critic_from is not None:
            critic = Critic.from_reward_model(open_reward_model(o.critic_from))
        else:
            critic = Critic.from_policy(merged(policy) if has_adapter(policy) else policy)
        return PolicyModel(policy.model, critic=critic)
    return PolicyModel(policy.model)


def sampler(policy: LoadedModel, options: Any) -> Engine:
    """The engine that the options ask for, with the policy's weights."""
    plain = merged(policy) if has_adapter(policy) else policy
    return open_engine(plain, name=options.engine.name, dtype=_dtype(options), max_rows=options.engine.max_rows)


def _dtype(options: Any) -> torch.dtype | None:
    return None if options.engine.dtype is None else getattr(torch, options.engine.dtype)


def fingerprint(policy: LoadedModel) -> str:
    """Tells tokenizers apart: a hash of the vocabulary."""
    vocabulary = sorted(policy.tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()
