"""Rows and rewards from the names a user gives."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch

from rolecall.config.given import resolve_source
from rolecall.config.parts import ChatOptions, HeldOutOptions
from rolecall.config.rewards import RewardProcessOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Job, shard_frozen
from rolecall.jobs.models import reward_of_model
from rolecall.policy.chat_template import template_kwargs
from rolecall.policy.load import LoadedModel
from rolecall.recipes.rendering import demonstration_kind, rendered_prompt
from rolecall.rewards.joined import joined
from rolecall.rewards.pool import RewardPool
from rolecall.rewards.records import Reward
from rolecall.rewards.sources import Named, distinct
from rolecall.tasks.builtin import demonstrations, preference_rows
from rolecall.tasks.columns import check_columns
from rolecall.tasks.kinds import kind_of, record
from rolecall.tasks.names import open_source
from rolecall.tasks.rows import RowError, Rows, place_of, split
from rolecall.tasks.sources import RowsSource, Splits
from rolecall.tasks.streams import Stream, first_of, head, split_stream
from rolecall.train.timing import Timer
from rolecall.workers.hosts import Host, RayHosts

_log = logging.getLogger("rolecall")

_TRAIN_ROWS = 20_000
"""Rows drawn from a task that can make any number."""
_EPISODES = 4_000
"""Demonstrations of a task of several turns, each of which takes milliseconds to render."""
_TASK_PAIRS = 4096
"""Pairs drawn from a built-in task, if it has as many problems."""
_CHECKED_ROWS = 20_000
"""Prompts looked at before a run starts; of a longer table, this many."""
_SPARE_TOKENS = 16
"""More tokens than any tokenizer puts around a plain text of its own accord."""
TASK_REWARD = "task"
"""The name that stands for the reward a task brings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Prompts to train on and to evaluate on, and the rewards their tasks bring."""

    train: Rows
    test: Rows | None = None
    """Held-out rows, if they will be used."""
    reward: str | None = None
    """The training task's own reward."""
    test_reward: str | None = None
    """That of the evaluation's task."""


def prompt_rows(source: RowsSource, evaluation: HeldOutOptions, *, seed: int) -> PromptRows:
    """The rows of a job that answers prompts."""
    found = open_named(source)
    if isinstance(found, Splits):
        check_kind(found.train, ("prompt",), "a column `prompt`")
        check_columns(found.train, "prompts")
        train, reward = found.train, None
    else:
        train, reward = found.rows("train", n=_TRAIN_ROWS, seed=seed), found.reward
    if not evaluation.every:
        return PromptRows(train=train, reward=reward)
    held = _evaluated(evaluation)
    if held is None and isinstance(found, Splits):
        train, test = held_out(found, evaluation)
        return PromptRows(train=train, test=test)
    held = held or found
    if isinstance(held, Splits):
        check_kind(held.train, ("prompt",), "a column `prompt`")
        return PromptRows(train=train, test=_limited(held.train, evaluation), reward=reward)
    test = held.rows("test", n=evaluation.rows)
    return PromptRows(train=train, test=test, reward=reward, test_reward=held.reward)


def open_named(source: RowsSource, what: str = "rows") -> Any:
    """The task, or the rows, that a user gave by name or as an object."""
    return open_source(resolve_source(source, what))


def _evaluated(evaluation: HeldOutOptions) -> Any:
    """What to evaluate on, if it was given: a task, or rows of which the test split comes first."""
    if evaluation.data is None:
        return None
    found = open_named(evaluation.data, "evaluation rows (eval_data)")
    if isinstance(found, Splits) and found.test is not None:
        return Splits(train=found.test)
    return found


def held_out(rows: Splits, evaluation: HeldOutOptions, *, seed: int = 0, task: Any = None) -> tuple[Rows, Any]:
    """(rows to train on, rows to evaluate on): those of `eval.data`, or the data's own test split, or a share.

    `task` makes rows of a task that is named as `eval.data`.
    """
    given = _evaluated(evaluation)
    if given is not None:
        return rows.train, _limited(given.train, evaluation) if isinstance(given, Splits) else task(given)
    if rows.test is not None:
        return rows.train, _limited(rows.test, evaluation)
    if isinstance(rows.train, Stream):
        return split_stream(rows.train, held_out=evaluation.held_out, n=evaluation.rows)
    train, test = split(rows.train, held_out=evaluation.held_out, seed=seed)
    return train, head(test, evaluation.rows)


def _limited(rows: Rows, evaluation: HeldOutOptions) -> Rows:
    if not isinstance(rows, Stream) and len(rows) > evaluation.rows:
        _log.warning(
            "evaluations take the first %d of %d evaluation rows; eval.rows is how many", evaluation.rows, len(rows)
        )
    return head(rows, evaluation.rows)


def check_kind(rows: Rows, needed: Sequence[str], what: str) -> None:
    """Refuse rows without the columns that a job needs."""
    if not set(needed) <= set(rows.columns):
        kind_of(rows)  # says what is wrong with the columns
        raise RowError(f"the job needs {what}; the rows have {', '.join(rows.columns)}")


def steps_of(options: Any, rows: Any, per_step: int) -> Any:
    """The options with the number of steps that `epochs` passes over the rows take."""
    if options.epochs is None:
        return options
    if isinstance(rows, Stream):
        raise UserError("epochs counts passes over the rows, and the end of a stream is not known: give steps instead")
    return replace(options, steps=max(1, ceil(len(rows) * options.epochs / per_step - 1e-9)))


def open_reward(
    sources: Sequence[Any],
    task_reward: str | None,
    stack: ExitStack,
    limits: RewardProcessOptions,
    *,
    weights: Sequence[float] | None = None,
    rows: Rows | None = None,
    timer: Timer | None = None,
) -> Reward:
    """The reward: functions in worker processes, reward models by their run or directory, and judges; `task` is the task's own.

    With `rows`, a function that needs a column which they have not is refused; rows that lack it are counted and said.
    """
    given = [resolve_source(source, "reward") for source in sources]
    if TASK_REWARD in [s.source if isinstance(s, Named) else s for s in given]:
        if task_reward is None:
            raise UserError("reward `task` is the reward of a task, and these rows are of none: name a reward function")
        given = [_own(source, task_reward) for source in given]
    chosen = given or ([] if task_reward is None else [task_reward])
    if not chosen:
        raise UserError("no reward: give one, such as --reward rewards.py:my_function, or use a built-in task")
    if "" in chosen:
        raise UserError("a reward's name is empty: give one, such as --reward rewards.py:my_function")
    each = [1.0] * len(chosen) if weights is None else list(weights)
    if len(each) != len(chosen):
        raise UserError(f"{len(chosen)} rewards need as many weights, got {len(each)}")
    labels = {i: label for i, source in enumerate(chosen) if (label := _label(source)) is not None}
    named = dict(zip(labels, distinct(list(labels.values())), strict=True))
    other = {i: _whole(chosen[i], each[i], named[i], limits, stack) for i in named}
    functions = {i: source for i, source in enumerate(chosen) if i not in other}
    if not functions:
        return joined(list(other.values()), rows=None if rows is None else rows.columns)
    shares = None if weights is None else [each[i] for i in functions]
    hosts: tuple[Host, ...] = ()
    if limits.reward_cluster == "ray":
        hosts = stack.enter_context(RayHosts(2, what="reward workers", option=None)).hosts
    pool = stack.enter_context(
        RewardPool(list(functions.values()), weights=shares, hosts=hosts, **limits.reward_limits())
    )
    if timer is not None:
        pool.advance = timer.advance
    if rows is not None:
        pool.check_columns(rows.columns)
        looked_at = [row for _, row in first_of(rows, _CHECKED_ROWS)]
        for what, count in pool.lacking(looked_at).items():
            _log.warning(
                "%d of %d rows have no %s, which a reward asks for: it gets None there", count, len(looked_at), what
            )
    return joined([pool, *other.values()], rows=None if rows is None else rows.columns)


def _label(source: Any) -> str | None:
    """What a reward is called that is no function, but a reward model or a judge; None if it is a function."""
    only, name = (source.source, source.name) if isinstance(source, Named) else (source, None)
    if not isinstance(only, str):
        return None
    if only.startswith("judge:"):
        return name or "judge"
    return (name or "reward_model") if Path(only).expanduser().is_dir() else None


def _whole(source: Any, weight: float, name: str, limits: RewardProcessOptions, stack: ExitStack) -> Reward:
    """The reward model or the judge."""
    only = str(source.source if isinstance(source, Named) else source)
    if not only.startswith("judge:"):
        device = getattr(limits, "device", "cpu").replace("auto", "cpu")  # that of a run is known by now
        scorer = reward_of_model(only, weight=weight, name=name, device=device)
        shard_frozen(scorer.model, limits, torch.device(device), stack)
        return scorer
    from rolecall.remote.judge import Judge  # and httpx, which nothing else needs

    judge = Judge(only, name=name, weight=weight, seconds=limits.reward_deadline)
    stack.callback(judge.close)
    return judge


def _own(source: Any, task_reward: str) -> Any:
    """The source, or the task's reward if that is what it names."""
    if isinstance(source, Named) and source.source == TASK_REWARD:
        return Named(name=source.name, source=task_reward)
    return task_reward if source == TASK_REWARD else source


def open_training_reward(job: Job, found: PromptRows) -> Reward:
    """The reward of a run that answers these rows."""
    o = job.options
    return open_reward(
        o.reward, found.reward, job.stack, o, weights=o.reward_weights, rows=found.train, timer=job.timer
    )


def open_judge(
    options: Any, reward: Reward, task_reward: str | None, stack: ExitStack, *, rows: Rows
) -> tuple[Reward, Reward | None]:
    """(what scores held-out answers, the training reward if that is another one)."""
    if not options.eval.reward:
        getattr(reward, "check_columns", lambda columns: None)(rows.columns)
        return reward, None
    return open_reward(options.eval.reward, task_reward, stack, options, rows=rows), reward


def check_prompts(rows: Rows, policy: LoadedModel, chat: ChatOptions) -> None:
    """Refuse prompts that cannot be rendered or leave no room for an answer, before any work is done.

    Looks at every row, or at the first 20,000; a later one that is too long ends the run when it is drawn.
    """
    for index, row in first_of(rows, _CHECKED_ROWS):
        prompt = row.get("prompt")
        # No tokenizer makes more tokens of a text than it has bytes; a template may add any number.
        if (
            isinstance(prompt, str)
            and prompt
            and len(prompt.encode(errors="surrogatepass")) + _SPARE_TOKENS < policy.context_length
            and not any("\ud800" <= character <= "\udfff" for character in prompt)
            and not row.get("tools")
            and not row.get("chat_template_kwargs")
        ):
            continue
        place = place_of(rows, index)
        record(row, "prompt", number=place)
        try:
            ids = rendered_prompt(row, policy=policy, chat=chat).ids
            if not ids:
                raise ValueError("it has no tokens")
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            why = "the prompt is empty" if prompt == "" else " ".join(str(error).split())
            raise RowError(f"{place}: the prompt cannot be given to the model: {why}") from error
        if len(ids) >= policy.context_length:
            raise RowError(
                f"{place}: the prompt has {len(ids)} tokens but the model's context is "
                f"{policy.context_length}; shorten the prompt, or leave out rows that are too long"
            )


def check_templates(rows: Rows) -> None:
    """Refuse tools and template settings that cannot be read, of rows that an environment begins with."""
    for index, row in first_of(rows, _CHECKED_ROWS) if {"tools", "chat_template_kwargs"} & {*rows.columns} else ():
        try:
            template_kwargs(row)
        except ValueError as error:
            raise RowError(f"{place_of(rows, index)}: {error}") from error


def preferences(options: Any, *, job: Literal["rm", "dpo"] = "rm") -> tuple[Rows, Rows | None]:
    """(rows to train on, rows held out); the latter are None if the run never evaluates."""
    found, evaluation = open_named(options.rows), options.eval

    def pairs_of(task: Any) -> Rows:
        return preference_rows(task, "test", n=evaluation.rows, seed=options.seed)

    if isinstance(found, Splits):
        kind_of(found.train, among=("preference",), job="a preference needs")
        check_columns(found.train, job)
        if not evaluation.every:
            return found.train, None
        return held_out(found, evaluation, seed=options.seed, task=pairs_of)
    train = preference_rows(found, "train", n=_TASK_PAIRS, seed=options.seed)
    if not evaluation.every:
        return train, None
    if evaluation.data is None:
        return train, pairs_of(found)
    return held_out(Splits(train=train), evaluation, task=pairs_of)


def demonstrated(source: RowsSource, *, seed: int) -> Rows:
    """Rows to imitate: a task's gold answers, or the user's."""
    return demonstrated_splits(source, HeldOutOptions(), seed=seed)[0]


def demonstrated_splits(source: RowsSource, evaluation: HeldOutOptions, *, seed: int) -> tuple[Rows, Rows | None]:
    """(rows to imitate, those held out): a task's gold answers, or the user's. None: a task brings its own test rows."""
    found = open_named(source)
    if isinstance(found, Splits):
        demonstration_kind(found.train)
        check_columns(found.train, "sft")
        rows = found
    else:
        n = _EPISODES if hasattr(found, "env") else _TRAIN_ROWS
        rows = Splits(train=demonstrations(found, "train", n=n, seed=seed))
    if not evaluation.every or (evaluation.data is None and rows is not found):
        return rows.train, None
    return held_out(rows, evaluation, task=lambda task: None)
