"""What differs first between the rollouts of the same step of two runs, in the order in which a step computes it."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from rolecall.look.diff.record import Record, at, first_difference, lists
from rolecall.maths.codes import Role, Verdict
from rolecall.visible import visible_token

Found = dict[str, Any]
"""The fields of a `Parting` but its step."""
_DRAWN_BY = "the seed that random numbers depend on is"


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
    for i, (a, b) in enumerate(zip(one["sampling"].to_pylist(), two["sampling"].to_pylist(), strict=True)):
        for name in (a or {}).keys() | (b or {}).keys():
            if (a or {}).get(name) != (b or {}).get(name):
                said = f"sampled with {name} {(a or {}).get(name)} and {(b or {}).get(name)}"
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
            if left != right and not (left != left and right != right):
                said = f"reward {visible_token(name)} gave {_score(left)} and {_score(right)} for the same answer"
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


def _other_columns(one: pa.Table, two: pa.Table) -> Found | None:
    """What nothing is computed from: how tokens are spelt, notes of rewards."""
    for name in (
        "prompt",
        "agent",
        "author",
        "policy_version",
        "turns",
        "authors",
        "supports",
        "messages",
        "extras",
        "pieces",
    ):
        for i, (a, b) in enumerate(zip(one[name].to_pylist(), two[name].to_pylist(), strict=True)):
            if a != b:
                return {"kind": "number", "answer": i, "sentence": f"the column {name} differs"}
    return None


def _verdict(codes: Any, token: int) -> str:
    known = codes is not None and token < len(codes) and int(codes[token]) in set(Verdict)
    return Verdict(int(codes[token])).name.lower().replace("_", " ") if known else at(codes, token)


def _values(one: pa.Table, two: pa.Table, column: str, kind: str, said: str) -> Found | None:
    for i, (a, b) in enumerate(zip(one[column].to_pylist(), two[column].to_pylist(), strict=True)):
        if a != b and not (a != a and b != b):
            shown = [visible_token(v) if isinstance(v, str) else _score(v) for v in (a, b)]
            return {"kind": kind, "answer": i, "sentence": f"{said} {shown[0]} and {shown[1]}"}
    return None


def _score(value: Any) -> str:
    return "nothing" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"…{text[-59:]}"
