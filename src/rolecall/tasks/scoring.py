"""The reward of the built-in tasks, for a `RewardPool`: `rolecall.tasks.scoring:task`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from rolecall.tasks.names import find_task

_find = cache(find_task)


def task(completion_text: str, row: Mapping[str, Any]) -> float | None:
    """What the row's own task says of the answer; None if the row is of no task."""
    name = row.get("task")
    return None if name is None else _find(str(name)).score(completion_text, row)
