"""How a reward function is called. Runs in the worker.

Three styles, told apart by parameter names; every style may be `async`:

    batch   TRL's:  f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, environments, **columns)
                    -> one float or None per answer
    sample          f(prompt, completion, completion_text, completion_ids, row, **columns) -> float, None or a dict
    verl    verl's: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or a dict

A function names the parameters it wants, in any order; with **kwargs it gets all of them.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rolecall.rewards.records import RewardError, TrainerState

Style = Literal["batch", "sample", "verl"]
_RESERVED = ("prompt", "completion", "completion_ids")  # columns of these names are given by the sample itself
_GIVEN: dict[Style, frozenset[str]] = {
    "batch": frozenset(
        {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
    ),
    "sample": frozenset(
        {
            "prompt",
            "completion",
            "completion_text",
            "completion_ids",
            "row",
            "trainer_state",
            "log_metric",
            "environment",
        }
    ),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
}
"""What a function of each style gets whatever columns the rows have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The samples of one call, by column."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[Any]
    rows: list[Mapping[str, Any]]
    environments: list[Any] | None
    state: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(slots=True)
class Log:
    """What a function logs while it is called."""

    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """TRL's `log_extra`: one value per sample."""
        self.extras[str(column)] = [_plain(value) for value in values]

    def metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`."""
        self.metrics.append((str(name), float(value)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A function, how to call it, and what it wants."""

    name: str
    call: Callable[..., Any]
    style: Style
    required: frozenset[str]
    """Parameters without a default."""
    accepted: frozenset[str] | None
    """All parameters; None: anything, through **kwargs."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that rows must have for it."""
        return tuple(sorted(self.required - _GIVEN[self.style]))

    def of_batch(self, answers: Answers, log: Log) -> list[Any]:
        """One JSON-able value per answer: a number, None, or {"bad": what it was instead}."""
        names = dict.fromkeys((*self.columns, *_column_names(answers.rows)))  # None where a row lacks what others have
        columns = {name: [row.get(name) for row in answers.rows] for name in names}
        given = columns | {
            "prompts": answers.prompts,
            "completions": answers.completions,
            "completion_ids": answers.completion_ids,
            "trainer_state": TrainerState(answers.state, reward=self.name),
            "log_extra": log.extra,
            "log_metric": log.metric,
            "environments": answers.environments,
        }
        rewards = self._call(given)
        if isinstance(rewards, str | Mapping) or not hasattr(rewards, "__iter__"):
            raise RewardError(
                f"reward `{self.name}` returned a {type(rewards).__name__}; it must return a list of {len(answers)} "
                f"numbers, one per answer"
            )
        return [_value(reward)[0] for reward in rewards]

    def of_sample(self, answers: Answers, index: int, log: Log) -> tuple[Any, dict[str, Any]]:
        """The value of one answer as in `of_batch`, and what else its dict held."""
        row = answers.rows[index]
        text = text_of(answers.completions[index])
        if self.style == "verl":
            given = {
                "data_source": row.get("data_source"),
                "solution_str": text,
                "ground_truth": _ground_truth(row),
                "extra_info": row.get("extra_info"),
            }
            return _value(self._call(given))
        own = {name: value for name, value in row.items() if name not in _RESERVED}
        columns = dict.fromkeys(self.columns) | own
        given = columns | {
            "prompt": answers.prompts[index],
            "completion": answers.completions[index],
            "completion_text": text,
            "completion_ids": answers.completion_ids[index],
            "row": row,
            "trainer_state": TrainerState(answers.state, reward=self.name),
            "log_metric": log.metric,
            "environment": answers.environments[index] if answers.environments else None,
        }
        return _value(self._call(given))

    def _call(self, given: Mapping[str, Any]) -> Any:
        accepted = self.accepted
        result = self.call(**{k: v for k, v in given.items() if accepted is None or k in accepted})
        if not inspect.isawaitable(result):
            return result
        import asyncio  # not needed by most, and slow to import

        return asyncio.run(_awaited(result))


def inspect_function(name: str, function: Callable[..., Any]) -> RewardFunction:
    """Find the style by the parameters' names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward `{name}` has no signature that can be read; wrap it in a Python function") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = frozenset(p.name for p in named)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    style: Style | None = None
    if {"solution_str", "ground_truth"} <= names:
        style = "verl"
    elif {"completions", "completion_ids", "prompts"} & names and not {"completion", "completion_text"} & names:
        style = "batch"
    elif {"completion", "completion_text"} & names:
        style = "sample"
    elif anything:
        style = "batch"
    if style is None or any(p.kind is p.POSITIONAL_ONLY for p in named):
        raise RewardError(
            f"reward `{name}` has the parameters ({', '.join(p.name for p in named)}); it must take `completions` (a "
            f"list, as in TRL), `completion` (one answer), or `solution_str` and `ground_truth` (as in verl), by name"
        )
    required = frozenset(p.name for p in named if p.default is p.empty)
    return RewardFunction(
        name=name, call=function, style=style, required=required, accepted=None if anything else names
    )


def no_column(name: str, column: str, columns: Iterable[str]) -> str:
    """The sentence for a function that asks for what the rows do not have."""
    there = ", ".join(sorted(columns)) or "they have none"
    return f"reward `{name}` asks for `{column}`, but the rows have no such column ({there})"


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The answer as text: of messages, what the last one says."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


async def _awaited(result: Any) -> Any:
    return await result


def _column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return [name for name in names if name not in _RESERVED]


def _ground_truth(row: Mapping[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping):
        return reward_model.get("ground_truth")
    return row.get("ground_truth", row.get("answer"))


def _value(reward: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(reward, Mapping):
        if "score" not in reward:
            return {"bad": f"a dict without 'score' (its keys: {', '.join(map(str, reward)) or 'none'})"}, {}
        value, _ = _value(reward["score"])
        return value, {str(k): _plain(v) for k, v in reward.items() if k != "score"}
    if reward is None:
        return None, {}
    if hasattr(type(reward), "__float__"):  # int, float, bool, numpy scalars, tensors of one element
        return float(reward), {}
    return {"bad": f"{reward!r:.80} (a {type(reward).__name__})"}, {}


def _plain(value: Any) -> Any:
    """Something JSON can carry: numbers, texts and lists of them as they are, the rest as text."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if hasattr(type(value), "__float__") else f"{value!r:.1000}"
