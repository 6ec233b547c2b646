"""`rolecall eval`: numbers of a model on held-out rows."""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall.agents.episodes import EnvOnly, EpisodeEvaluator
from rolecall.config.given import GivenObject, resolve_source
from rolecall.config.parts import HeldOutOptions
from rolecall.config.preflight import check_paths
from rolecall.config.resume import saved_settings
from rolecall.config.use import EvalOptions
from rolecall.errors import UserError
from rolecall.jobs.agents import EnvSource, env_source, episode_rows, open_arena, open_envs
from rolecall.jobs.arguments import options_of
from rolecall.jobs.data import check_prompts, open_reward, prompt_rows
from rolecall.jobs.models import open_model, sampler
from rolecall.jobs.prompting import AsMessages, prompting_of
from rolecall.policy.load import reading
from rolecall.policy.model import PolicyModel
from rolecall.recipes.evaluate import Evaluation, Evaluator
from rolecall.rewards.records import Reward
from rolecall.tasks.names import is_task
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import head
from rolecall.train.reference import Reference

_log = logging.getLogger("rolecall")


def eval(  # the name of the command
    *,
    rows: RowsSource | None = None,
    env: EnvSource | None = None,
    reward: Any = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate: `eval(model="runs/rl-1", rows="test.jsonl", reward=my_reward).numbers`."""
    return run(options_of(EvalOptions, {**settings, "rows": rows, "env": env, "reward": reward}))


def run(options: EvalOptions) -> Evaluation:
    """Run from options: on a task's test split, on what a run held out, or on all rows of a file."""
    check_paths(options)
    learned = _settings(options.model)
    source = options.rows
    played = env_source(resolve_source(options.env, "environment"), source)
    if played is None and source is None:
        source = learned.get("rows")
        played = env_source(learned.get("env"), source)
    if played is not None:
        return _episodes(options, played, source, learned)
    if source is None:
        if not learned:
            raise UserError(
                f"which rows should {options.model} answer? give --rows, or a run as --model, which brings those it held out"
            )
        source = "addition"
    with ExitStack() as stack:
        found, task_reward = _held_out(source, learned, options)
        learnt = prompting_of(options.model)
        wrapped = learnt.style == "chat" if options.template is None else options.template
        found = AsMessages(found) if wrapped else found
        chat = learnt.filled(options.chat)
        chosen = head(found, options.n)
        sources = options.reward or (tuple(learned.get("reward", ())) if task_reward is None else ())
        reward = open_reward(sources, task_reward, stack, options, rows=chosen)
        if options.behind_api:
            return _behind_api(options, stack, reward=reward, rows=chosen, chat=chat)
        policy = open_model(options.model, **reading(options.policy))
        check_prompts(chosen, policy, chat)
        return Evaluator(
            policy=policy,
            engine=sampler(policy, options),
            reward=reward,
            rows=chosen,
            sampling=options.sampling,
            chat=chat,
            samples=options.samples,
            seed=options.seed,
            reference=_against(options),
        ).run()


def _behind_api(options: EvalOptions, stack: ExitStack, **parts: Any) -> Evaluation:
    """Of a model that is asked by OpenAI's API."""
    from rolecall.recipes.evaluate_text import TextEvaluator
    from rolecall.remote.plain import PlainServer

    server = PlainServer(options.model, model=options.served_model)
    stack.callback(server.close)
    _log.info("asking %s at %s", server.model, server.url)
    how: dict[str, Any] = {"sampling": options.sampling, "samples": options.samples, "seed": options.seed}
    return TextEvaluator(server=server, **parts, **how).run()


def _episodes(options: EvalOptions, env: EnvSource, source: str | None, learned: Mapping[str, Any]) -> Evaluation:
    """The same for episodes of several turns: on seeds or a task's rows that are held out, or on the rows given."""
    with ExitStack() as stack:
        how = HeldOutOptions(every=1, rows=options.n)
        if source is not None and _same(source, learned.get("rows")) and learned["eval"]["every"]:
            how = replace(HeldOutOptions(**learned["eval"]), rows=options.n)
        elif source is not None and not is_task(source):
            how = HeldOutOptions()
        learnt = prompting_of(options.model)
        prompts: dict[str, Any] = {
            "prompt": options.agent.prompt,
            "learned": learnt.prompt_in(env),
            "agent": options.agent,
        }
        all_rows, test = episode_rows(env, source, how, n=options.n, seed=options.seed, **prompts)
        found = all_rows if test is None else test
        chosen = head(found, options.n)
        sources = options.reward or tuple(learned.get("reward", ()))
        reward: Reward = open_reward(sources, None, stack, options, rows=chosen) if sources else EnvOnly()
        envs = open_envs(env, options.agent, stack, options.sampling)
        policy = open_model(options.model, **reading(options.policy))
        chat = learnt.filled(options.chat)
        arena = open_arena(
            envs, options.agent, policy=policy, engine=sampler(policy, options), reward=reward, chat=chat
        )
        return EpisodeEvaluator(
            arena,
            rows=chosen,
            sampling=options.sampling,
            samples=options.samples,
            seed=options.seed,
            reference=_against(options),
        ).run()


def _against(options: EvalOptions) -> Reference | None:
    if options.against is None:
        return None
    return Reference(PolicyModel(open_model(options.against, **reading(options.policy)).model))


def _held_out(source: str, learned: Mapping[str, Any], options: EvalOptions) -> tuple[Rows, str | None]:
    """The rows to ask, and their task's own reward."""
    if is_task(source):
        task = prompt_rows(source, HeldOutOptions(every=1, rows=options.n), seed=options.seed)
        assert task.test is not None
        return task.test, task.reward
    if not _same(source, learned.get("rows")):
        return prompt_rows(source, HeldOutOptions(), seed=options.seed).train, None
    how = HeldOutOptions(**learned["eval"])
    found = prompt_rows(source, replace(how, rows=options.n), seed=options.seed)
    rows, test = found.train, found.test
    if test is None:
        _log.warning(
            "%s learned from all rows of %s: these numbers say nothing about other rows", options.model, source
        )
        return rows, None
    _log.info("on %d rows of %s that %s held out", min(options.n, len(test)), source, options.model)
    return test, None


def _settings(model: str) -> dict[str, Any]:
    """The settings of the RL run that `model` is the directory of, if it is one."""
    path = Path(model).expanduser()
    if not (path / "run.json").is_file() or json.loads((path / "run.json").read_text()).get("command") != "rl":
        return {}
    return saved_settings(str(path))


def _same(source: str, other: object) -> bool:
    """Whether rows by name are those that a run names."""
    if isinstance(source, GivenObject) or not isinstance(other, str):
        return False
    return Path(source).expanduser().resolve() == Path(other).expanduser().resolve()
