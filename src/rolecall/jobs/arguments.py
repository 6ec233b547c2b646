"""From the arguments of a call in Python to settings: objects in the place of names, and TRL's names of arguments."""

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike, fspath
from typing import Any

from rolecall.agents.adapters import SeveralEnvs, ToolsEnv, TRLEnv
from rolecall.agents.programs import PREFIX, Program
from rolecall.config.agents import AgentOptions
from rolecall.config.given import GivenObject
from rolecall.config.merge import ARGUMENTS, SAVED, preset_layer, resolve
from rolecall.config.resume import saved_settings
from rolecall.errors import UserError
from rolecall.rewards.sources import Named, name_of
from rolecall.tasks.rows import holds_splits, rows_of_columns

TRL_ARGUMENTS = {
    "train_dataset": "rows",
    "eval_dataset": "eval_data",
    "reward_funcs": "reward",
    "environment_factory": "env",
    "processing_class": "tokenizer",
}
"""TRL's names of arguments that may be objects."""


def options_of(kind: Any, arguments: Mapping[str, Any], *, base: str | None = None, preset: str | None = None) -> Any:
    """The options of a call: a preset that is there without being asked for (`base`), the settings of the run that it
    resumes, a preset, and what is given, each over those before."""
    settings = settings_of(arguments)
    layers: list[tuple[str, Any]] = [] if base is None else [preset_layer(kind, base)]
    if settings.get("resume"):
        layers.append((SAVED, saved_settings(settings.get("out"))))
    if preset is not None:
        layers.append(preset_layer(kind, preset))
    return resolve(kind, [*layers, (ARGUMENTS, settings)]).options


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call, in which objects stand as `GivenObject`. An argument that is None is not given."""
    found = dict(arguments)
    for name, ours in TRL_ARGUMENTS.items():
        if name in found:
            value = found.pop(name)
            if found.get(ours) is not None:
                raise UserError(f"`{name}` is `{ours}` under another name; keep one")
            found[ours] = value
    if found.get("agent") is not None and not isinstance(found["agent"], Mapping | AgentOptions):
        if found.get("env") is not None:
            raise UserError("`agent` is a program that plays episodes itself, and there is `env`: give one of them")
        program = found.pop("agent")
        found["env"] = f"{PREFIX}{program}" if isinstance(program, str) else Program(program)
    if isinstance(found.get("env"), Mapping) and found.get("rows") is None:
        raise UserError("several environments need rows whose `environment` names the one to play: give `rows`")
    if found.get("tools"):
        found = _with_tools(found)
    elif isinstance(found.get("env"), Mapping):
        found["env"] = _several(found["env"])
    wrap = {"rows": _rows, "eval_data": _rows, "env": _env, "reward": _rewards, "judge": _rewards}
    for name, wrapped in wrap.items():
        value = found.pop(name, None)
        if value is not None and (given := wrapped(value)) != ():
            found["eval.data" if name == "eval_data" else name] = given
    if isinstance(found.get("lessons"), Mapping):
        found |= {f"lessons.{name}": value for name, value in found.pop("lessons").items()}
    if callable(found.get("lessons.by")):
        found["lessons.by"] = GivenObject(name_of(found["lessons.by"]), found["lessons.by"])
    return _with_model(found)


def _rows(given: Any) -> str:
    if isinstance(given, str | PathLike):
        return fspath(given)
    if type(given) is dict and not holds_splits(given):
        given = rows_of_columns(given)
    if isinstance(given, Mapping):
        return GivenObject(f"splits {', '.join(map(str, given))}", given)
    return GivenObject(f"{len(given)} rows" if hasattr(given, "__len__") else "a stream", given)


def _env(given: Any) -> str:
    if isinstance(given, Program):
        return GivenObject(f"agent {given.name}", given)
    return given if isinstance(given, str) else GivenObject(getattr(given, "__name__", type(given).__name__), given)


def _rewards(given: Any) -> tuple[str, ...]:
    """One, several or none; of a mapping, what it names."""
    if isinstance(given, Mapping):
        return tuple(GivenObject(str(name), Named(name=str(name), source=source)) for name, source in given.items())
    several = given if isinstance(given, list | tuple) else [given]
    return tuple(
        fspath(one)
        if isinstance(one, str | PathLike)
        else GivenObject(one.name if isinstance(one, Named) else name_of(one), one)
        for one in several
    )


def _with_model(found: dict[str, Any]) -> dict[str, Any]:
    """The settings with a model object, and its tokenizer, in the place of the model's name."""
    model, tokenizer = found.get("model"), found.pop("tokenizer", None)
    if model is None or isinstance(model, str | PathLike):
        if tokenizer is not None:
            raise UserError("tokenizer goes with a model object: a model given by name brings its own, leave it out")
        return found
    if isinstance(model, tuple | list) and len(model) == 2 and tokenizer is None:
        model, tokenizer = model
    if tokenizer is None:
        raise UserError(
            f"model is a {type(model).__name__} without a tokenizer: give model=..., tokenizer=..., or a model's name"
        )
    return {**found, "model": GivenObject(type(model).__name__, (model, tokenizer))}


def _with_tools(found: dict[str, Any]) -> dict[str, Any]:
    """Functions that the policy may call are an environment, or beside a class of TRL's kind more tools of it."""
    tools, factory = found.pop("tools"), found.get("env")
    if not isinstance(factory, Mapping | None) and (not isinstance(factory, type) or hasattr(factory, "step")):
        raise UserError("`tools` go with a class as TRL's `environment_factory` takes it; make them part of this `env`")
    functions = list(tools) if isinstance(tools, list | tuple) else [tools]
    for function in functions:
        if not callable(function) or isinstance(function, type):
            raise UserError(f"tools are functions, as in tools=[add], got {function!r:.60}")
    if found.get("reward") is None and factory is None:
        raise UserError("`tools` say nothing of what an episode is worth: give a `reward` function, too")
    named: dict[str, Callable[..., Any]] = {name_of(function): function for function in functions}
    if isinstance(factory, Mapping):
        return {**found, "env": _several(factory, named)}
    env: Any = partial(ToolsEnv, named) if factory is None else partial(TRLEnv, factory, named)
    env.__name__ = f"tools {', '.join(named)}"  # what config.json says
    return {**found, "env": env}


def _several(factories: Mapping[str, Any], tools: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Environments by name are one in which rows choose."""
    wrong = [name for name, factory in factories.items() if not callable(factory)]
    if wrong or not factories:
        raise UserError(
            f"several environments are classes by name, as in {{'game': Game}}: {wrong[0]!r} is none"
            if wrong
            else "`env` is an empty mapping: name an environment"
        )
    env: Any = partial(SeveralEnvs, dict(factories), tools)
    env.__name__ = f"environments {', '.join(factories)}"
    return env
