"""Environments, their rows and lessons from the names a user gives."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rolecall.agents.conversation import Dialect
from rolecall.agents.distil import Distil, by_function, by_policy, by_server
from rolecall.agents.embedding import by_embedding
from rolecall.agents.environments import check_name
from rolecall.agents.episodes import Arena
from rolecall.agents.guided import Lessons
from rolecall.agents.judging import Judge, policy_judge, served_judge
from rolecall.agents.lessons import LessonPool
from rolecall.agents.pool import EnvPool, Envs, Failure, LocalEnvs
from rolecall.agents.programs import PREFIX, Program, ProgramPlayer, Programs
from rolecall.agents.verifiers_env import PREFIX as VERIFIERS
from rolecall.agents.verifiers_env import verifiers_rows
from rolecall.config.agents import AgentOptions
from rolecall.config.given import GIVEN, resolve_source
from rolecall.config.parts import ChatOptions, HeldOutOptions
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.jobs.data import check_templates, held_out, open_named
from rolecall.jobs.models import open_model
from rolecall.jobs.prompting import prompting_of
from rolecall.policy.load import LoadedModel
from rolecall.recipes.rendering import rendered_prompt
from rolecall.remote.plain import PlainServer
from rolecall.rewards.records import Reward
from rolecall.rollout.engine import Engine
from rolecall.rollout.open import open_engine
from rolecall.tasks.agent_tasks import AGENT_TASKS
from rolecall.tasks.names import find_task, is_task
from rolecall.tasks.rows import ListRows, Rows
from rolecall.tasks.sources import RowsSource, Splits
from rolecall.train.ranks import Ranks
from rolecall.train.timing import Timer
from rolecall.types import Sampling
from rolecall.workers.hosts import RayHosts
from rolecall.workers.load import load_object, split_name

_log = logging.getLogger("rolecall")

EnvSource = str | Callable[[], Any] | Program
_TRAIN_ROWS = 20_000
"""Rows drawn from a task or an environment that can make any number."""


def env_source(env: EnvSource | None, rows: RowsSource | None) -> EnvSource | None:
    """The environment to play in: the one given, or that of the rows' task; None if the rows are answered once."""
    if env is None and isinstance(rows, str) and rows.partition(":")[0] in AGENT_TASKS:
        return rows
    return env


def episode_rows(
    env: EnvSource,
    rows: RowsSource | None,
    evaluation: HeldOutOptions,
    *,
    seed: int,
    n: int = _TRAIN_ROWS,
    prompt: str | None = None,
    learned: str | None = None,
    agent: AgentOptions | None = None,
) -> tuple[Rows, Rows | None]:
    """(rows to play, held-out rows if they will be used), each with the prompt that takes the place of a description:
    the one given, else the one that the model learned with, unless the rows have their own. `agent` says how an environment
    that brings rows is opened to read them."""
    train, test = _episode_rows(env, rows, evaluation, seed=seed, n=n, agent=agent or AgentOptions())
    own = len(train) and "prompt" in train[0]
    prompt = learned if prompt is None and not own else prompt
    if prompt is None:
        return train, test
    if not isinstance(env, str) or not env.startswith("gym:"):
        raise UserError(
            f"env.prompt is for environments named gym:…; {env_label(env)} says itself what the policy reads first"
        )
    if own:
        raise UserError("the rows have prompts of their own: leave out env.prompt")
    return _prompted(train, prompt), None if test is None else _prompted(test, prompt)


def _prompted(rows: Rows, prompt: str) -> Rows:
    return ListRows([{**rows[i], "prompt": prompt} for i in range(len(rows))])


def _episode_rows(
    env: EnvSource, rows: RowsSource | None, evaluation: HeldOutOptions, *, seed: int, n: int, agent: AgentOptions
) -> tuple[Rows, Rows | None]:
    def test_rows(task: Any) -> Rows:
        rows: Rows = task.rows("test", n=evaluation.rows)
        return rows

    test: Rows | None
    if rows is None and isinstance(env, str) and env.startswith(VERIFIERS):
        found = verifiers_rows(env, agent, n=n, held_out=evaluation.rows)
    elif rows is None and not (isinstance(env, str) and is_task(env)):
        found = Splits(
            train=ListRows([{"seed": i} for i in range(n)]),
            test=ListRows([{"seed": -1 - i} for i in range(evaluation.rows)]),
        )
    else:
        found = open_named(env if rows is None else rows)
        if not isinstance(found, Splits):
            test = test_rows(found) if evaluation.every and evaluation.data is None else None
            found = Splits(train=found.rows("train", n=n, seed=seed), test=test)
        check_templates(found.train)
    if not evaluation.every:
        return found.train, None
    train, test = held_out(found, evaluation, task=test_rows)
    return train, test


def open_envs(
    env: EnvSource, options: AgentOptions, stack: ExitStack, sampling: Sampling | None = None
) -> Envs | Programs:
    """The environments: built-in ones in this process, all others in workers, and so are programs. `sampling` is how frozen
    players draw."""
    envs = _open_envs(env, options, stack)
    voices = dict(given.split("=", 1) for given in options.frozen)
    if not voices:
        return envs
    if isinstance(envs, Programs):
        raise UserError("agent.frozen is for players of an environment: a program calls whom it likes; leave it out")
    unknown = [player for player in voices if player not in envs.players]
    if unknown or len(voices) == len(envs.players):
        raise UserError(
            f"agent.frozen: the players of {env_label(env)} are {', '.join(envs.players)}; "
            + (f"{unknown[0]!r} is none of them" if unknown else "leave one that learns")
        )
    from rolecall.agents.frozen import FrozenEnvs  # and httpx, which nothing else needs

    drawn = replace(sampling or Sampling(), stop_ids=None, logprobs="full")
    how: dict[str, Any] = {"sampling": drawn, "seconds": options.deadline}
    made = {player: _voice(model, stack, **how) for player, model in voices.items()}
    return FrozenEnvs(envs, made, max_turns=options.max_turns)


def _voice(model: str, stack: ExitStack, *, sampling: Sampling, seconds: float) -> Any:
    """Where a frozen player's words come from."""
    from rolecall.agents.frozen import ModelVoice, ServerVoice
    from rolecall.remote.plain import PlainServer

    if model.startswith(("http://", "https://")):
        server = PlainServer(model)
        stack.callback(server.close)
        return ServerVoice(server, sampling, seconds=seconds)
    loaded, chat = open_model(model), prompting_of(model).filled(ChatOptions())
    if not loaded.has_chat_template:
        raise UserError(f"agent.frozen: model {model!r} has no chat template, which a player needs")
    dialect = Dialect(
        tokenizer=loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        template_kwargs=chat.chat_template_kwargs,
        system_prompt=chat.system_prompt,
    )
    return ModelVoice(open_engine(loaded), dialect, sampling, context_length=loaded.context_length)


def _open_envs(env: EnvSource, options: AgentOptions, stack: ExitStack) -> Envs | Programs:
    if isinstance(env, str):
        resolve_source(env, "environment")
        if not env:
            raise UserError(
                "the environment's name is empty: give one, such as --env calculator or --env file.py:Class"
            )
        if env.startswith((PREFIX, VERIFIERS)):
            return _open_programs(env.removeprefix(PREFIX), options, stack)
        check_name(env)
        if env.partition(":")[0] in AGENT_TASKS:
            _check_here(options, "a built-in environment runs in the process that trains")
            return LocalEnvs(find_task(env).env)
    if isinstance(env, Program):
        return _open_programs(env, options, stack)
    limits: dict[str, Any] = {"network": options.network, "variables": options.variables}
    if options.cluster == "ray":
        hosts = stack.enter_context(RayHosts(options.workers, what="environment workers", option="agent.workers"))
        limits["hosts"] = hosts.hosts
    return stack.enter_context(EnvPool(env, workers=options.workers, deadline_s=options.deadline, **limits))


def _check_here(options: AgentOptions, why: str) -> None:
    if options.cluster != "none":
        raise UserError(f"agent.cluster {options.cluster} is for workers of environments, and {why}: leave it out")


def _open_programs(source: str | Program, options: AgentOptions, stack: ExitStack) -> Programs:
    if options.manager != "append":
        given = "when_full cut" if options.when_full == "cut" else f"context {options.context}"
        raise UserError(f"agent.{given} is for environments: a program keeps its conversation itself; leave it out")
    _check_here(options, "programs call back to this machine")
    return stack.enter_context(Programs(source, options))


def try_out(env: EnvSource, envs: Envs | Programs, row: Mapping[str, Any]) -> None:
    """A dry episode of one step in an environment that is not built in, so that one that cannot work is found at once.

    What `step` raises is a warning only: the message is ours, not the policy's.
    """
    if isinstance(envs, Programs) or (isinstance(env, str) and is_task(env)):
        return
    label = env_label(env)
    (found,) = envs.ask("start", {0: (row, 0)}).values()
    if isinstance(found, Failure):
        raise UserError(f"environment {label} cannot begin an episode: {found.reason}")
    (found,) = envs.ask("step", {0: {"role": "assistant", "content": "0"}}).values()
    if not isinstance(found, Failure) and not found.done:
        envs.ask("end", {0: None})
    if isinstance(found, Failure) and found.wrong:
        raise UserError(f"environment {label} cannot continue an episode: {found.reason}")
    if isinstance(found, Failure):
        _log.warning(
            "environment %s failed in a dry episode, when given '0': %s; an episode in which that happens is broken off",
            label,
            found.reason,
        )


def open_arena(
    envs: Envs | Programs,
    options: AgentOptions,
    *,
    policy: LoadedModel,
    engine: Engine,
    reward: Reward,
    chat: ChatOptions,
    timer: Timer | None = None,
) -> Arena:
    """Everything an episode needs. The reward is added to what the environment gives."""
    if not policy.has_chat_template:
        raise UserError(f"model {policy.name!r} has no chat template, which episodes of several turns need")
    if options.context_tokens is not None and options.context_tokens > policy.context_length:
        raise UserError(
            f"agent.context_tokens is {options.context_tokens} but the model's context is {policy.context_length}"
        )
    return Arena(policy=policy, engine=engine, envs=envs, reward=reward, options=options, chat=chat, timer=timer)


def open_turn_judge(options: RLOptions, policy: LoadedModel, engine: Engine) -> Judge | None:
    """Who judges turns, if anybody is asked."""
    who = options.algorithm.credit_judge
    if who is None:
        return None
    if who != "policy":
        return served_judge(PlainServer(who))

    def render(text: str) -> Sequence[int]:
        return rendered_prompt({"prompt": [{"role": "user", "content": text}]}, policy=policy, chat=options.chat).ids

    return policy_judge(policy, engine, render)


def check_episodes(options: RLOptions) -> None:
    """Refuse what is about single answers."""
    if options.algorithm.overlong_buffer is not None:
        raise UserError(
            "algorithm.overlong_buffer is about the length of one answer; for episodes use agent.max_tokens"
        )
    if options.algorithm.resample or options.algorithm.name == "remax":
        raise UserError(
            "algorithm.resample and remax ask for further answers to a prompt, which episodes do not offer: leave resample "
            "out, or use another algorithm"
        )
    if options.replay.on and (options.replay.normalise == "joint" or options.replay.answers is not None):
        raise UserError(
            "replay.normalise joint and replay.answers are about single answers; episodes are replayed whole, and compared "
            "among themselves: leave both out"
        )


def env_label(env: EnvSource) -> str:
    """What config.json says of an environment."""
    if isinstance(env, Program):
        return f"{GIVEN} agent {env.name}"
    return env if isinstance(env, str) else f"{GIVEN} {getattr(env, '__name__', type(env).__name__)}"


def open_lessons(options: RLOptions, arena: Arena, ranks: Ranks, stack: ExitStack) -> Lessons | None:
    """The lessons that episodes read; None if they read none."""
    o = options.lessons
    if not o.on:
        return None
    if isinstance(arena.player, ProgramPlayer):
        raise UserError(
            "a program writes its prompts itself, so its episodes cannot be given lessons: leave out lessons.share"
        )
    _check_template(arena)
    pool = LessonPool(o, nearest=None if o.recall == "bm25" else by_embedding(o.recall))
    return Lessons(o, pool, _distiller(options, arena, stack), tokenizer=arena.policy.tokenizer, ranks=ranks)


def _distiller(options: RLOptions, arena: Arena, stack: ExitStack) -> Distil:
    o = options.lessons
    by: str | Callable[..., object] = resolve_source(o.by, "function that distils lessons")
    sampling = replace(options.sampling, max_new_tokens=o.max_tokens, stop_strings=())
    if callable(by):
        return by_function(by, getattr(by, "__name__", "the function"))
    if by == "policy":
        return by_policy(
            arena.player.engine,
            arena.player.dialect,
            sampling,
            seed=options.seed,
            first_prompt=options.prompts,
            context=arena.policy.context_length,
        )
    if by.startswith(("http://", "https://")):
        from rolecall.remote.plain import PlainServer

        server = PlainServer(by, model=o.served_model)
        stack.callback(server.close)
        return by_server(server, sampling, seed=options.seed)
    what = f"lessons.by {by!r}"
    if ":" not in by:
        raise UserError(f"{what} is none of policy, an address (http://host:8000/v1), and file.py:function")
    found = load_object(*split_name(by, what=what, error=UserError), what=what, error=UserError)
    if not callable(found):
        raise UserError(f"{what} is a {type(found).__name__}, not a function")
    return by_function(found, by)


def _check_template(arena: Arena) -> None:
    """Lessons are a message after the prompt's; some chat templates refuse two messages of the user's in a row."""
    twice = [{"role": "user", "content": "a task"}, {"role": "user", "content": "a lesson"}]
    try:
        arena.player.dialect.prompt(twice, given=1)
    except Exception as error:
        raise UserError(
            f"the chat template of {arena.policy.name!r} does not take lessons as a second message of the user's "
            f"({error}): leave out lessons.share, or give another template with chat.chat_template_kwargs"
        ) from error
