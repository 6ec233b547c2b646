"""The built-in reward `math`, with math-verify. Imported in workers only: it hands model text to sympy."""

from collections.abc import Mapping
from typing import Any

from rolecall.rewards.verifiers import gold_answer

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("math-verify is not installed; pip install 'rolecall[tasks]'") from error

_PATIENCE_S = 2
"""For parsing and for comparing; what takes longer is no answer."""


def math(completion_text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the text's final expression equals the row's answer as mathematics, 0 if not or if it takes too long."""
    gold = gold_answer(row)
    if gold is None:
        return None
    wanted = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=_PATIENCE_S)
    found = parse(completion_text, parsing_timeout=_PATIENCE_S)
    return float(verify(wanted, found, timeout_seconds=_PATIENCE_S))
