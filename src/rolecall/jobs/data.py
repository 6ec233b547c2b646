"""Rows and rewards from the names a user gives."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolecall.config.parts import ChatOptions, HeldOutOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.policy.row_template import template_kwargs
from rolecall.recipes.dpo import AnswerPair
from rolecall.recipes.rendering import rendered_prompt, rendered_row
from rolecall.rewards.pool import RewardPool
from rolecall.rewards.records import Reward
from rolecall.tasks.builtin import demonstrations
from rolecall.tasks.kinds import kind_of, record
from rolecall.tasks.names import resolve
from rolecall.tasks.rows import ListRows, RowError, Rows, place_of, split
from rolecall.train.timing import Timer
from rolecall.types import Trajectory

_log = logging.getLogger("rolecall")

RowsSource = str | Sequence[Mapping[str, Any]]
RewardSource = str | Callable[..., Any]
_TRAIN_ROWS = 20_000
"""Rows drawn from a task that can make any number."""
_EPISODES = 4_000
"""Demonstrations of a task of several turns, each of which takes milliseconds to render."""
_CHECKED_ROWS = 20_000
"""Prompts looked at before a run starts; of a longer table, the first so many."""
_SPARE_TOKENS = 16
"""More tokens than any tokenizer puts around a plain text of its own accord."""


TASK_REWARD = "task"
"""The name that stands for the reward a task brings."""

_GIVEN = "(given in Python)"


def label(given: Sequence[Any]) -> str:
    """What config.json says of rows or rewards that are Python objects."""
    names = [getattr(x, "__name__", "") for x in given if callable(x)]
    return f"{_GIVEN} {', '.join(names)}" if names else f"{_GIVEN} {len(given)} rows"


def listed(given: Any) -> list[Any]:
    """One, several or none, as a list."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def by_name(**given: Any) -> dict[str, Any]:
    """Of what a caller gives in the place of a setting, what is given by name: those are the settings."""
    found: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, str)}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return found | {name: value for name, value in lists.items() if value and all(isinstance(x, str) for x in value)}


def unnamed(given: Any) -> Any:
    """What is given in Python, and not by its name; else None."""
    return None if isinstance(given, str) else given


def labelled(options: Any, *, rows: Sequence[Any] | None = None, **sources: Sequence[Any] | None) -> Any:
    """The options with a label for whatever is given in Python in the place of what they name."""
    changes: dict[str, Any] = {} if rows is None else {"rows": label(rows)}
    for name, given in sources.items():
        if given is not None:
            changes[name] = tuple(source if isinstance(source, str) else label([source]) for source in given)
    return replace(options, **changes)


def check_named(what: str, *names: str) -> None:
    """Raise if what is asked for by name was given in Python when the run began, and is not given now."""
    if any(name.startswith(_GIVEN) for name in names):
        raise UserError(f"this run's {what} came from Python: resume it from Python too, with the same {what}")


def prompt_rows(source: RowsSource, evaluation: HeldOutOptions, *, seed: int) -> tuple[Rows, Rows | None, str | None]:
    """(training rows, held-out rows if they will be used, the task's own reward)."""
    if isinstance(source, str):
        check_named("rows", source)
    found: Any = ListRows(source) if not isinstance(source, str) else resolve(source)
    if hasattr(found, "gold"):
        test = found.rows("test", n=evaluation.rows) if evaluation.every else None
        return found.rows("train", n=_TRAIN_ROWS, seed=seed), test, found.reward
    rows: Rows = found
    if "prompt" not in rows.columns:
        kind_of(rows)  # says what is wrong with the columns
        raise RowError(f"rl needs a column `prompt`; the rows have {', '.join(rows.columns)}")
    if not evaluation.every:
        return rows, None, None
    train, test = split(rows, held_out=evaluation.held_out)
    return train, ListRows([test[i] for i in range(min(len(test), evaluation.rows))]), None


def open_reward(
    sources: Sequence[RewardSource],
    task_reward: str | None,
    stack: ExitStack,
    *,
    weights: Sequence[float] | None,
    deadline_s: float,
    rows: Rows | None = None,
    timer: Timer | None = None,
) -> Reward:
    """The reward: functions in worker processes, or a reward model's run or directory; `task` is the task's own.

    With `rows`, a function that needs a column which they have not is refused; rows that lack it are counted and said.
    """
    check_named("reward", *(source for source in sources if isinstance(source, str)))
    if TASK_REWARD in sources and task_reward is None:
        raise UserError("reward `task` is the reward of a task, and these rows are of none: name a reward function")
    own: tuple[RewardSource, ...] = () if task_reward is None else (task_reward,)
    chosen = [own[0] if source == TASK_REWARD else source for source in sources] or own
    if not chosen:
        raise UserError("no reward: give one, such as --reward rewards.py:my_function, or use a built-in task")
    if "" in chosen:
        raise UserError("a reward's name is empty: give one, such as --reward rewards.py:my_function")
    if len(chosen) == 1 and isinstance(chosen[0], str) and Path(chosen[0]).expanduser().is_dir():
        from rolecall.jobs.running import model_directory
        from rolecall.rewards.model import RewardModelReward

        weight = 1.0 if weights is None else weights[0]
        return RewardModelReward.load(model_directory(chosen[0]), weight=weight)
    pool = stack.enter_context(RewardPool(list(chosen), weights=weights, deadline_s=deadline_s))
    if timer is not None:
        pool.advance = timer.advance
    if rows is not None:
        pool.check_columns(rows.columns)
        looked_at = min(len(rows), _CHECKED_ROWS)
        for what, count in pool.lacking(rows[i] for i in range(looked_at)).items():
            _log.warning(
                "%d of %d rows have no %s, which a reward asks for: it gets None there", count, looked_at, what
            )
    return pool


def open_judge(
    options: Any, reward: Reward, task_reward: str | None, stack: ExitStack, *, rows: Rows
) -> tuple[Reward, Reward | None]:
    """(what scores held-out answers, the training reward if that is another one)."""
    if not options.eval.reward:
        return reward, None
    deadline = options.reward_deadline
    judge = open_reward(options.eval.reward, task_reward, stack, weights=None, deadline_s=deadline, rows=rows)
    return judge, reward


def check_prompts(rows: Rows, policy: LoadedModel, chat: ChatOptions) -> None:
    """Refuse prompts that cannot be rendered or leave no room for an answer, before any work is done.

    Looks at every row, or at the first 20,000; a later one that is too long ends the run when it is drawn.
    """
    for index in range(min(len(rows), _CHECKED_ROWS)):
        row = rows[index]
        prompt = row.get("prompt")
        # No tokenizer makes more tokens of a text than it has bytes; a template may add any number.
        if (
            isinstance(prompt, str)
            and prompt
            and len(prompt.encode(errors="replace")) + _SPARE_TOKENS < policy.context_length
            and not row.get("tools")
            and not row.get("chat_template_kwargs")
        ):
            continue
        place = place_of(rows, index)
        record(row, "prompt", number=place)
        try:
            ids = rendered_prompt(row, policy=policy, chat=chat).ids
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            why = "the prompt is empty" if prompt == "" else " ".join(str(error).split())
            raise RowError(f"{place}: the prompt cannot be put to the model: {why}") from error
        if len(ids) >= policy.context_length:
            raise RowError(
                f"{place}: the prompt has {len(ids)} tokens but the model's context is "
                f"{policy.context_length}; shorten the prompt, or leave out rows that are too long"
            )


def check_templates(rows: Rows) -> None:
    """Refuse tools and template settings that cannot be read, of rows that an environment begins with."""
    for index in range(min(len(rows), _CHECKED_ROWS)) if {"tools", "chat_template_kwargs"} & {*rows.columns} else ():
        try:
            template_kwargs(rows[index])
        except ValueError as error:
            raise RowError(f"{place_of(rows, index)}: {error}") from error


def demonstrated(source: RowsSource, *, seed: int) -> Rows:
    """Rows to imitate: a task's gold answers, or the user's."""
    if isinstance(source, str):
        check_named("rows", source)
    found: Any = ListRows(source) if not isinstance(source, str) else resolve(source)
    if hasattr(found, "gold"):
        return demonstrations(found, "train", n=_EPISODES if hasattr(found, "env") else _TRAIN_ROWS, seed=seed)
    rows: Rows = found
    if kind_of(rows) not in ("prompt_completion", "messages", "text"):
        raise RowError(
            f"sft needs rows with `prompt` and `completion`, `messages`, or `text`; these have {', '.join(rows.columns)}"
        )
    return rows


def rendered_rows(
    rows: Rows, policy: LoadedModel, chat: ChatOptions, *, max_length: int
) -> tuple[list[Trajectory], int]:
    """(demonstrations as trajectories, how many were left out because they are too long)."""
    kind, limit = kind_of(rows), min(max_length, policy.context_length)
    kept: list[Trajectory] = []
    for number in range(len(rows)):
        found = record(rows[number], kind, number=place_of(rows, number))
        try:
            rendered = rendered_row(found, policy=policy, chat=chat)
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise RowError(f"{place_of(rows, number)} cannot be rendered: {' '.join(str(error).split())}") from error
        if len(rendered.ids) <= limit:
            kept.append(
                Trajectory(
                    ids=rendered.ids,
                    roles=rendered.roles,
                    turns=rendered.turns,
                    author="demonstrator",
                    group=number,
                )
            )
    if not kept:
        raise RowError(f"all {len(rows)} rows are longer than max_length {limit}; raise it or shorten the rows")
    return kept, len(rows) - len(kept)


def rendered_pairs(
    rows: Rows, policy: LoadedModel, chat: ChatOptions, *, max_length: int, limit: int | None = None
) -> tuple[list[AnswerPair], str]:
    """(pairs of the first `limit` rows, a sentence about those left out or nothing)."""
    if kind_of(rows) != "preference":
        raise RowError(
            f"the rows have the columns {', '.join(rows.columns)}; a preference needs `chosen` and `rejected`"
        )
    longest, kept, too_long, same = min(max_length, policy.context_length), [], 0, 0
    for number in range(len(rows) if limit is None else min(limit, len(rows))):
        row = rows[number]
        if row.get("chosen") is not None and row.get("chosen") == row.get("rejected"):
            same += 1
            continue
        found = record(row, "preference", number=place_of(rows, number))
        try:
            sides = [
                rendered_row(replace(found, completion=side), policy=policy, chat=chat)
                for side in (found.chosen, found.rejected)
            ]
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            raise RowError(f"{place_of(rows, number)} cannot be rendered: {' '.join(str(error).split())}") from error
        if max(len(side.ids) for side in sides) > longest:
            too_long += 1
            continue
        chosen, rejected = (
            Trajectory(ids=side.ids, roles=side.roles, turns=side.turns, author="demonstrator", group=number)
            for side in sides
        )
        kept.append(AnswerPair(chosen=chosen, rejected=rejected))
    if not kept:
        raise RowError(
            f"no pair is left of {too_long + same} rows: {too_long} have a side longer than {longest} tokens, in {same} "
            "both sides are the same; raise max_length, or look at the rows"
        )
    left_out = [f"{n} {why}" for n, why in ((too_long, "too long"), (same, "the same twice")) if n]
    return kept, f"{len(kept)} pairs; left out: {', '.join(left_out)}" if left_out else ""
