"""The built-in rewards. Each looks at one answer and gives 1.0 or 0.0, or None if the row has no answer to compare with.

They run in workers, like any reward: what a model writes never reaches a parser in the trainer's process.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# A minus belongs to a number unless it follows one ("7-3" ends in 3). Linear: no two parts can match the same text.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?", re.ASCII)


def exact(completion_text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the answer is the row's answer, spaces around it apart."""
    gold = gold_answer(row)
    return None if gold is None else float(completion_text.strip() == gold.strip())


def contains(completion_text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the row's answer stands somewhere in the text."""
    gold = gold_answer(row)
    return None if gold is None else float(gold.strip() in completion_text)


def number(completion_text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the last number in the text equals the last number of the row's answer ("... #### 1,234" is 1234)."""
    gold = gold_answer(row)
    wanted = None if gold is None else last_number(gold)
    if wanted is None:
        return None
    return float(last_number(completion_text) == wanted)


def last_number(text: str) -> Decimal | None:
    """The last number in the text, exact; thousands may be set apart by commas."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def gold_answer(row: Mapping[str, Any]) -> str | None:
    """The row's answer: verl's `reward_model.ground_truth`, or the column `answer`, `solution` or `ground_truth`."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return str(reward_model["ground_truth"])
    for column in ("answer", "solution", "ground_truth"):
        if row.get(column) is not None:
            return str(row[column])
    return None
