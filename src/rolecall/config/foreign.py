"""Names that other libraries have for our options: what becomes of a setting written under one of them.

A name whose meaning is the same sets our option. A name whose meaning differs is refused, with a sentence that says what
ours is. The names themselves stand in `foreign_trl` and `foreign_verl`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any

Settings = Mapping[str, Any]
Convert = Callable[[Any, Settings], Settings]
"""(the value, all foreign settings beside it) -> values by our dotted keys. Raises `Differs`."""


class Differs(ValueError):
    """A foreign setting that has no counterpart of the same meaning: what ours is, and how it differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A setting of another library."""

    name: str
    """As that library writes it; verl's without the leading `actor_rollout_ref.`."""
    keys: tuple[str, ...]
    """Our options that it sets, or that take its place where the meaning differs."""
    convert: Convert
    same: bool = False
    """True if the value is ours unchanged, so that the command line reads it as it reads our option."""
    counts_updates: bool = False
    """True if it counts optimiser steps: of the same meaning only if a rollout takes one."""
    learned: bool = False
    """True if it changes what is learned: taken from a configuration object even where it has that library's default."""
    unused: str = ""
    """Why it has no effect here, which is said when it is given."""


def same(name: str, key: str, **more: Any) -> Foreign:
    """The same setting under another name."""
    return Foreign(name=name, keys=(key,), convert=lambda value, _: {key: value}, same=True, **more)


def made(name: str, keys: Iterable[str], convert: Convert, **more: Any) -> Foreign:
    """A setting whose value is converted."""
    return Foreign(name=name, keys=tuple(keys), convert=convert, **more)


def choice(name: str, key: str, values: Mapping[Any, Any], **more: Any) -> Foreign:
    """A setting whose values have other names: each is given as ours, as settings by key, or as `Differs`."""

    def convert(value: Any, _: Settings) -> Settings:
        if not isinstance(value, str | bool | int | float) or value not in values:
            raise Differs(f"`{key}` takes its place; of {name}'s values there are {', '.join(map(str, values))}")
        found = values[value]
        if isinstance(found, Differs):
            raise found
        return found if isinstance(found, Mapping) else {key: found}

    return Foreign(name=name, keys=(key,), convert=convert, **more)


def differs(name: str, keys: Iterable[str], sentence: str, *, off: tuple[Any, ...] = (False,)) -> Foreign:
    """A setting that is refused, unless it has a value that switches it off."""

    def convert(value: Any, _: Settings) -> Settings:
        if value in off:
            return {}
        raise Differs(sentence)

    return Foreign(name=name, keys=tuple(keys), convert=convert)


def unused(name: str, why: str, *keys: str) -> Foreign:
    """A setting without effect here, which does no harm; who gives it is told why."""
    return Foreign(name=name, keys=keys, convert=lambda value, _: {}, unused=why)


def lookup(name: str) -> str:
    """A foreign name as the tables have it."""
    return name.removeprefix("actor_rollout_ref.")


def from_object(given: Any, known: Mapping[str, Foreign]) -> tuple[dict[str, Any], list[str]]:
    """(the settings of a configuration object such as TRL's GRPOConfig, its attributes that are set and not used here).

    Taken are all that change what is learned, that library's defaults included, and of the rest those that differ from
    its defaults.
    """
    attributes, defaults = _attributes(given), _defaults(given)
    taken: dict[str, Any] = {}
    left: list[str] = []
    for name, value in attributes.items():
        if value is None or name.startswith("_"):
            continue
        changed = name not in defaults or defaults[name] != value
        if name in known and (changed or known[name].learned):
            taken[name] = value.value if isinstance(value, Enum) else value
        elif changed and name not in known:
            left.append(name)
    return taken, left


def _attributes(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if is_dataclass(given):
        return {f.name: getattr(given, f.name) for f in fields(given)}
    return dict(vars(given))


def _defaults(given: Any) -> dict[str, Any]:
    """What the attributes are in an object made without arguments, `__post_init__` and all."""
    if isinstance(given, Mapping) or not is_dataclass(given):
        return {}
    kind: Any = type(given)
    for how in ({}, {"bf16": False}):  # TRL's wants bfloat16 by default, and refuses it where there is no GPU
        try:
            return _attributes(kind(**how))
        except Exception:  # its author's: it needs an argument, or a device that is not there
            continue
    return {f.name: f.default for f in fields(given)}


_LORA = {
    "r": "policy.lora_rank",
    "lora_alpha": "policy.lora_alpha",
    "target_modules": "policy.lora_targets",
    "lora_dropout": "policy.lora_dropout",
    "use_rslora": "policy.lora_rs",
}
_LORA_SILENT = ("peft_type", "task_type", "base_model_name_or_path", "inference_mode", "peft_version", "auto_mapping")
"""Fields of a LoraConfig that say nothing about how the adapter learns."""


def from_peft(given: Any, _: Settings) -> Settings:
    """peft's LoraConfig. Its rank and alpha are taken as they are, the rest where it differs from peft's defaults."""
    if isinstance(given, str | int | NoneType) or not hasattr(given, "r"):
        raise Differs("`policy.lora_rank` and its neighbours take its place; only a peft.LoraConfig is understood")
    attributes, defaults = _attributes(given), _defaults(given)
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in ("r", "lora_alpha") or (name not in _LORA_SILENT and value != defaults.get(name)):
            if name not in _LORA:
                raise Differs(f"its `{name}` has no counterpart: there are {', '.join(_LORA.values())}")
            found[_LORA[name]] = tuple(sorted(value)) if isinstance(value, set | list | tuple) else value
    if found.get("policy.lora_targets") == "all-linear":
        del found["policy.lora_targets"]  # what an adapter is put on anyway
    return found
