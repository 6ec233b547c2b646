"""What a command's `build` gets, and the parts that it makes a run of."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rolecall.config.parts import OptimOptions
from rolecall.policy.load import LoadedModel, save
from rolecall.policy.lora import export, has_adapter
from rolecall.policy.model import PolicyModel
from rolecall.train.learner import Learner
from rolecall.train.loop import LoopOptions
from rolecall.train.optim import make_optimizer
from rolecall.train.persist import read_checkpoint, write_checkpoint
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.train.timing import Timer


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a command's `build` makes a run of."""

    options: Any
    accelerator: Accelerator
    timer: Timer
    stack: ExitStack
    """Closes what was opened when the run ends."""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions from Python that take the place of the recipe's own: `advantage`, `loss`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A job's parts, ready to run."""

    learner: Learner
    loop: LoopOptions
    write: Callable[[Path, dict[str, Any]], None]
    """Puts all state, and the given extra, into a checkpoint's directory."""
    read: Callable[[Path], dict[str, Any]]
    """Puts it back from there, the learner's included, and returns the extra."""
    save_model: Callable[[Path], None] | None = None
    """Writes the final model; None if the job makes none."""
    module: torch.nn.Module | None = None
    """What trains; a run that diverged leaves a model only if it is finite."""
    evaluate: Callable[[int], dict[str, float]] | None = None
    """Numbers on held-out rows."""
    watch_run: Callable[[RunDir], None] = lambda run: None
    """Called with the run directory before the first step."""
    finish: Callable[[RunDir], None] = lambda run: None
    """Called with the run directory when the run is done."""
    prompts: str | None = None
    """How prompts are put to the model: chat (messages in its template) or text; None if unknown, or both."""


def prepared(module: torch.nn.Module, options: OptimOptions, accelerator: Accelerator, timer: Timer) -> Updater:
    """What trains a module: it and its optimiser, made ready for the device and the processes."""
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, options))
    return Updater(
        accelerator,
        wrapped,
        optimizer,
        token_budget=options.token_budget,
        max_grad_norm=options.max_grad_norm,
        timer=timer,
    )


def build_policy(
    learner: Learner, loop: LoopOptions, *, policy: LoadedModel, module: PolicyModel, optimizer: Any, **more: Any
) -> Built:
    """The parts of a job that trains a policy."""

    def write(directory: Path, extra: dict[str, Any]) -> None:
        state = learner.state_dict()
        write_checkpoint(directory, policy=policy, module=module, optimizer=optimizer, learner=state, extra=extra)

    def read(directory: Path) -> dict[str, Any]:
        state, extra = read_checkpoint(directory, policy=policy, module=module, optimizer=optimizer)
        learner.load_state_dict(state)
        return extra

    def save_model(directory: Path) -> None:
        (export if has_adapter(policy) else save)(policy, directory)

    return Built(learner=learner, loop=loop, write=write, read=read, save_model=save_model, module=module, **more)


def loop_options(options: Any, *, main: str, lower: bool = False) -> LoopOptions:
    """When the loop does what; `main` is the evaluation's number to maximise, or with `lower` to minimise."""
    return LoopOptions(
        steps=options.steps,
        save_every=options.save.every,
        keep=options.save.keep,
        eval_every=options.eval.every,
        main=main,
        lower=lower,
        stop_at=options.eval.stop_at,
    )
