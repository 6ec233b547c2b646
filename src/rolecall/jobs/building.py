"""What a command's `build` gets, and the parts that it makes a run of."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rolecall.policy.device import compile_layers, set_tf32
from rolecall.policy.load import LoadedModel, save
from rolecall.policy.lora import export, export_parts, has_adapter
from rolecall.policy.model import PolicyModel
from rolecall.policy.sharded import is_sharded
from rolecall.train.learner import Learner
from rolecall.train.loop import LoopOptions
from rolecall.train.optim import make_optimizer
from rolecall.train.parts import Parts
from rolecall.train.persist import (
    ModelFiles,
    has_parts,
    policy_files,
    read_checkpoint,
    read_parts,
    write_checkpoint,
    write_parts,
)
from rolecall.train.reference import Reference
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")


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
    save_model: Callable[..., None] | None = None
    """Writes the final model; None if the job makes none. Of a sharded one all ranks call it, others than the first
    without a directory."""
    parts: Parts | None = None
    """What lies in parts on all ranks, if anything does."""
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


def make_updater(module: torch.nn.Module, job: Job, *, reference: Reference | None = None) -> Updater:
    """What trains a module: it and its optimiser, made ready for the device and the processes, and so is the reference."""
    options, accelerator = job.options, job.accelerator
    optim, train, device = options.optim, options.train, accelerator.device
    wrapped: torch.nn.Module = module
    set_tf32(device, on=options.policy.tf32)
    if train.shard == "fsdp2":
        if train.offload and device.type == "cpu":
            _log.warning(
                "train.offload moves data from an accelerator to the host's memory: on the CPU it has no effect"
            )
        if accelerator.num_processes == 1:
            _log.info("fsdp2 with one process: its only part is the whole model")
        from rolecall.policy.sharding import mesh_of, shard

        mesh = mesh_of(device, job.stack)
        how = {"mixed_precision": options.policy.mixed_precision}
        shard(module, mesh, offload="optimizer" in train.offload, **how)
        if reference is not None and reference.frozen is not None:
            shard(reference.frozen, mesh, offload="reference" in train.offload, frozen=True, **how)
        optimizer: torch.optim.Optimizer = make_optimizer(module, optim)
    else:
        wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, optim))
        if reference is not None and reference.frozen is not None:
            reference.frozen.to(device)
        _settle(job, [module, *([] if reference is None or reference.frozen is None else [reference.frozen])])
    return Updater(
        accelerator,
        wrapped,
        optimizer,
        token_budget=optim.token_budget,
        max_grad_norm=optim.max_grad_norm,
        timer=job.timer,
    )


def shard_frozen(module: torch.nn.Module, options: Any, device: torch.device, stack: ExitStack) -> None:
    """Spread a model that only scores, such as a reward model, over the ranks of a job that shards; in place."""
    train = getattr(options, "train", None)
    if train is None or train.shard != "fsdp2":
        return
    if getattr(options, "ahead", 0):
        _log.info("async.ahead scores in parallel with training, so every process holds the whole reward model")
        return
    from rolecall.policy.sharding import mesh_of, shard

    shard(module, mesh_of(device, stack), offload="reference" in train.offload)


def _settle(job: Job, modules: list[torch.nn.Module]) -> None:
    """How these compute, where that is chosen before the first step: compiled, or off the CPU."""
    if job.options.policy.compile:
        layers = sum(compile_layers(module) for module in modules)
        _log.info("%d layers are compiled as they are first used", layers)
    elif job.accelerator.device.type != "cpu":
        with job.accelerator.autocast():
            for part in (part for module in modules for part in module.modules()):
                getattr(part, "settle", lambda **_: None)(flat=True)


def build_policy(
    learner: Learner, loop: LoopOptions, *, policy: LoadedModel, module: PolicyModel, updater: Updater, **more: Any
) -> Built:
    """The parts of a job that trains a policy."""

    def save_model(directory: Path | None) -> None:
        if is_sharded(module):
            release = getattr(getattr(learner, "engine", None), "release", lambda: None)
            release()  # nothing is sampled any more: room for a file's weights, which one process gathers
            export_parts(policy, directory)
        elif directory is not None:
            (export if has_adapter(policy) else save)(policy, directory)

    more |= {"module": module, "updater": updater, "files": policy_files(policy), "save_model": save_model}
    return build_model(learner, loop, **more)


def build_model(
    learner: Learner, loop: LoopOptions, *, module: torch.nn.Module, updater: Updater, files: ModelFiles, **more: Any
) -> Built:
    """The parts of a job that trains a model which `files` writes and reads."""
    optimizer = updater.optimizer

    def refreshed() -> Mapping[str, Any]:
        return getattr(learner, "refreshed", None) or {}

    sharded = Parts(module, optimizer, updater.ranks, refreshed)
    parts = sharded if is_sharded(module) else None

    def write(directory: Path, extra: dict[str, Any]) -> None:
        state = learner.state_dict()
        if parts is not None:
            files.about(directory)
            write_parts(directory, parts, learner=state, extra=extra)
        else:
            write_checkpoint(directory, files=files, module=module, optimizer=optimizer, learner=state, extra=extra)

    def read(directory: Path) -> dict[str, Any]:
        if has_parts(directory):
            state, extra = read_parts(directory, sharded)
        else:
            state, extra = read_checkpoint(directory, files=files, module=module, optimizer=optimizer)
        learner.load_state_dict(state)
        return extra

    return Built(learner=learner, loop=loop, write=write, read=read, module=module, parts=parts, **more)


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
