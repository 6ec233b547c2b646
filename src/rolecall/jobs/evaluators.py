"""What a training run is measured by: answers to held-out prompts, or held-out episodes."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rolecall.agents.episodes import EnvOnly, EpisodeEvaluator
from rolecall.config.agents import AgentOptions
from rolecall.jobs.agents import env_source, episode_rows, open_arena, open_envs
from rolecall.jobs.data import open_reward, prompt_rows
from rolecall.jobs.models import sampler
from rolecall.recipes.evaluate import Evaluator
from rolecall.recipes.rl import engine_weights
from rolecall.tasks.rows import Rows
from rolecall.train.ranks import Ranks
from rolecall.types import Sampling


def answering(options: Any, policy: Any, reward: Any, rows: Rows, ranks: Ranks) -> Any:
    """Greedy answers to held-out prompts, scored, of a job that does not sample otherwise."""
    engine = sampler(policy, options)
    how = _how_to_sample(options)
    parts = {"policy": policy, "engine": engine, "reward": reward, "rows": rows, "chat": options.chat}
    evaluator = Evaluator(**parts, ranks=ranks, **how)
    return _with_weights(evaluator, engine, policy)


def task_evaluator(options: Any, policy: Any, source: Any, stack: ExitStack, ranks: Ranks) -> Any:
    """Greedy answers to a task's held-out prompts, scored by the task; None if there shall be no evaluation."""
    if not options.eval.every:
        return None
    env = env_source(None, source)
    evaluation = replace(options.eval, data=None)
    if env is None:
        found = prompt_rows(source, evaluation, seed=options.seed)
        assert found.test is not None
        reward = open_reward(options.eval.reward, found.test_reward, stack, options)
        return answering(options, policy, reward, found.test, ranks)
    engine = sampler(policy, options)
    _, held_out = episode_rows(env, None, evaluation, n=1, seed=options.seed)
    assert held_out is not None
    limits = AgentOptions()
    envs = open_envs(env, limits, stack)
    arena = open_arena(envs, limits, policy=policy, engine=engine, reward=EnvOnly(), chat=options.chat)
    return _with_weights(EpisodeEvaluator(arena, rows=held_out, ranks=ranks, **_how_to_sample(options)), engine, policy)


def _with_weights(evaluator: Any, engine: Any, policy: Any) -> Any:
    """The evaluator with today's weights in its engine."""

    def evaluate(step: int) -> Any:
        engine.load(engine_weights(policy), step)
        return evaluator(step)

    return evaluate


def _how_to_sample(options: Any) -> dict[str, Any]:
    sampling = Sampling(max_new_tokens=options.max_new_tokens)
    return {"sampling": sampling, "samples": options.eval.samples, "seed": options.seed}
