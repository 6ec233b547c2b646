"""`rolecall eval`: numbers of a model on held-out rows."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rolecall.config.eval import EvalOptions
from rolecall.config.merge import make
from rolecall.config.parts import HeldOutOptions
from rolecall.jobs.data import check_prompts, open_reward, prompt_rows
from rolecall.jobs.rl import sampler
from rolecall.jobs.running import model_directory
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.recipes.evaluate import Evaluation, Evaluator
from rolecall.tasks.names import resolve
from rolecall.tasks.rows import ChosenRows, ListRows
from rolecall.train.reference import Reference


def eval(  # the name of the command
    *, rows: str | Sequence[Mapping[str, Any]] | None = None, reward: Any = None, **settings: Any
) -> Evaluation:
    """Evaluate: `eval(model="runs/rl-1", rows="test.jsonl", reward=my_reward).numbers`."""
    if isinstance(rows, str):
        settings["rows"] = rows
    rewards = [] if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
    return run(
        make(EvalOptions, settings),
        rows=None if rows is None or isinstance(rows, str) else rows,
        rewards=rewards or None,
    )


def run(
    options: EvalOptions, *, rows: Sequence[Mapping[str, Any]] | None = None, rewards: Sequence[Any] | None = None
) -> Evaluation:
    """Run from options. All rows of a file are used; of a task, its test split."""
    source = options.rows if rows is None else rows
    with ExitStack() as stack:
        found: Any = resolve(source) if isinstance(source, str) else ListRows(source)
        task_reward = None
        if hasattr(found, "gold"):
            _, found, task_reward = prompt_rows(source, HeldOutOptions(every=1, rows=options.n), seed=options.seed)
        else:
            found, _, _ = prompt_rows(source, HeldOutOptions(), seed=options.seed)
        chosen = ChosenRows(found, range(min(options.n, len(found))))
        reward = open_reward(
            rewards or options.reward,
            task_reward,
            stack,
            weights=None,
            deadline_s=options.reward_deadline,
            columns=chosen.columns,
        )
        policy = load(model_directory(options.model))
        check_prompts(chosen, policy, options.chat)
        against = None
        if options.against is not None:
            against = Reference(PolicyModel(load(model_directory(options.against)).model))
        return Evaluator(
            policy=policy,
            engine=sampler(policy, options),
            reward=reward,
            rows=chosen,
            sampling=options.sampling,
            chat=options.chat,
            samples=options.samples,
            seed=options.seed,
            reference=against,
        ).run()
