"""What every training job does around its learner: the run directory, resuming, the loop, the final model."""

import gc
import json
import logging
import platform
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from rolecall.config.merge import to_dict
from rolecall.config.parts import OptimOptions, RunOptions
from rolecall.config.preflight import check_address_space
from rolecall.errors import UserError
from rolecall.files import DiskError, write_atomically
from rolecall.jobs.notebook import spoken
from rolecall.jobs.report import report_at_the_end
from rolecall.jobs.tracking import FOLDER, start_trackers, tracker_names
from rolecall.look.inline import run_html
from rolecall.look.run import FORMAT
from rolecall.policy.load import LoadedModel, save
from rolecall.policy.lora import export, has_adapter
from rolecall.policy.model import PolicyModel
from rolecall.train import checkpoint
from rolecall.train.callbacks import Callbacks, Given, check_callbacks
from rolecall.train.exit_codes import ExitCode
from rolecall.train.jsonl import read_lines
from rolecall.train.lock import LockedError
from rolecall.train.loop import Learner, Loop, LoopOptions, Outcome
from rolecall.train.manifest import CheckpointError
from rolecall.train.optim import make_optimizer
from rolecall.train.persist import read_checkpoint, write_checkpoint
from rolecall.train.progress import Progress, Quiet
from rolecall.train.rundir import RunDir, RunDirError, check_new
from rolecall.train.state import first_non_finite
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")

_HOW = ("out", "resume", "extend", "overwrite", "quiet")
"""Options that say how a run is started, not what it is; they are not part of its configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A job's parts, ready to run."""

    learner: Learner
    loop: LoopOptions
    write: Callable[[Path, dict[str, Any]], None]
    """Puts all state, and the given extra, into a checkpoint's directory."""
    read: Callable[[Path], dict[str, Any]]
    """Puts it back from there, the learner's included, and returns the extra."""
    save_model: Callable[[Path], None] | None
    """Writes the final model; None if the job makes none."""
    is_finite: Callable[[], bool]
    """Whether all weights are."""
    evaluate: Callable[[int], dict[str, float]] | None = None
    """Numbers on held-out rows."""
    watch_run: Callable[[RunDir], None] = lambda run: None
    """Told the run directory before the first step."""
    finish: Callable[[RunDir], None] = lambda run: None
    """Told the run directory when the run is done."""
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

    return Built(
        learner=learner,
        loop=loop,
        write=write,
        read=read,
        save_model=save_model,
        is_finite=lambda: first_non_finite(dict(module.named_parameters())) is None,
        **more,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended: where it lies and what came out."""

    path: Path
    """The run's directory."""
    outcome: Outcome
    """How it ended."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl."""

    def __fspath__(self) -> str:
        """Its directory, so that a run may be given where a path may: as a model, as a reward, to a report."""
        return str(self.path)

    @property
    def model(self) -> Path:
        """The final model, which `AutoModelForCausalLM.from_pretrained` loads."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The page to look at it."""
        return self.path / "report.html"

    def __repr__(self) -> str:
        last = next((f", reward {line['reward']:.3f}" for line in reversed(self.metrics) if "reward" in line), "")
        return f"Run({str(self.path)!r}: {self.outcome.reason}{last})"

    def _repr_html_(self) -> str:
        return run_html(str(self), self.metrics, {"model": self.model, "report": self.report})

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines with evaluations, the one before the first step included."""
        return [line for line in self.metrics if any(name.startswith("eval_") for name in line)]


Build = Callable[[Any, Accelerator, Timer, ExitStack], Built]


def execute(
    command: str, options: Any, build: Build, *, progress: Progress | None = None, callbacks: Sequence[Given] = ()
) -> Run:
    """Run a job from its options: make or resume the run directory, build, loop, write the model and the report."""
    check_callbacks(callbacks)
    if options.extend:
        passes = {"epochs": None} if options.either else {}
        options = replace(options, steps=options.steps + options.extend, **passes)
    if progress is None:
        progress = Quiet() if options.quiet else spoken()
    check_address_space()
    accelerator = _accelerator(options)
    if not accelerator.is_main_process:
        progress = Quiet()
    path = _place(command, options)
    try:
        run = _execute(command, options, build, progress, accelerator, path, callbacks)
    except DiskError as error:
        raise UserError(str(error), exit_code=ExitCode.DISK) from error
    except (RunDirError, LockedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    if accelerator.is_main_process:
        report_at_the_end(run.path)
    accelerator.wait_for_everyone()  # a launcher ends all processes when one exits with an error
    accelerator.free_memory()
    gc.collect()  # wrapped models hold the process group, and hang if they outlive it
    accelerator.end_training()
    return run


def unless_failed(run: Run) -> Run:
    """The run, unless it ended with an error, which is raised."""
    if run.outcome.exit_code == ExitCode.ERROR:
        raise UserError(f"{run.outcome.reason}; the run is in {run.path}", exit_code=ExitCode.ERROR)
    return run


def unless_stopped(run: Run) -> Run:
    """The run, unless an error, Ctrl-C or SIGTERM ended it: then the script ends too, since what follows expects a trained
    model."""
    code = unless_failed(run).outcome.exit_code
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt(f"{run.outcome.reason}; go on with out={str(run.path)!r}, resume=True")
    if code == ExitCode.TERMINATED:
        raise SystemExit(int(code))
    return run


def _execute(
    command: str,
    options: Any,
    build: Build,
    progress: Progress,
    accelerator: Accelerator,
    path: Path,
    callbacks: Sequence[Given],
) -> Run:
    with ExitStack() as stack:
        timer = Timer(watcher=progress)
        # The directory is made, or an old run removed, only when rows, rewards and models have been found good.
        check_new(path.parent, path.name, resume=options.resume, overwrite=options.overwrite)
        built = build(options, accelerator, timer, stack)
        config = configuration(options)
        if "steps" in config:
            config["steps"] = built.loop.steps  # those of `epochs`, now that the rows are known
        run = None
        if accelerator.is_main_process:
            run = stack.enter_context(_open(command, options, path))
            path = run.path
        if run is not None:
            built.watch_run(run)
        log = start_trackers(accelerator, options, config, path)
        called = Callbacks(callbacks if run is not None else (), path=path, steps=built.loop.steps)
        loop = Loop(
            built.learner,
            built.loop,
            run=run,
            config=config,
            write=built.write,
            evaluate=built.evaluate,
            progress=progress,
            timer=timer,
            agree=lambda flag: _largest(accelerator, flag),
            log=log,
            callbacks=called,
        )
        resumed = _resume(path, run, built, loop, config) if options.resume else None
        if run is not None:
            _describe(run, command, config, resumed, processes=accelerator.num_processes, prompts=built.prompts)
        start = 0 if resumed is None else resumed.step
        outcome = loop.go(start=start, title=f"{command} in {path}")
        if run is not None and _has_result(outcome, built):
            if built.save_model is not None:
                _write_model(run, built.save_model)
            built.finish(run)
        outcome = loop.tell_end(outcome)
        lines = read_lines(run.metrics.path) if run is not None else []
        return Run(path=path, outcome=outcome, metrics=list(lines))


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


def _has_result(outcome: Outcome, built: Built) -> bool:
    """A run that is done, or that diverged with weights that are still good."""
    if outcome.exit_code is ExitCode.DIVERGED:
        return built.is_finite()
    return outcome.exit_code is ExitCode.DONE


def configuration(options: Any) -> dict[str, Any]:
    """What a run is, as config.json holds it."""
    return {name: value for name, value in to_dict(options).items() if name not in _HOW}


def _accelerator(options: RunOptions) -> Accelerator:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but torch finds no GPU; use --device cpu")
    trackers = tracker_names(options)
    precision = getattr(getattr(options, "policy", None), "mixed_precision", "no")
    # Accelerate keeps the first run's precision for the whole process; each run has its own.
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=options.device == "cpu",
        mixed_precision=precision,
        log_with=trackers or None,
        project_dir=FOLDER if trackers else None,  # `start_trackers` says where it really is, once the run has a place
    )


def _place(command: str, options: RunOptions) -> Path:
    return next_free(command) if options.out is None else Path(options.out).expanduser()


def next_free(command: str) -> Path:
    """runs/COMMAND-NUMBER with the first number that is not taken."""
    number = 1
    while (Path("runs") / f"{command}-{number}").exists():
        number += 1
    return Path("runs") / f"{command}-{number}"


def _open(command: str, options: RunOptions, path: Path) -> RunDir:
    """The run's directory. If its name is one of ours and another job took it in the meantime, the next free one."""
    while True:
        try:
            return RunDir(path.parent, path.name, resume=options.resume, overwrite=options.overwrite)
        except (RunDirError, LockedError):
            if options.out is not None or not path.exists():
                raise
            path = next_free(command)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """How a run goes on."""

    step: int
    """Steps done."""
    changed: list[tuple[str, object, object]]
    """(setting, as it was, as it is now)."""
    bit_exact: bool
    """True if what comes is what would have come without the interruption."""


def _resume(path: Path, run: RunDir | None, built: Built, loop: Loop, config: Mapping[str, Any]) -> Resumed:
    """Put the last good checkpoint back; a run that was stopped before its first one begins again."""
    found = checkpoint.latest(path / "checkpoints", read_only=run is None)
    if found is None:
        _log.warning("%s has no checkpoint to resume from: it begins again at its first step", path)
        if run is not None:
            run.cut_after(-1)
        return Resumed(step=0, changed=[], bit_exact=True)
    changed = checkpoint.differences(found.config, config)
    matter = [(name, old, new) for name, old, new in changed if _matters(name, old, new, config)]
    for name, old, new in matter:
        _log.warning("resuming with %s changed from %s to %s: not bit-exact with the run before", name, old, new)
    extra = built.read(found.path)
    loop.load_state_dict(extra["loop"])
    if run is not None:
        run.cut_after(found.step)
    return Resumed(step=int(extra["step"]), changed=changed, bit_exact=not matter)


def _matters(name: str, old: object, new: object, config: Mapping[str, Any]) -> bool:
    """Whether a changed setting changes what is learned from here on."""
    if name == "epochs":
        return False  # the number of steps says it
    if name == "steps":
        return bool(config.get("optim", {}).get("schedule", "constant") != "constant")
    if name == "eval.every":
        return bool(old) != bool(new)  # with evaluation, rows without a test split are split
    return name in ("eval.held_out", "eval.data") or not name.startswith(("save.", "eval."))


def _describe(
    run: RunDir,
    command: str,
    config: Mapping[str, Any],
    resumed: Resumed | None,
    *,
    processes: int,
    prompts: str | None,
) -> None:
    """config.json and run.json."""
    history = json.loads(run.run.read_text()).get("resumed", []) if run.run.is_file() else []
    if resumed is not None:
        history.append({"step": resumed.step, "changed": resumed.changed, "bit_exact": resumed.bit_exact})
    about = {
        "format": FORMAT,
        "command": command,
        "arguments": sys.argv[1:],
        "seed": config.get("seed"),
        "prompts": prompts,
        "versions": {name: version(name) for name in ("rolecall", "torch", "transformers", "accelerate")},
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "resumed": history,
    }
    write_atomically(run.config, json.dumps(config, indent=1).encode())
    write_atomically(run.run, json.dumps(about, indent=1).encode())


def _write_model(run: RunDir, save_model: Callable[[Path], None]) -> None:
    """The final model, written aside and then renamed."""
    aside = run.path / f"model.tmp-{uuid.uuid4().hex[:8]}"
    save_model(aside)
    shutil.rmtree(run.model, ignore_errors=True)
    aside.replace(run.model)


def _largest(accelerator: Accelerator, flag: float) -> float:
    if accelerator.num_processes == 1:
        return flag
    gathered = accelerator.gather(torch.tensor([flag], device=accelerator.device))
    assert isinstance(gathered, torch.Tensor)
    return float(gathered.max())
