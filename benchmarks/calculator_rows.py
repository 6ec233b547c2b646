"""Demonstrations of `calculator` to begin with, half of them with answers of at most three digits, and others to stop by.

    python benchmarks/calculator_rows.py OUT

writes demonstrations.jsonl and calls.jsonl for `rolecall sft`. Of the task's own rows a third have such answers, and a model that copies
from a fixed distance, which is right for four digits only, is slow to learn more.
"""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from rolecall.tasks.names import find_task

DEMONSTRATIONS, PLAYED, CALLS = 10_000, 256, 128
"""Demonstrations; the first held-out rows, which are played and so left out of the calls; how many calls there are."""


def demonstrations() -> list[dict[str, Any]]:
    """Of rows to train on, by the task: one in four calls."""
    task, rng = find_task("calculator"), Random(0)
    rows = list(task.rows("train", n=20_000))
    kinds = [[row for row in rows if (len(row["answer"]) < 4) is short] for short in (False, True)]
    drawn = [rng.choice(kinds[i % 2]) for i in range(DEMONSTRATIONS)]
    return [{"prompt": row["prompt"], "completion": task.gold(row)} for row in drawn]


def calls() -> list[dict[str, Any]]:
    """Of held-out rows that are not played: all call. Has a start learnt to copy?"""
    task, found = find_task("calculator"), list[dict[str, Any]]()
    played = {row["prompt"][0]["content"] for row in task.rows("test", n=PLAYED)}
    for row in task.rows("test", n=PLAYED + CALLS, seed=1):
        asked = row["prompt"][0]["content"]
        said = [("assistant", f"<calc>{asked}</calc>"), ("tool", row["answer"]), ("assistant", row["answer"])]
        if asked not in played:
            found.append(
                {"prompt": row["prompt"], "completion": [{"role": who, "content": what} for who, what in said]}
            )
    return found[:CALLS]


def write(place: Path) -> tuple[str, str]:
    """Both files; their names."""
    place.mkdir(parents=True, exist_ok=True)
    names = place / "demonstrations.jsonl", place / "calls.jsonl"
    for name, rows in zip(names, (demonstrations(), calls()), strict=True):
        name.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(names[0]), str(names[1])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
