"""`rolecall rl`: train a language model with reinforcement learning."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rolecall.agents.episodes import Arena, EnvOnly, EpisodeEvaluator, Episodes
from rolecall.agents.pool import Envs
from rolecall.agents.programs import Programs
from rolecall.config.given import resolve_source
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.experience.mirror import Mirror
from rolecall.experience.parquet import StoreError
from rolecall.experience.stored import RolloutStore
from rolecall.jobs.agents import (
    EnvSource,
    check_episodes,
    env_source,
    episode_rows,
    open_arena,
    open_envs,
    open_lessons,
    open_turn_judge,
    try_out,
)
from rolecall.jobs.building import Built, Job, build_policy, loop_options, make_updater
from rolecall.jobs.data import PromptRows, check_prompts, open_judge, open_training_reward, prompt_rows, steps_of
from rolecall.jobs.models import as_served, engine_dtype, fingerprint, open_policy, open_reward_model, samplers
from rolecall.jobs.prompting import style_of
from rolecall.jobs.running import Run, train
from rolecall.policy.heads import Critic, ScalarHead
from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import has_adapter, merged
from rolecall.policy.model import PolicyModel
from rolecall.policy.token_text import token_bytes
from rolecall.recipes.ahead import Ahead, InOrder, Lane
from rolecall.recipes.collect import Answers, Collector, RowsCollector, run_state
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.guard import Guard
from rolecall.recipes.records import Records
from rolecall.recipes.rl import RLLearner, engine_weights
from rolecall.recipes.stored_answers import NoReward, StoredAnswers
from rolecall.rewards.records import Reward
from rolecall.rollout.engine import Engine, warn_if_support_is_cut
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.pinned import Published
from rolecall.rollout.units import Side, UnitPool
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import Stream
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.ranks import Ranks
from rolecall.train.reference import Reference
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")


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

    `rows` and `eval_data` may be lists of dicts, data frames or Hugging Face datasets, `reward` a function or a list of
    them, `env` a class of environments to play episodes of several turns in, `agent` a function (base URL, key, row) that
    plays them itself; `advantage(batch)` and `loss(outputs, batch)`
    replace the preset's own. All other settings are those of `rolecall rl`, nested or dotted.
    """
    arguments = {**settings, "rows": rows, "eval_data": eval_data, "env": env, "reward": reward}
    functions = {"advantage": advantage, "loss": loss}
    return train(RLOptions, arguments, base=preset, progress=progress, callbacks=callbacks, functions=functions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the policy is asked, and what scores it. Without rows nothing is asked: stored answers train."""

    train: Rows | None = None
    test: Rows | None = None
    reward: Reward
    test_reward: str | None = None
    """That of the evaluation's task."""
    envs: Envs | Programs | None = None
    """Where episodes are played."""


def build(job: Job) -> Built:
    # What is sampled ahead is timed apart: it belongs to another step than the one that trains.
    aside = Timer() if job.options.ahead else job.timer
    mirror = _mirror(job)
    asked, played = _asked(job, aside), _played(job)
    options, rows, test = job.options, asked.train, asked.test
    if rows is not None:
        options = steps_of(options, rows, options.prompts)
    policy = open_policy(options.model, options)
    for some in (rows, test):
        if some is not None and played is None:
            check_prompts(some, policy, options.chat)
    module = _module(policy, options)
    reference = Reference(module) if options.algorithm.kl_coef > 0 else None
    updater = make_updater(module, job, reference=reference)
    engine, options, guard = _engine(job, options, policy, updater, aside, _lanes(options, asked))
    parts: dict[str, Any] = {"policy": policy, "engine": engine, "reward": asked.reward, "timer": job.timer}
    arena = _arena(options, asked, **parts)
    if options.from_run is not None:
        collector: Collector = _stored_answers(options, policy, engine, updater.ranks)
    elif isinstance(engine, Published):
        collector = _ahead(job, options, asked, updater.ranks, engine, aside, policy)
    else:
        collector = _collector(job, options, asked, updater.ranks, arena, **parts)
    learner = RLLearner(
        options,
        module=module,
        updater=updater,
        rows=rows,
        reference=reference,
        watches=[guard],
        **job.functions,
        collector=collector,
        **parts,
    )

    def record(run: RunDir) -> None:
        spell = partial(token_bytes, policy.tokenizer)
        model = collector.hash if isinstance(collector, Ahead) else engine.hash
        how: dict[str, Any] = {"tokenizer": fingerprint(policy), "pieces": spell, "mirror": mirror}
        learner.watches.append(Records(run, options, model=model, **how))
        if mirror is not None:
            mirror.watch(run.rollouts)
            run.also_cut.append(mirror.cut_after)

    state_at = partial(run_state, options, getattr(learner.collector, "order", None))
    watched: dict[str, Any] = {"reference": reference, "state_at": state_at, "ranks": updater.ranks}
    return build_policy(
        learner,
        loop_options(options, main="reward"),
        policy=policy,
        module=module,
        updater=updater,
        evaluate=_evaluator(job, asked, parts, arena, **watched),
        watch_run=record,
        finish=lambda run: None if mirror is None else mirror.finish(),
        prompts="chat" if played is not None else None if rows is None else style_of(rows),
    )


def _engine(
    job: Job, options: RLOptions, policy: LoadedModel, updater: Updater, timer: Timer, lanes: int
) -> tuple[Engine, RLOptions, Guard]:
    """What samples, the options as that turned out to be, and who watches that both sides agree."""
    engines = samplers(policy, options, lanes, timer=timer, updater=updater, stack=job.stack)
    engine, options = engines[0], as_served(options, engines[0])
    dtype = engine_dtype(options) or policy.model.dtype
    if options.ahead:
        if options.inflight:
            _let_follow(engines)
        engine = Published(engines, engine_weights(policy), dtype=dtype, inflight=options.inflight)
    warn_if_support_is_cut(options.sampling)
    if line := options.weights_line:
        _log.info(line)
    return engine, options, Guard(options, policy=policy, updater=updater, engine=engine, engine_dtype=dtype)


def _let_follow(engines: Sequence[Engine]) -> None:
    """Allow weights to change while answers grow."""
    for engine in engines:
        held = engine.pool if isinstance(engine, Side) else engine
        if not isinstance(held, NativeEngine | UnitPool):
            raise UserError(
                "async.inflight works with the native engine, which cannot run this model: leave out async.inflight"
            )
        held.inflight = True


def _played(job: Job) -> EnvSource | None:
    """The environment that episodes are played in; None if prompts are answered once."""
    return env_source(resolve_source(job.options.env, "environment"), job.options.rows)


def _arena(options: RLOptions, asked: _Asked, **parts: Any) -> Arena | None:
    """Where episodes are played, if any are."""
    return None if asked.envs is None else open_arena(asked.envs, options.agent, chat=options.chat, **parts)


def _collector(
    job: Job, options: RLOptions, asked: _Asked, ranks: Ranks, arena: Arena | None, **parts: Any
) -> RowsCollector:
    """What answers the rows, or plays their episodes."""
    assert asked.train is not None
    if arena is None:
        return Answers(options, rows=asked.train, ranks=ranks, **parts)
    lessons = open_lessons(options, arena, ranks, job.stack)
    judge = open_turn_judge(options, parts["policy"], parts["engine"])
    return Episodes(options, arena, rows=asked.train, ranks=ranks, lessons=lessons, judge=judge)


def _lanes(options: RLOptions, asked: _Asked) -> int:
    """How many steps may be sampled at once: their rows must be known before they are sampled, and each needs an engine."""
    after = options.algorithm.resample or options.lessons.on  # a step begins where the one before has ended
    if after or isinstance(asked.train, Stream) or isinstance(asked.envs, Programs):
        return 1
    return max(1, options.ahead)


def _ahead(
    job: Job, options: RLOptions, asked: _Asked, ranks: Ranks, published: Published, aside: Timer, policy: LoadedModel
) -> Ahead:
    """The same, `options.ahead` steps ahead of training, in as many lanes as there are engines."""
    if options.algorithm.resample and job.accelerator.num_processes > 1:
        raise UserError(
            "algorithm.resample lets the processes of a job agree on further prompts, which they cannot while they train: "
            "leave out async.ahead, or algorithm.resample"
        )
    if options.lessons.on and job.accelerator.num_processes > 1:
        raise UserError(
            "lessons are learned from the episodes of all processes of a job, which cannot meet while they train: leave out "
            "async.ahead or lessons.share, or train in one process"
        )
    if line := options.ahead_line:
        _log.info(line)
    reward, played, lanes = InOrder(asked.reward, published), _played(job), list[Lane]()
    asks = asked.reward if len(published.pinned) == 1 else reward
    for engine in published.pinned:
        parts: dict[str, Any] = {"policy": policy, "engine": engine, "reward": asks, "timer": Timer()}
        own = asked if not lanes or played is None else replace(asked, envs=open_envs(played, options.agent, job.stack))
        collector = _collector(job, options, own, ranks, _arena(options, own, **parts), **parts)
        lanes.append(Lane(collector=collector, engine=engine, timer=parts["timer"]))
    made = Ahead(lanes, reward=reward, ahead=options.ahead, steps=options.steps, timer=job.timer, aside=aside)
    job.stack.callback(made.close)
    return made


def _asked(job: Job, timer: Timer) -> _Asked:
    """The rows, their reward and environments, opened and found good. `timer` is told how far rewards have come."""
    options, played = job.options, _played(job)
    if played is not None:
        check_episodes(options)
    elif options.lessons.on:
        raise UserError(
            "lessons are for episodes: play the rows as an environment of one turn (--env addition), or leave out lessons.share"
        )
    if options.lessons.clip_high is not None and job.functions.get("loss") is not None:
        raise UserError("a loss of your own clips as it likes: leave out lessons.clip_high, and look at batch.guided")
    if not (options.sampled_now or options.eval.every):
        return _Asked(reward=NoReward() if played is None else EnvOnly())
    if played is None:
        found = prompt_rows("addition" if options.rows is None else options.rows, options.eval, seed=options.seed)
    else:
        rows, held_out = episode_rows(
            played, options.rows, options.eval, seed=options.seed, prompt=options.agent.prompt, agent=options.agent
        )
        found = PromptRows(train=rows, test=held_out)
    reward: Reward = EnvOnly()
    if played is None or options.reward:
        reward = open_training_reward(replace(job, timer=timer), found)
    envs = None
    if played is not None:
        envs = open_envs(played, options.agent, job.stack, options.sampling)
        try_out(played, envs, found.train[0])
    return _Asked(train=found.train, test=found.test, reward=reward, test_reward=found.test_reward, envs=envs)


def _evaluator(job: Job, asked: _Asked, parts: dict[str, Any], arena: Arena | None, **more: Any) -> Any:
    """What answers held-out rows, or plays held-out episodes; None if the run never evaluates."""
    options, engine = job.options, parts["engine"]
    if asked.test is None:
        return None
    how = {"sampling": options.sampling, "samples": options.eval.samples, "seed": options.seed, **more}
    alone = engine.alone if isinstance(engine, Published) else lambda evaluate: evaluate
    if arena is not None:
        return alone(EpisodeEvaluator(arena, rows=asked.test, **how))
    judge, beside = open_judge(options, asked.reward, asked.test_reward, job.stack, rows=asked.test)
    parts = {**parts, "reward": judge, "train_reward": beside}
    return alone(Evaluator(rows=asked.test, chat=options.chat, **parts, **how))


def _mirror(job: Job) -> Mirror | None:
    """What copies the rollouts to `store.url`, if that is asked for; on the rank that records them."""
    options = job.options
    if options.store.url is None or not job.accelerator.is_main_process:
        return None
    mirror = Mirror(options.store, resume=options.resume, overwrite=options.overwrite)
    job.stack.callback(mirror.close)
    return mirror


def _stored_answers(options: RLOptions, policy: LoadedModel, engine: Engine, ranks: Ranks) -> StoredAnswers:
    """The rollouts to train on in place of new ones, all read once and found good."""
    assert options.from_run is not None
    try:
        store = RolloutStore(options.from_run)
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
    return StoredAnswers(store, ranks=ranks)


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
