"""Where a reward function comes from: a callable, "file.py:function", "module:function", or a built-in name.

The trainer packs a source, the worker opens it: user modules are imported in workers only, and the user's script is
never imported a second time.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import count
from typing import Any

from rolecall.rewards.records import RewardError
from rolecall.workers.load import load_object, pickle_callable, split_name

BUILT_IN = {
    "exact": "rolecall.rewards.verifiers",
    "number": "rolecall.rewards.verifiers",
    "contains": "rolecall.rewards.verifiers",
    "math": "rolecall.rewards.math_verifier",
}
"""The built-in rewards and the modules they live in."""

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "reward_model")
"""Where rows keep the right answer; `reward_model.ground_truth` is verl's."""

Source = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A reward function under a name that the caller chose."""

    name: str
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A reward function as it travels to a worker."""

    name: str
    """What metrics and messages call it."""
    module: str = ""
    """A module's name, or the path of a file that ends in .py."""
    function: str = ""
    """The function in that module, dotted for a method."""
    pickled: bytes = b""
    """The callable itself, where one was given."""


def pack(functions: Source | Sequence[Source | Named] | Mapping[str, Source]) -> tuple[Packed, ...]:
    """The functions with distinct names: those a mapping gives, else their own, numbered where several are the same."""
    if isinstance(functions, Mapping):
        given: list[Source | Named] = [Named(name=name, source=source) for name, source in functions.items()]
    elif isinstance(functions, str) or callable(functions):
        given = [functions]
    else:
        given = list(functions)
    if not given:
        raise RewardError("no reward function given; name one, for example 'exact' or 'rewards.py:my_reward'")
    for source in given:
        if isinstance(source, str) and given.count(source) > 1:
            raise RewardError(f"reward {source!r} is given twice; keep one")
    packed = [_pack_one(g.source, g.name) if isinstance(g, Named) else _pack_one(g, None) for g in given]
    return tuple(replace(p, name=name) for p, name in zip(packed, distinct([p.name for p in packed]), strict=True))


def distinct(names: Sequence[str]) -> list[str]:
    """Names that occur several times get numbers: f, g, f become f_1, g, f_2."""
    found: list[str] = []
    for name in names:
        numbers = (f"{name}_{i}" for i in count(1))
        alone = names.count(name) == 1
        found.append(name if alone else next(n for n in numbers if n not in found and n not in names))
    return found


def _pack_one(source: Source, name: str | None) -> Packed:
    if name == "":
        raise RewardError("a reward's name is empty: give one, {name: function}")
    if isinstance(source, type):
        raise RewardError(f"reward `{source.__name__}` is a class: give an instance, `{source.__name__}()`")
    if not callable(source) and not isinstance(source, str):
        raise RewardError(
            f"reward `{name or repr(source)}` is a {type(source).__name__}, not a function or the name of one"
        )
    if callable(source):
        what, advice = (
            f"reward `{name_of(source)}`",
            "name it 'file.py:function', or create what it holds inside the call",
        )
        pickled = pickle_callable(source, what=what, advice=advice, error=RewardError)
        return Packed(name=name or name_of(source), pickled=pickled)
    if ":" in source:
        module, function = split_name(source, what=f"reward {source!r}", error=RewardError)
        return Packed(name=name or function.rpartition(".")[2], module=module, function=function)
    if source in BUILT_IN:
        return Packed(name=name or source, module=BUILT_IN[source], function=source)
    near = get_close_matches(source, BUILT_IN, n=1)
    hint = f"did you mean '{near[0]}'" if near else f"choose one of {', '.join(BUILT_IN)}"
    raise RewardError(f"there is no built-in reward {source!r}; {hint}, or name your own as 'file.py:function'")


def name_of(function: Callable[..., Any]) -> str:
    """What a callable is called: a partial as what it wraps, an object as its class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")  # a lambda's is <lambda>


def open_packed(packed: Packed) -> Callable[..., Any]:
    """The function, imported here. Every way this can fail is a `RewardError` of one sentence."""
    what = f"reward `{packed.name}`"
    if packed.module:
        found = load_object(packed.module, packed.function, what=what, error=RewardError)
    else:
        try:
            found = pickle.loads(packed.pickled)
        except BaseException as error:  # the modules it needs may raise anything, SystemExit too
            raise RewardError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        where = f"{packed.module}:{packed.function}" if packed.module else "the callable given"
        raise RewardError(f"{what}: {where} is a {type(found).__name__}, not a function")
    return found
