"""Settings from several places made into one checked dataclass: preset < file < flags.

Every source is flattened to dotted keys, so that the later one wins key by key and each value remembers where it came
from. All problems of a call are found and told together, a sentence each.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from os import PathLike, fspath
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rolecall.config.foreign import Differs, Foreign, from_object, lookup
from rolecall.config.given import GivenObject
from rolecall.config.schema import REQUIRED, Option, Section, alternatives, in_words, nearest, schema
from rolecall.errors import UserError

_log = logging.getLogger("rolecall")

FLAGS = "the command line"
"""The source of what was given as flags."""
ARGUMENTS = "the arguments"
"""The source of what was given from Python."""
SAVED = "config.json"
"""The source of what a run holds that is resumed."""

_ON = object()
"""The value of a section that is switched on."""

T = TypeVar("T")


class ConfigError(UserError):
    """Settings that cannot be used, a sentence for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[T]):
    """Checked options and where they come from."""

    options: T
    """The dataclass."""
    sources: Mapping[str, str]
    """Where each key was set that somebody set."""


def resolve(options: type[T], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Resolved[T]:
    """Merge (source, nested settings) layers, the last one strongest, and check the result."""
    whole = schema(options)
    problems: list[str] = []
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    foreign: dict[str, Foreign] = {}
    for source, settings in _unpacked(layers, whole):
        layer = _Layer(whole=whole, source=source, problems=problems)
        layer.read(whole, settings)
        layer.translate()
        _choose(values, layer, getattr(options, "either", ()))
        _overlay(values, layer.values)
        foreign = {key: f for key, f in foreign.items() if key not in layer.values} | layer.names
        sources |= dict.fromkeys(layer.values, source)
    for option in whole.options():
        if option.key in values:
            written = foreign[option.key].name if option.key in foreign else ""
            values[option.key] = _checked(option, values[option.key], sources[option.key], problems, written)
    built: Any = None if problems else _build(whole, values, problems)
    if built is not None:
        problems += _updates_counted(built, foreign)
    if problems:
        raise ConfigError(problems)
    shown = {key: f"{sources[key]} ({foreign[key].name})" if key in foreign else sources[key] for key in values}
    return Resolved(options=built, sources={key: shown[key] for key, value in values.items() if value is not _ON})


def _unpacked(
    layers: Sequence[tuple[str, Mapping[str, Any]]], whole: Section
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The layers; an object of another library's settings, `args`, is a weaker one before that which it is given in."""
    for source, settings in layers:
        given = settings.get("args")
        if given is not None and whole.foreign and not isinstance(given, str | int | float | list | tuple):
            found, left = from_object(given, whole.foreign)
            name = type(given).__name__
            if left:
                _log.warning("of %s these are not used here: %s", name, ", ".join(left))
            yield f"args, {name}", found
            settings = {key: value for key, value in settings.items() if key != "args"}
        yield source, settings


def _updates_counted(options: Any, foreign: Mapping[str, Foreign]) -> list[str]:
    """Problems with names that count optimiser steps where a rollout takes several."""
    o = getattr(options, "algorithm", None)
    each = 1 if o is None else o.epochs * o.minibatches
    return [
        f"`{f.name}` counts optimiser steps, `{key}` rollouts, which take {each} each here: give `{key}`"
        for key, f in foreign.items()
        if f.counts_updates and each > 1
    ]


def preset_layer(options: Any, name: str) -> tuple[str, Mapping[str, Any]]:
    """The settings of a preset, as a layer."""
    presets = getattr(options, "presets", {})
    if not presets:
        raise UserError("this command has no presets; leave out --preset")
    if name not in presets:
        close = get_close_matches(name, presets, n=1)
        end = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(presets)}"
        raise UserError(f"unknown preset {name!r}: {end}")
    return f"preset {name}", presets[name]


def make(options: type[T], settings: Mapping[str, Any], *, source: str = ARGUMENTS) -> T:
    """Options from nested (or dotted) settings; a section may be given as its dataclass."""
    return resolve(options, [(source, settings)]).options


def to_dict(options: Any) -> dict[str, Any]:
    """Options as nested dicts, lists and scalars, ready for JSON."""
    return {f.name: _plain(getattr(options, f.name)) for f in fields(options) if f.init}


def label(key: str, source: str) -> str:
    """What to call a key, so that the user finds it."""
    if source == FLAGS:
        return f"--{key}"
    return f"`{key}`" if source == ARGUMENTS else f"`{key}` in {source}"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


@dataclass(kw_only=True)
class _Layer:
    """The settings of one source by dotted key."""

    whole: Section
    source: str
    problems: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    """What was written under other libraries' names."""
    names: dict[str, Foreign] = field(default_factory=dict)
    """By key, the foreign name that set it."""

    def read(self, section: Section, settings: Mapping[Any, Any]) -> None:
        """Take in a section's settings; what has no place is a problem."""
        parts = {part.name: part for part in section.parts}
        for written, value in settings.items():
            name, _, rest = str(written).partition(".")
            part, inner = parts.get(name), {rest: value} if rest else value
            if part is None or (rest and isinstance(part, Option) and not part.mapping):
                self._elsewhere(f"{section.key}.{written}" if section.key else str(written), value)
            elif isinstance(part, Section):
                self._read_section(part, inner)
            elif part.key not in self.values:
                self.values[part.key] = fspath(inner) if isinstance(inner, PathLike) else inner
            elif isinstance(self.values[part.key], Mapping) and isinstance(inner, Mapping):
                self.values[part.key] = {**self.values[part.key], **inner}
            else:
                self.problems.append(f"{label(part.key, self.source)} is given twice; keep one")

    def _read_section(self, section: Section, value: Any) -> None:
        if is_dataclass(value) and isinstance(value, section.type):
            value = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        if value is None and section.optional:
            self.values[section.key] = None
        elif value is None:
            return  # `optim:` with nothing below it
        elif isinstance(value, Mapping):
            if section.optional:
                self.values[section.key] = _ON
            self.read(section, value)
        else:
            self.problems.append(
                f"{label(section.key, self.source)} holds settings of its own, such as "
                f"`{section.key}.{section.parts[0].name}`; got {value!r}"
            )

    def _elsewhere(self, key: str, value: Any) -> None:
        """A key that is none of ours: another library's, a section of such, or unknown."""
        name = lookup(key)
        inside = key == "actor_rollout_ref" or any(f.startswith(f"{name}.") for f in self.whole.foreign)
        if name in self.whole.foreign:
            self.foreign[name] = fspath(value) if isinstance(value, PathLike) else value
        elif inside and self.whole.foreign and isinstance(value, Mapping):
            for part, held in value.items():
                self._elsewhere(f"{key}.{part}", held)
        else:
            self._unknown(key)

    def translate(self) -> None:
        """Put what was written under foreign names where it belongs."""
        keys = {option.key for option in self.whole.options()}
        for name, value in self.foreign.items():
            entry = self.whole.foreign[name]
            if value is None and not entry.same:
                continue  # not set
            if entry.unused:
                _log.warning("%s has no effect: %s", label(name, self.source), entry.unused)
            try:
                found = entry.convert(value, self.foreign)
            except Differs as why:
                self.problems.append(f"{label(name, self.source)}: {why}")
                continue
            except (TypeError, ValueError):
                self.problems.append(f"{label(name, self.source)} cannot be {_shown(value)}; see `{entry.keys[0]}`")
                continue
            for key, ours in found.items():
                if key not in keys:
                    self.problems.append(f"{label(name, self.source)}: there is no `{key}` here")
                elif key in self.values:
                    other = self.names[key].name if key in self.names else key
                    self.problems.append(f"{label(name, self.source)} sets `{key}`, and so does `{other}`; keep one")
                else:
                    self.values[key], self.names[key] = ours, entry

    def _unknown(self, key: str) -> None:
        guess = nearest(key, self.whole)
        what = f"unknown key {label(key, self.source)}" if self.source != FLAGS else f"unknown option --{key}"
        self.problems.append(f"{what}: did you mean `{guess}`?" if guess else f"{what}; docs/config.md lists all keys")


def _choose(values: dict[str, Any], layer: _Layer, either: Sequence[str]) -> None:
    """Drop what weaker layers say where this one gives another of `either`; a saved run may hold several."""
    given = [key for key in either if layer.values.get(key) is not None]
    if len(given) > 1 and layer.source != SAVED:
        names = " and ".join(label(key, layer.source) for key in given)
        layer.problems.append(f"{names} are both given; keep one")
    if given:
        for key in either:
            values.pop(key, None)


def _overlay(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Put a stronger layer on top, in place."""
    for key, value in layer.items():
        if value is None:  # a section that is off takes what was set in it along
            for below in [k for k in values if k.startswith(f"{key}.")]:
                del values[below]
        if isinstance(value, Mapping) and isinstance(values.get(key), Mapping):
            value = {**values[key], **value}
        values[key] = value


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def _checked(option: Option, value: Any, source: str, problems: list[str], written: str = "") -> Any:
    """The value as the option's type, or a problem; `written` is the name it was given under, if not ours."""
    types = alternatives(option.type)
    if any(isinstance(one, GivenObject) for one in (value if isinstance(value, tuple) else (value,))):
        return value  # pydantic would keep the text alone
    try:
        if isinstance(value, bool) and bool not in types and not any(value in get_args(t) for t in types):
            raise TypeError  # pydantic would take True for 1
        return _adapter(option.type).validate_python(value)
    except (ValidationError, TypeError):
        name = label(written or (option.flag if source == FLAGS else option.key), source)
        guess = _near_choice(option, value)
        problems.append(f"{name} must be {in_words(option.type)}, got {_shown(value)}{guess}")
        return value


def _near_choice(option: Option, value: Any) -> str:
    choices = [str(c) for t in alternatives(option.type) if get_origin(t) is Literal for c in get_args(t)]
    close = get_close_matches(str(value), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _build(section: Section, values: Mapping[str, Any], problems: list[str]) -> Any:
    """The section's dataclass, from the inside out; None if it is off or cannot be made."""
    if section.optional and values.get(section.key, _ON if section.on else None) is None:
        return None
    arguments: dict[str, Any] = {}
    for part in section.parts:
        if isinstance(part, Section):
            arguments[part.name] = _build(part, values, problems)
        elif part.key in values:
            arguments[part.name] = values[part.key]
        elif part.default is REQUIRED:
            problems.append(f"`{part.key}` is missing: give --{part.flag}, or `{part.key}` in a config file")
        else:
            arguments[part.name] = part.default
    if problems:
        return None
    try:
        return section.type(**arguments)
    except ValueError as error:
        problems.append(f"`{section.key}`: {error}" if section.key else str(error))
        return None
