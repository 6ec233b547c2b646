"""Tasks and rows by name or path."""

import json
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rolecall.tasks.agent_tasks import AGENT_TASKS, AgentTask
from rolecall.tasks.builtin import BUILT_IN, Task
from rolecall.tasks.reasoning import find_reasoning
from rolecall.tasks.rows import RowError, Rows
from rolecall.tasks.sources import RowsSource, Splits, named_splits, splits_of


def resolve(name_or_path: str) -> Task | AgentTask | Rows:
    """A task such as "addition:digits=3" or "rg:chain_sum", or the rows of a file, a folder or a hub dataset."""
    found = open_source(name_or_path)
    return found.train if isinstance(found, Splits) else found


def open_source(source: RowsSource) -> Task | AgentTask | Splits:
    """A task by its name, or rows: of a file, a folder, a hub dataset, or an object from Python."""
    if not isinstance(source, str):
        return splits_of(source)
    kind = source.partition(":")[0]
    if kind in AGENT_TASKS:
        return find_agent_task(source)
    if kind in BUILT_IN or kind == "rg":
        return find_task(source)
    path = Path(source).expanduser()
    if path.exists() or path.suffix or len(path.parts) > 1:
        return named_splits(source)
    known = [*BUILT_IN, *AGENT_TASKS]
    near = get_close_matches(kind, [*known, "rg"], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"tasks are {', '.join(known)} and rg:…"
    raise RowError(f"there is no task, file or folder {source!r}; {hint}")


def find_task(name: str) -> Task:
    """The task of that name with its options."""
    kind, _, rest = name.partition(":")
    if kind == "rg":
        dataset, _, rest = rest.partition(":")
        return find_reasoning(dataset, task_options(name, rest))
    if kind not in BUILT_IN:
        near = get_close_matches(kind, BUILT_IN, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(BUILT_IN)} and rg:…"
        raise RowError(f"there is no task {kind!r}; {hint}")
    return BUILT_IN[kind](**_checked_options(name, BUILT_IN[kind]))


def find_agent_task(name: str) -> AgentTask:
    """The task of several turns of that name with its options."""
    made = AGENT_TASKS[name.partition(":")[0]]
    return made(**_checked_options(name, made))


def _checked_options(name: str, made: Any) -> dict[str, Any]:
    kind, _, rest = name.partition(":")
    allowed = [field.name for field in fields(made)]
    options = task_options(name, rest)
    for option, value in options.items():
        if option not in allowed:
            near = get_close_matches(option, allowed, n=1)
            has = f"it has {', '.join(allowed) or 'none'}"
            raise RowError(f"task {kind} has no option `{option}`; {f'did you mean `{near[0]}`?' if near else has}")
        if type(value) is not int:
            raise RowError(f"task {kind}: `{option}` must be a whole number, got {value!r}")
    return options


def task_options(name: str, text: str) -> dict[str, Any]:
    """ "digits=3,flag=true" as a dict; values are JSON, or else text."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise RowError(f"task {name!r}: options are written option=value,option=value, this is {part!r}")
        try:
            options[option.strip()] = json.loads(value)
        except ValueError:
            options[option.strip()] = value.strip()
    return options
