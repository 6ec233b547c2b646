"""What every training job does around its learner: the run directory, resuming, the loop, the final model."""

import gc
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

from rolecall.config.merge import to_dict
from rolecall.config.parts import OptimOptions, RunOptions
from rolecall.config.preflight import check_address_space
from rolecall.errors import UserError
from rolecall.files import TMP_MARK, DiskError, fsync_path
from rolecall.jobs.notebook import spoken
from rolecall.jobs.report import report_at_the_end
from rolecall.jobs.resuming import describe, resume
from rolecall.jobs.tracking import FOLDER, start_trackers, tracker_names
from rolecall.look.inline import run_html
from rolecall.policy.load import LoadedModel, save
from rolecall.policy.lora import export, has_adapter
from rolecall.policy.model import PolicyModel
from rolecall.train.callbacks import Callbacks, Given, check_callbacks
from rolecall.train.exit_codes import ExitCode
from rolecall.train.jsonl import read_lines
from rolecall.train.learner import Learner
from rolecall.train.lock import LockedError
from rolecall.train.loop import Loop, LoopOptions, Outcome
from rolecall.train.manifest import CheckpointError, DamagedCheckpointError, seal_model
from rolecall.train.optim import make_optimizer
from rolecall.train.peers import PeerLost, Peers, open_sockets
from rolecall.train.persist import read_checkpoint, write_checkpoint
from rolecall.train.progress import Progress, Quiet
from rolecall.train.rundir import RunDir, RunDirError, check_new, disk_errors
from rolecall.train.state import first_non_finite
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

_HOW = ("out", "resume", "extend", "strict", "overwrite", "grace", "rank_timeout", "quiet")
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
    before = open_sockets()
    accelerator = _accelerator(options)
    peers = Peers(
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        timeout=options.rank_timeout,
        sockets=open_sockets() - before,
    )
    if not accelerator.is_main_process:
        progress = Quiet()
    path = _place(command, options)
    try:
        run = _execute(command, options, build, progress, accelerator, peers, path, callbacks)
        if accelerator.is_main_process:
            report_at_the_end(run.path)
        if run.outcome.dropped:
            peers.leave(run.outcome.exit_code, run.outcome.reason)
        else:
            accelerator.wait_for_everyone()  # a launcher ends all processes when one exits with an error
    except BaseException as error:
        told = _told(error, peers)
        peers.leave(getattr(told, "exit_code", ExitCode.ERROR), str(told) or type(error).__name__)
        if told is error:
            raise
        raise told from error
    peers.close()
    accelerator.free_memory()
    gc.collect()  # wrapped models hold the process group, and hang if they outlive it
    accelerator.end_training()
    return run


def _told(error: BaseException, peers: Peers) -> BaseException:
    """The error in the words of the person who started the run, if it is one that has a name."""
    if isinstance(error, DiskError):
        return UserError(str(error), exit_code=ExitCode.DISK)
    if isinstance(error, RunDirError | LockedError | CheckpointError):
        damaged = isinstance(error, DamagedCheckpointError)
        return UserError(str(error), exit_code=ExitCode.ERROR if damaged else ExitCode.USAGE)
    if isinstance(error, UserError) or not isinstance(error, Exception):
        return error
    lost = peers.why(error)
    return error if lost is None else PeerLost(f"{lost}; the same command may succeed")


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
        raise KeyboardInterrupt(f"{run.outcome.reason}; resume with out={str(run.path)!r}, resume=True")
    if code == ExitCode.TERMINATED:
        raise SystemExit(int(code))
    return run


def _execute(
    command: str,
    options: Any,
    build: Build,
    progress: Progress,
    accelerator: Accelerator,
    peers: Peers,
    path: Path,
    callbacks: Sequence[Given],
) -> Run:
    processes = accelerator.num_processes
    with ExitStack() as stack:
        timer = Timer(watcher=progress)
        # The directory is made, or an old run removed, only when rows, rewards and models have been found good.
        check_new(path.parent, path.name, resume=options.resume, overwrite=options.overwrite)
        alike = {"command": command, "rolecall version": version("rolecall"), "torch version": version("torch")}
        peers.check_same(alike | {n: v for n, v in to_dict(options).items() if n != "quiet"})
        peers.watch()
        built = build(options, accelerator, timer, stack)
        config = configuration(options)
        if "steps" in config:
            config["steps"] = built.loop.steps  # those of `epochs`, now that the rows are known
        run = None
        if accelerator.is_main_process:
            run = stack.enter_context(_open(command, options, path))
            path = run.path
            stack.enter_context(disk_errors(path))
            built.watch_run(run)
        log = start_trackers(accelerator, options, config, path)
        called = Callbacks(callbacks if run is not None else (), path=path, steps=built.loop.steps)
        loop = Loop(
            built.learner,
            built.loop,
            run=run,
            config=config,
            write=lambda directory, extra: built.write(directory, extra | {"processes": processes}),
            evaluate=built.evaluate,
            progress=progress,
            timer=timer,
            agree=lambda flag: _largest(accelerator, flag),
            log=log,
            callbacks=called,
            updater=getattr(built.learner, "updater", None),
            peers=peers,
            grace=options.grace,
        )
        resumed = None
        if options.resume:
            resumed = resume(path, run, built.read, loop, config, processes=processes, strict=options.strict)
        if run is not None:
            describe(run, command, config, resumed, processes=processes, prompts=built.prompts)
        start = 0 if resumed is None else resumed.step
        _check_start(accelerator, start, path)
        outcome = loop.go(start=start, title=f"{command} in {path}")
        if run is not None and _has_result(outcome, built):
            if built.save_model is not None:
                _write_model(run, outcome.step, built.save_model)
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
    patience = InitProcessGroupKwargs(
        timeout=timedelta(days=1)
    )  # `Peers` notices who is lost; a slow peer is waited for
    precision = getattr(getattr(options, "policy", None), "mixed_precision", "no")
    # Accelerate keeps the first run's precision for the whole process; each run has its own.
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=options.device == "cpu",
        mixed_precision=precision,
        log_with=trackers or None,
        kwargs_handlers=[patience] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
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


def _write_model(run: RunDir, step: int, save_model: Callable[[Path], None]) -> None:
    """The final model with its manifest, written aside and then renamed."""
    aside = run.path / f"model{TMP_MARK}{uuid.uuid4().hex[:8]}"
    try:
        save_model(aside)
        seal_model(aside, step)
        shutil.rmtree(run.model, ignore_errors=True)
        aside.replace(run.model)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_path(run.path)


def _check_start(accelerator: Accelerator, start: int, path: Path) -> None:
    """Refuse to go on if the ranks found different checkpoints, as they may without a common file system."""
    most, least = int(_largest(accelerator, start)), -int(_largest(accelerator, -start))
    if most != least:
        raise UserError(
            f"the processes of this job found different checkpoints in {path}, of step {least} and of step {most}: it must "
            "be one directory that all of them see"
        )


def _largest(accelerator: Accelerator, flag: float) -> float:
    if accelerator.num_processes == 1:
        return flag
    gathered = accelerator.gather(torch.tensor([flag], device=accelerator.device))
    assert isinstance(gathered, torch.Tensor)
    return float(gathered.max())
