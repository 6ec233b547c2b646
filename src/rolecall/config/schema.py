"""What a dataclass of options holds: its keys, types, defaults and the text under each field."""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rolecall.config.foreign import Foreign, lookup
from rolecall.config.foreign_trl import TRL
from rolecall.config.foreign_verl import VERL

REQUIRED = MISSING
"""The default of an option that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One value that can be set."""

    key: str
    """Its dotted name: `optim.lr`."""
    type: Any
    """What it may hold."""
    default: Any
    """`REQUIRED` if the user must say."""
    about: str
    """The docstring under the field."""
    flag: str
    """Its name on the command line, without dashes; `metadata={"flag": …}` where that differs from the key's last
    part, or from the whole key if it has a dot."""
    known_as: tuple[str, ...]
    """Names other libraries have for it, from `metadata={"known_as": …}`; who writes one of them is told the key."""
    prefixed: Mapping[str, str] = field(default_factory=dict)
    """Further flags, and what each puts before its value, from `metadata={"prefixed": …}`: --agent X is --env agent:X."""
    bare: bool = False
    """True if a word without a flag is its value, from `metadata={"bare": True}`: `rolecall report RUN`. A list takes all."""
    words: bool = False
    """True if all words that follow the flag are its values, from `metadata={"words": True}`: `--against B1 B2`."""

    @property
    def name(self) -> str:
        """The last part of the key: the field's name."""
        return self.key.rpartition(".")[2]

    @property
    def optional(self) -> bool:
        """True if it may be None."""
        return NoneType in alternatives(self.type)

    @property
    def switch(self) -> bool:
        """True if it is on or off: a flag without a value."""
        return set(alternatives(self.type)) <= {bool, NoneType}

    @property
    def mapping(self) -> bool:
        """True if its keys are the user's own."""
        return any(get_origin(t) is dict or t is dict or get_origin(t) is Mapping for t in alternatives(self.type))

    @property
    def many(self) -> Any | None:
        """The type of its elements if it is a tuple, else None."""
        for t in alternatives(self.type):
            if get_origin(t) is tuple:
                return get_args(t)[0]
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A dataclass of options, or one nested in another."""

    key: str
    """Its dotted name, empty for the whole."""
    type: type
    """The dataclass."""
    about: str
    """The docstring under the field, or of the class for the whole."""
    optional: bool
    """True if it may be None, which switches off what it stands for."""
    on: bool
    """True unless it is None by default."""
    parts: tuple["Option | Section", ...]
    """What it holds, in the order of its fields."""
    foreign: Mapping[str, Foreign] = field(default_factory=dict)
    """Of the whole: what other libraries call its options, from the class's `foreign`; they may be written so."""

    @property
    def name(self) -> str:
        """The last part of the key: the field's name."""
        return self.key.rpartition(".")[2]

    def options(self) -> Iterator[Option]:
        """All options, those of nested sections too."""
        for part in self.parts:
            if isinstance(part, Option):
                yield part
            else:
                yield from part.options()

    def sections(self) -> Iterator["Section"]:
        """This section and all nested ones."""
        yield self
        for part in self.parts:
            if isinstance(part, Section):
                yield from part.sections()


def schema(options: type) -> Section:
    """The keys of a dataclass of options."""
    about = inspect.cleandoc(options.__doc__ or "")
    found = Section(key="", type=options, about=about, optional=False, on=True, parts=_parts(options, "", None))
    keys = {option.key for option in found.options()}
    # A name of which no option is here is not understood here.
    foreign = {f.name: f for f in getattr(options, "foreign", ()) if not f.keys or keys & set(f.keys)}
    return replace(found, foreign=foreign)


def _parts(options: type, prefix: str, instance: Any) -> tuple[Option | Section, ...]:
    """The fields of a dataclass, with the defaults of an instance of it where there is one."""
    hints, texts = get_type_hints(options), field_docs(options)
    return tuple(
        _part(f, f"{prefix}{f.name}", hints[f.name], texts.get(f.name, ""), instance) for f in fields(options) if f.init
    )


def _part(f: Field[Any], key: str, hint: Any, about: str, instance: Any) -> Option | Section:
    default = _default(f) if instance is None else getattr(instance, f.name)
    nested = [t for t in alternatives(hint) if is_dataclass(t)]
    if not nested:
        flag = f.metadata.get("flag", f.name)
        return Option(
            key=key,
            type=hint,
            default=default,
            about=about,
            flag=flag if "." in flag else key[: len(key) - len(f.name)] + flag,
            known_as=tuple(f.metadata.get("known_as", ())),
            prefixed=f.metadata.get("prefixed", {}),
            bare=bool(f.metadata.get("bare", False)),
            words=bool(f.metadata.get("words", False)),
        )
    optional = NoneType in alternatives(hint)
    if len(alternatives(hint)) > 1 + optional:
        raise TypeError(f"{key}: a section is one dataclass, or one dataclass and None, not {hint}")
    section = nested[0]
    assert isinstance(section, type)
    return Section(
        key=key,
        type=section,
        about=about or inspect.cleandoc(section.__doc__ or ""),
        optional=optional,
        on=default is not None,
        parts=_parts(section, f"{key}.", None if default is REQUIRED else default),
    )


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type there is."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def field_docs(options: type) -> dict[str, str]:
    """The string that stands under each field, those of base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__):
        if is_dataclass(base):
            texts |= _class_docs(base.__module__).get(base.__name__, {})
    return texts


@cache
def _class_docs(module: str) -> dict[str, dict[str, str]]:
    """The strings under the fields of each class of a module, which is read once: it may hold many."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for statement, below in zip(node.body, node.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return found


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}


def in_words(hint: Any) -> str:
    """What a type allows, for an error: `a number or none`, `one of sum, mean`."""
    choices = [str(value) for t in alternatives(hint) if get_origin(t) is Literal for value in get_args(t)]
    words = [f"one of {', '.join(choices)}"] if len(choices) > 1 else choices
    for t in alternatives(hint):
        if get_origin(t) is tuple:
            elements = [e for e in get_args(t) if e is not Ellipsis]
            count = "" if len(get_args(t)) > len(elements) else f"{len(elements)} times "
            words.append(f"a list of {count}{in_words(elements[0])}")
        elif get_origin(t) in (dict, Mapping) or t is dict:
            words.append("a mapping")
        elif get_origin(t) is list:
            words.append("a list")
        elif get_origin(t) is not Literal:
            words.append(_WORDS.get(t) or str(getattr(t, "__name__", t)))
    return " or ".join(words)


def nearest(key: str, section: Section, *, flags: bool = False) -> str | None:
    """The key (or flag) somebody most likely meant, or None. What is in the section that was written comes first."""
    written = key.replace("-", "_")
    names = {(o.flag if flags else o.key): o for o in section.options()}
    prefix, _, last = written.rpartition(".")
    within = {name: option for name, option in names.items() if prefix and name.startswith(f"{prefix}.")}
    everywhere = [*names, *(s.key for s in section.sections() if s.key)]
    searches = (
        lambda: _known(written, names) if prefix or written not in _last_parts(names) else None,
        lambda: _known(last, within),
        lambda: _begun(last, within),
        lambda: _close(last, within, cutoff=0.6),
        lambda: next((name for name in everywhere if name.rpartition(".")[2] == last), None),  # `lr` for `optim.lr`
        lambda: _known(last, names),
        lambda: next(iter(get_close_matches(written, everywhere, n=1, cutoff=0.7)), None),
        lambda: _close(last, everywhere, cutoff=0.7),
        lambda: next(iter(get_close_matches(written, section.foreign, n=1, cutoff=0.8)), None),
    )
    return next((found for search in searches if (found := search())), None)


def _known(written: str, names: Mapping[str, Option]) -> str | None:
    """The option among these that is known elsewhere by the written name."""
    elsewhere = [key for f in (*TRL, *VERL) if f.name == lookup(written) for key in f.keys]
    for name, option in names.items():
        if written in option.known_as:
            return name
    if "." not in written:  # the last part of verl's names
        elsewhere += [key for f in VERL if f.name.rpartition(".")[2] == written for key in f.keys]
    return next((name for key in elsewhere for name, option in names.items() if option.key == key), None)


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _begun(last: str, names: Iterable[str]) -> str | None:
    """The only name whose last part begins so: `temp` for temperature."""
    found = [name for name in names if name.rpartition(".")[2].startswith(last)]
    return found[0] if len(found) == 1 and len(last) > 2 else None


def _close(last: str, names: Iterable[str], *, cutoff: float) -> str | None:
    by_last = {name.rpartition(".")[2]: name for name in names}
    return next((by_last[found] for found in get_close_matches(last, by_last, n=1, cutoff=cutoff)), None)
