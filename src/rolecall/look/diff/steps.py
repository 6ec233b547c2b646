"""What differs first in the same step of two runs: its rollouts, its updates, its numbers, in the order in which a step computes them."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.experience.parquet import Format, Ragged, StoreError, read_table
from rolecall.experience.rollout_schema import ROLLOUTS, UPDATES
from rolecall.look.run import RunFiles
from rolecall.maths.codes import Role, Verdict
from rolecall.visible import visible_token

_log = logging.getLogger("rolecall")

Found = dict[str, Any]
"""The fields of a `Parting` but its step."""
_DRAWN_BY = "the seed that random numbers depend on is"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a run kept of a step."""

    rollouts: pa.Table
    updates: pa.Table | None
    weights: str | None
    """The fingerprint of the weights that sampled, if the file holds one of weights."""


def read_record(run: RunFiles, step: int) -> Record | None:
    """The record of a step; None if its rollouts are not there or cannot be read."""
    held = _read(run.rollouts, step, ROLLOUTS)
    if held is None:
        return None
    updates = _read(run.updates, step, UPDATES)
    model = held[1].get("model", "")
    # A multi-agent run writes a word there, not a fingerprint.
    return Record(
        rollouts=held[0], updates=None if updates is None else updates[0], weights=model if len(model) >= 32 else None
    )


def _read(files: Mapping[int, Path], step: int, form: Format) -> tuple[pa.Table, dict[str, str]] | None:
    if step not in files:
        return None
    try:
        return read_table(files[step], form)
    except FileNotFoundError:  # older steps make room while a run goes on
        return None
    except (StoreError, OSError) as error:
        _log.warning("%s; compared without it", error)
        return None


def lists(table: pa.Table, name: str) -> list[NDArray | None]:
    """A list column as an array per row; None where there is none."""
    return Ragged.read(table[name]).arrays()


def first_difference(a: NDArray | None, b: NDArray | None) -> int | None:
    """The first position at which two arrays differ; their shorter length if one goes on; None if they are equal.

    One that is missing differs where the other has its first number.
    """
    if a is None or b is None:
        there = a if b is None else b
        numbers = np.zeros(0, bool) if there is None else there == there
        return int(np.argmax(numbers)) if numbers.any() else None
    n = min(len(a), len(b))
    same = (a[:n] == b[:n]) | ((a[:n] != a[:n]) & (b[:n] != b[:n]))
    if not same.all():
        return int(np.argmin(same))
    return None if len(a) == len(b) else n


def at(values: NDArray | None, position: int) -> str:
    """A value as people read it."""
    if values is None or position >= len(values):
        return "nothing"
    value = values[position].item()
    return _number(None if value != value else value)


# -- rollouts --------------------------------------------------------------------------------------------------------


def rollouts_part(a: Record, b: Record) -> Found | None:
    """The first difference, or None."""
    if a.weights and b.weights and a.weights != b.weights:
        said = f"the weights that answers are sampled from are {a.weights[:12]}… and {b.weights[:12]}…"
        return {"kind": "weights", "sentence": said}
    one, two = a.rollouts, b.rollouts
    if one.equals(two):
        return None
    least = min(len(one), len(two))
    if (found := _values(one.slice(0, least), two.slice(0, least), "seed", "random number", _DRAWN_BY)) is not None:
        return found
    if len(one) != len(two):
        return {"kind": "data", "sentence": f"the step has {len(one)} answers and {len(two)}"}
    return (
        _prompts(one, two)
        or _random_numbers(one, two)
        or _tokens(one, two)
        or _values(one, two, "finish", "finish", "ended by")
        or _scores(one, two)
        or _positions(one, two)
        or _other_columns(one, two)
    )


def _prompts(one: pa.Table, two: pa.Table) -> Found | None:
    texts = one["prompt_text"].to_pylist(), two["prompt_text"].to_pylist()
    for i, (a, b) in enumerate(zip(*texts, strict=True)):
        if a != b:
            kind, what = "data", "another prompt"
            if Counter(texts[0]) == Counter(texts[1]):
                kind, what = "order", "the same prompts in another order"
            said = f"{what}: {visible_token(_short(a))} and {visible_token(_short(b))}"
            return {"kind": kind, "answer": i, "sentence": said}
    given = zip(*(zip(lists(t, "ids"), lists(t, "roles"), strict=True) for t in (one, two)), strict=True)
    for i, ((ids_a, roles_a), (ids_b, roles_b)) in enumerate(given):
        begins = [ids[: _begin(roles)] for ids, roles in ((ids_a, roles_a), (ids_b, roles_b))]
        token = first_difference(*begins)
        if token is not None:
            said = f"the prompt is the same text, but token {at(begins[0], token)} and token {at(begins[1], token)}"
            return {"kind": "data", "answer": i, "token": token, "sentence": said}
    return None


def _begin(roles: Any) -> int:
    """Tokens before the first that the policy chose."""
    own = (roles == Role.CONTENT) | (roles == Role.STOP)
    return int(np.argmax(own)) if own.any() else len(roles)


def _random_numbers(one: pa.Table, two: pa.Table) -> Found | None:
    """What a token's random number is made of, and what it is drawn by."""
    for name in ("group", "sample"):
        found = _values(one, two, name, "random number", _DRAWN_BY.replace("seed", name))
        if found is not None:
            return found
    given = ([held or {} for held in table["sampling"].to_pylist()] for table in (one, two))
    for i, (a, b) in enumerate(zip(*given, strict=True)):
        for name in a.keys() | b.keys():
            if a.get(name) != b.get(name):
                said = f"sampled with {name} {a.get(name)} and {b.get(name)}"
                return {"kind": "sampling", "answer": i, "sentence": said}
    return None


def _tokens(one: pa.Table, two: pa.Table) -> Found | None:
    """The first answer of which a token or the log-prob that it was sampled with differs, at its first such position."""
    columns = [(lists(t, "ids"), lists(t, "behaviour_logprobs"), lists(t, "roles")) for t in (one, two)]
    for i in range(len(one)):
        (ids_a, logs_a, roles_a), (ids_b, logs_b, _) = ([column[i] for column in held] for held in columns)
        token, log = first_difference(ids_a, ids_b), first_difference(logs_a, logs_b)
        if log is not None and (token is None or log < token):
            said = f"the same token, with log-prob {at(logs_a, log)} and {at(logs_b, log)} when it was sampled"
            return {"kind": "log-prob", "answer": i, "token": log, "sentence": said}
        if token is not None:
            return {"answer": i, "token": token, **_other_token(one, two, i, token, roles_a, logs_a, logs_b)}
    return None


def _other_token(one: pa.Table, two: pa.Table, i: int, token: int, roles: Any, logs_a: Any, logs_b: Any) -> Found:
    written = [_piece(table, i, token) for table in (one, two)]
    if roles is not None and token < len(roles) and roles[token] == Role.OBSERVATION:
        return {"kind": "observation", "sentence": f"the environment said {written[0]} and {written[1]}"}
    said = (
        f"{written[0]} (log-prob {at(logs_a, token)}) and {written[1]} (log-prob {at(logs_b, token)}) were sampled, with the "
        "same random number and the same tokens and log-probs before"
    )
    return {"kind": "sampled token", "sentence": said}


def _piece(table: pa.Table, i: int, token: int) -> str:
    ids, pieces = table["ids"][i].as_py(), table["pieces"][i].as_py()
    if token >= len(ids):
        return "nothing"
    if pieces is None or token >= len(pieces):
        return f"id {ids[token]}"
    return visible_token(pieces[token].decode("utf-8", "backslashreplace"))


def _scores(one: pa.Table, two: pa.Table) -> Found | None:
    """The first answer that is scored differently, and by which part."""
    for i, (a, b) in enumerate(zip(one["scores"].to_pylist(), two["scores"].to_pylist(), strict=True)):
        parts = [{part["part"]: part["score"] for part in held} for held in (a, b)]
        for name in dict.fromkeys([*parts[0], *parts[1]]):
            left, right = (held.get(name) for held in parts)
            if not _same(left, right):
                said = f"reward {visible_token(name)} gave {_number(left)} and {_number(right)} for the same answer"
                return {"kind": "reward", "answer": i, "sentence": said}
    for name in ("total", "score", "baseline", "reward_failure"):
        if (found := _values(one, two, name, "reward", f"the {name.replace('_', ' ')} is")) is not None:
            return found
    return None


_COMPUTED = {
    "roles": ("verdict", "the role is number"),
    "old_logprobs": ("log-prob", "the trainer's log-prob is"),
    "ref_logprobs": ("log-prob", "the reference's log-prob is"),
    "values": ("value", "the critic's value is"),
    "rewards": ("reward", "the reward of the token is"),
    "advantages": ("advantage", "the advantage is"),
    "returns": ("advantage", "the return is"),
    "weights": ("advantage", "the importance weight is"),
    "verdicts": ("verdict", "the verdict is"),
}
"""Numbers per token in the order in which they are computed, and what they are called."""


def _positions(one: pa.Table, two: pa.Table) -> Found | None:
    """The first token for which another number was computed."""
    for name, (kind, said) in _COMPUTED.items():
        for i, (a, b) in enumerate(zip(lists(one, name), lists(two, name), strict=True)):
            if (token := first_difference(a, b)) is not None:
                left, right = (_verdict(v, token) if name == "verdicts" else at(v, token) for v in (a, b))
                return {"kind": kind, "answer": i, "token": token, "sentence": f"{said} {left} and {right}"}
    return None


_OTHER = ("prompt", "agent", "author", "policy_version", "turns", "authors", "supports", "messages", "extras", "pieces")


def _other_columns(one: pa.Table, two: pa.Table) -> Found | None:
    """What nothing is computed from: how tokens are spelt, notes of rewards."""
    for name in _OTHER:
        for i, (a, b) in enumerate(zip(one[name].to_pylist(), two[name].to_pylist(), strict=True)):
            if a != b:
                return {"kind": "number", "answer": i, "sentence": f"the column {name} differs"}
    return None


def _verdict(codes: Any, token: int) -> str:
    known = codes is not None and token < len(codes) and int(codes[token]) in set(Verdict)
    return Verdict(int(codes[token])).name.lower().replace("_", " ") if known else at(codes, token)


def _values(one: pa.Table, two: pa.Table, column: str, kind: str, said: str) -> Found | None:
    for i, (a, b) in enumerate(zip(one[column].to_pylist(), two[column].to_pylist(), strict=True)):
        if not _same(a, b):
            shown = [visible_token(v) if isinstance(v, str) else _number(v) for v in (a, b)]
            return {"kind": kind, "answer": i, "sentence": f"{said} {shown[0]} and {shown[1]}"}
    return None


def _number(value: Any, *, missing: str = "nothing") -> str:
    return missing if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"…{text[-59:]}"


# -- updates ---------------------------------------------------------------------------------------------------------

_PLACE = ("rollout_step", "trajectory", "epoch", "minibatch")


def updates_part(a: Record, b: Record) -> dict[str, Any] | None:
    """The first token that an optimiser step treated differently, in the order of these steps; None if there is none, or
    if either run did not keep the file."""
    if a.updates is None or b.updates is None or a.updates.equals(b.updates):
        return None
    places = [list(zip(*(held[name].to_pylist() for name in _PLACE), strict=True)) for held in (a.updates, b.updates)]
    for left, right in zip(*places, strict=False):
        if left != right:
            said = f"mini-batches are made of other answers: answer {left[1]} of step {left[0]} and answer {right[1]} of step "
            return {"kind": "order", "answer": left[1], "sentence": f"{said}{right[0]}"}
    if len(places[0]) != len(places[1]):
        return {"kind": "loss", "sentence": f"optimiser steps saw {len(places[0])} answers and {len(places[1])}"}
    terms = [name for name in a.updates.column_names if name.startswith("contribution_")]
    columns = ["verdicts", "weights", "logprobs", "ratio", *(t for t in terms if t in b.updates.column_names)]
    held = {name: (lists(a.updates, name), lists(b.updates, name)) for name in columns}
    for i, (_, trajectory, epoch, minibatch) in enumerate(places[0]):
        for name, (one, two) in held.items():
            if (token := first_difference(one[i], two[i])) is not None:
                what = name.removeprefix("contribution_").replace("_", " ")
                what = f"share of the {what} loss" if name.startswith("contribution_") else what
                said = f"{what} {at(one[i], token)} and {at(two[i], token)} in epoch {epoch}, mini-batch {minibatch}"
                kind = "log-prob" if name == "logprobs" else "loss"
                return {"kind": kind, "answer": trajectory, "token": token, "sentence": said}
    return None


# -- numbers of the metrics ------------------------------------------------------------------------------------------

_ORDER = (
    ("eval_", "evaluation"),
    ("learning_rate", "setting"),
    ("kl_coef", "setting"),
    ("entropy_coef", "setting"),
    ("epsilon", "setting"),
    ("completions/", "sampled token"),
    ("num_tokens", "sampled token"),
    ("agents/", "observation"),
    ("env_steps", "observation"),
    ("episode_length", "observation"),
    ("reward", "reward"),
    ("return", "reward"),
    ("sampling/", "log-prob"),
    ("entropy", "log-prob"),
    ("kl", "log-prob"),
    ("policy/value", "value"),
    ("policy/advantage", "advantage"),
    ("loss/grad_norm", "gradient"),
    ("loss", "loss"),
    ("grad_norm", "gradient"),
)
"""Beginnings of names in the order in which a step computes them, and what they tell."""

_GIVEN = {"sampled token": "data", "log-prob": "loss", "reward": "loss"}
"""What they tell where answers are given, not sampled."""


def metrics_part(a: dict[str, Any], b: dict[str, Any], *, given: bool = False) -> dict[str, Any] | None:
    """The number that is computed first among those that differ; None if all are the same. `given`: no answer is sampled."""
    differ = [name for name in dict.fromkeys([*a, *b]) if not _same(a.get(name), b.get(name))]
    if not differ:
        return None
    name = min(differ, key=_place)
    place = _place(name)
    kind = _ORDER[place][1] if place < len(_ORDER) else "number"
    kind = _GIVEN.get(kind, kind) if given else kind
    shown = [_number(line.get(name), missing="not there") for line in (a, b)]
    more = f", and {len(differ) - 1} more numbers differ" if len(differ) > 1 else ""
    return {"kind": kind, "sentence": f"{name} is {shown[0]} and {shown[1]}{more}"}


def _place(name: str) -> int:
    return next((i for i, (begin, _) in enumerate(_ORDER) if name.startswith(begin)), len(_ORDER))


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)
