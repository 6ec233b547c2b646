"""`rolecall eval`: numbers of a model on held-out rows."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall.config.eval import EvalOptions
from rolecall.config.merge import make
from rolecall.config.parts import HeldOutOptions
from rolecall.config.resume import saved_settings
from rolecall.errors import UserError
from rolecall.jobs.data import RowsSource, check_prompts, open_reward, prompt_rows
from rolecall.jobs.rl import sampler
from rolecall.jobs.running import model_directory
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.recipes.evaluate import Evaluation, Evaluator
from rolecall.tasks.names import resolve
from rolecall.tasks.rows import ChosenRows, Rows
from rolecall.train.reference import Reference

_log = logging.getLogger("rolecall")


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
    """Run from options: on a task's test split, on what a run held out, or on all rows of a file."""
    learned = _settings(options.model)
    source = rows if rows is not None else options.rows
    if source is None:
        if "rows" not in learned:
            raise UserError(
                f"which rows should {options.model} answer? give --rows, or a run as --model, which brings those it held out"
            )
        source = str(learned["rows"])
    with ExitStack() as stack:
        found, task_reward = _held_out(source, learned, options)
        chosen = ChosenRows(found, range(min(options.n, len(found))))
        sources = rewards or options.reward
        if not sources and task_reward is None:
            sources = tuple(learned.get("reward", ()))
        reward = open_reward(
            sources,
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


def _held_out(source: RowsSource, learned: Mapping[str, Any], options: EvalOptions) -> tuple[Rows, str | None]:
    """The rows to ask, and their task's own reward."""
    found: Any = resolve(source) if isinstance(source, str) else None
    if hasattr(found, "gold"):
        _, test, reward = prompt_rows(source, HeldOutOptions(every=1, rows=options.n), seed=options.seed)
        assert test is not None
        return test, reward
    if not isinstance(source, str) or not _same(source, learned.get("rows")):
        return prompt_rows(source, HeldOutOptions(), seed=options.seed)[0], None
    how = HeldOutOptions(**learned["eval"])
    rows, test, _ = prompt_rows(source, replace(how, rows=options.n), seed=options.seed)
    if test is None:
        _log.warning(
            "%s learned from all rows of %s: these numbers say nothing about other rows", options.model, source
        )
        return rows, None
    _log.info("on the rows of %s that %s held out", source, options.model)
    return test, None


def _settings(model: str) -> dict[str, Any]:
    """The settings of the RL run that `model` is the directory of, if it is one."""
    path = Path(model).expanduser()
    if not (path / "run.json").is_file() or json.loads((path / "run.json").read_text()).get("command") != "rl":
        return {}
    return saved_settings(str(path))


def _same(source: str, other: object) -> bool:
    return isinstance(other, str) and Path(source).expanduser().resolve() == Path(other).expanduser().resolve()
