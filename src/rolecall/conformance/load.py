"""An adapter, from a file or by name, checked against the interface before any case runs."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rolecall.conformance.interface import Interface
from rolecall.errors import UserError

SHIPPED = ("rolecall", "trl", "verl", "openrlhf")
NAMES = tuple(name for name, value in vars(Interface).items() if inspect.isfunction(value) and name[0] != "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The functions that a library offers."""

    functions: Mapping[str, Callable[..., Any]]
    """By the interface's names."""
    reasons: Mapping[str, str]
    """Why a case differs, by its name: the adapter's REASONS."""
    packages: tuple[str, ...]
    """Packages whose versions belong in a report: the adapter's PACKAGES."""


def load(name: str) -> Adapter:
    """The adapter of a shipped name or a Python file."""
    module = importlib.import_module if name in SHIPPED else _import_file
    try:
        found = module(f"rolecall.conformance.adapters.{name}" if name in SHIPPED else name)
    except ModuleNotFoundError as error:
        get = f"; pip install {error.name}" if error.name in SHIPPED else ""
        raise UserError(f"the adapter {name} cannot be imported: {error}{get}") from error
    except (ImportError, SyntaxError) as error:
        raise UserError(f"the adapter {name} cannot be imported: {error}") from error
    functions = {key: value for key, value in vars(found).items() if key in NAMES and callable(value)}
    for key, value in vars(found).items():
        own = inspect.isfunction(value) and value.__module__ == found.__name__ and not key.startswith("_")
        if own and key not in NAMES:
            close = get_close_matches(key, NAMES, n=1)
            end = f"did you mean {close[0]}?" if close else f"the names are {', '.join(NAMES)}"
            raise UserError(f"the adapter {name} has an unknown function {key}: {end} (helpers start with _)")
    if not functions:
        raise UserError(f"the adapter {name} offers nothing: define some of {', '.join(NAMES)}")
    for key, function in functions.items():
        _check_signature(name, key, function)
    return Adapter(
        functions=functions,
        reasons=dict(getattr(found, "REASONS", {})),
        packages=tuple(getattr(found, "PACKAGES", ())),
    )


def signature(name: str) -> inspect.Signature:
    """How the cases call the function of this name."""
    given = inspect.signature(getattr(Interface, name))
    return given.replace(parameters=list(given.parameters.values())[1:], return_annotation=inspect.Signature.empty)


def accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function takes this keyword."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_signature(adapter: str, name: str, function: Callable[..., Any]) -> None:
    """The arguments without a default are always given; those with one are given where a case needs them."""
    expected = signature(name).parameters.values()
    positional = [p.name for p in expected if p.kind is not p.KEYWORD_ONLY]
    needed = {p.name: None for p in expected if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    try:
        inspect.signature(function).bind(*positional, **needed)
    except TypeError as error:
        stated = ", ".join(str(p.replace(annotation=p.empty)) for p in expected)
        star = next((p.name for p in expected if p.kind is p.KEYWORD_ONLY), None)
        stated = stated if star is None else stated.replace(star, f"*, {star}", 1)
        raise UserError(f"the adapter {adapter} defines {name} wrongly ({error}): it must take ({stated})") from error


def _import_file(name: str) -> ModuleType:
    path = Path(name).expanduser()
    if not path.is_file():
        close = get_close_matches(name, SHIPPED, n=1)
        end = f"did you mean {close[0]}?" if close else f"give a Python file, or one of {', '.join(SHIPPED)}"
        raise UserError(f"there is no adapter {name}: {end}")
    spec = importlib.util.spec_from_file_location(f"conformance_adapter_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"the adapter {name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
