"""Tasks and rows by name or path."""

import json
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rolecall.tasks.agent_tasks import AGENT_TASKS
from rolecall.tasks.builtin import BUILT_IN, BuiltIn
from rolecall.tasks.reasoning import find_reasoning
from rolecall.tasks.rows import RowError
from rolecall.tasks.sources import RowsSource, Splits, named_splits, splits_of

TASKS: dict[str, type[BuiltIn]] = {**BUILT_IN, **AGENT_TASKS}
"""The built-in tasks by name; beside them there are those of reasoning-gym."""


def resolve(name_or_path: str) -> Any:
    """A task such as "addition:digits=3" or "rg:chain_sum", or the rows of a file, a folder or a hub dataset."""
    found = open_source(name_or_path)
    return found.train if isinstance(found, Splits) else found


def open_source(source: RowsSource) -> Any:
    """A task by its name, or rows: of a file, a folder, a hub dataset, or an object from Python."""
    if not isinstance(source, str):
        return splits_of(source)
    if is_task(source):
        return find_task(source)
    path = Path(source).expanduser()
    if path.exists() or path.suffix or len(path.parts) > 1:
        return named_splits(source)
    raise RowError(f"there is no task, file or folder {source!r}; {_hint(source.partition(':')[0])}")


def is_task(name: str) -> bool:
    """Whether a name is that of a task, which brings rows."""
    kind = name.partition(":")[0]
    return kind in TASKS or kind == "rg"


def find_task(name: str) -> Any:
    """The task of that name with its options: a `Task`, or one of several turns, which has `env` in place of `score`."""
    kind, _, rest = name.partition(":")
    if kind == "rg":
        dataset, _, rest = rest.partition(":")
        return find_reasoning(dataset, task_options(name, rest))
    if kind not in TASKS:
        raise RowError(f"there is no task {kind!r}; {_hint(kind)}")
    allowed = [field.name for field in fields(TASKS[kind])]
    options = task_options(name, rest)
    for option, value in options.items():
        if option not in allowed:
            near = get_close_matches(option, allowed, n=1)
            has = f"it has {', '.join(allowed) or 'none'}"
            raise RowError(f"task {kind} has no option `{option}`; {f'did you mean `{near[0]}`?' if near else has}")
        if type(value) is not int:
            raise RowError(f"task {kind}: `{option}` must be a whole number, got {value!r}")
    return TASKS[kind](**options)


def _hint(kind: str) -> str:
    near = get_close_matches(kind, [*TASKS, "rg"], n=1)
    return f"did you mean '{near[0]}'?" if near else f"tasks are {', '.join(TASKS)} and rg:…"


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
