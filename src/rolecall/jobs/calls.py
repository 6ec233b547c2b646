"""From a call to a run: its settings, what Python gave in the place of names, and the parts it is built from."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from accelerate import Accelerator

from rolecall.config.merge import resolve
from rolecall.config.resume import saved_settings
from rolecall.errors import UserError
from rolecall.jobs.agents import EnvSource, env_label
from rolecall.jobs.data import by_name, eval_named, labelled, listed, unnamed
from rolecall.jobs.models import with_model
from rolecall.jobs.running import Built, Run, execute, unless_stopped
from rolecall.tasks.sources import RowsSource
from rolecall.train.callbacks import Given
from rolecall.train.progress import Progress
from rolecall.train.timing import Timer


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """What was given in Python; None where the options say it."""

    rows: RowsSource | None = None
    eval_data: RowsSource | None = None
    env: EnvSource | None = None
    reward: Sequence[Any] | None = None
    judge: Sequence[Any] | None = None
    advantage: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a command's `build` makes a run of."""

    options: Any
    given: Objects
    accelerator: Accelerator
    timer: Timer
    stack: ExitStack
    """Closes what was opened when the run ends."""

    @property
    def rows(self) -> Any:
        """The rows, as an object or by name."""
        return self.options.rows if self.given.rows is None else self.given.rows


def settings_and_objects(
    settings: Mapping[str, Any],
    *,
    rows: RowsSource | None = None,
    eval_data: RowsSource | None = None,
    env: EnvSource | None = None,
    reward: Any = None,
    judge: Any = None,
    **functions: Any,
) -> tuple[dict[str, Any], Objects]:
    """What a call gives by name, which are settings, and what it gives as objects."""
    rewards, judges = listed(reward), listed(judge)
    named = by_name(rows=rows, env=env, reward=rewards, judge=judges)
    objects = Objects(
        rows=unnamed(rows),
        eval_data=unnamed(eval_data),
        env=unnamed(env),
        reward=rewards or None,
        judge=judges or None,
        **functions,
    )
    return {**with_model(settings), **named, **eval_named(eval_data)}, objects


def options_of(kind: Any, settings: Mapping[str, Any], *, base: str | None = None, preset: str | None = None) -> Any:
    """The options of a call: a preset that is there without being asked for (`base`), the settings of the run that it
    resumes, a preset, and what is given, each over those before."""
    for name in (base, preset):
        if name is not None and name not in kind.presets:
            raise UserError(f"unknown preset {name!r}; choose one of {', '.join(kind.presets)}")
    layers: list[tuple[str, Any]] = [] if base is None else [(f"preset {base}", kind.presets[base])]
    if settings.get("resume"):
        layers.append(("config.json", saved_settings(settings.get("out"))))
    if preset is not None:
        layers.append((f"preset {preset}", kind.presets[preset]))
    return resolve(kind, [*layers, ("the call", settings)]).options


def train(
    kind: Any,
    settings: Mapping[str, Any],
    objects: Mapping[str, Any],
    *,
    base: str | None = None,
    preset: str | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    ends: Callable[[Run], Run] = unless_stopped,
) -> Run:
    """Run a command from Python. `objects` may be names, too; `ends` raises if what follows could not go on."""
    found, given = settings_and_objects(settings, **objects)
    options = options_of(kind, found, base=base, preset=preset)
    return ends(run(options, given, progress=progress, callbacks=callbacks))


def run(
    options: Any,
    given: Objects | None = None,
    *,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
) -> Run:
    """Run a command from its options; objects take the place of what the options name."""
    objects = given or Objects()
    if objects.env is not None:
        options = replace(options, env=env_label(objects.env))
    lists = {name: value for name in ("reward", "judge") if (value := getattr(objects, name)) is not None}
    options = labelled(options, rows=objects.rows, **lists)
    build = import_module(f"rolecall.jobs.{options.command.replace('-', '_')}").build

    def built(options: Any, accelerator: Accelerator, timer: Timer, stack: ExitStack) -> Built:
        found: Built = build(Job(options=options, given=objects, accelerator=accelerator, timer=timer, stack=stack))
        return found

    return execute(options.command, options, built, progress=progress, callbacks=callbacks)
