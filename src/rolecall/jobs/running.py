"""One way from a call to a run: its options, the parts its command builds, the run directory, the loop, the final model."""

import gc
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from rolecall.config.merge import to_dict
from rolecall.config.parts import RunOptions
from rolecall.config.preflight import check_address_space
from rolecall.errors import UserError
from rolecall.files import TMP_MARK, DiskError, fsync_path
from rolecall.jobs.arguments import options_of
from rolecall.jobs.building import Built, Job
from rolecall.jobs.notebook import spoken
from rolecall.jobs.report import report_at_the_end
from rolecall.jobs.resuming import describe, note_end, resume
from rolecall.jobs.tracking import FOLDER, start_trackers, tracker_names
from rolecall.jobs.view import check_view, view_beside
from rolecall.look.inline import run_html
from rolecall.policy.device import open_device
from rolecall.train.callbacks import Callbacks, Given, check_callbacks
from rolecall.train.exit_codes import ExitCode
from rolecall.train.jsonl import read_lines
from rolecall.train.lock import LockedError
from rolecall.train.loop import Loop, Outcome
from rolecall.train.manifest import CheckpointError, DamagedCheckpointError, seal_model
from rolecall.train.peers import PATIENCE, PeerLost, Peers, code_hash, join, open_sockets, refuse_accelerate
from rolecall.train.progress import Progress, Quiet
from rolecall.train.rundir import RunDir, RunDirError, check_new, disk_errors
from rolecall.train.state import first_non_finite
from rolecall.train.timing import Timer

_log = logging.getLogger("rolecall")

_HOW = ("out", "resume", "extend", "strict", "overwrite", "grace", "rank_timeout", "view", "quiet")
"""Options that say how a run is started, not what it is; they are not part of its configuration."""


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


def train(
    kind: Any,
    arguments: Mapping[str, Any],
    *,
    base: str | None = None,
    preset: str | None = None,
    stops: bool = True,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    functions: Mapping[str, Any] | None = None,
) -> Run:
    """Run a command from Python.

    One that Ctrl-C or SIGTERM ended ends the script too if it `stops`: what follows expects a trained model.
    """
    options = options_of(kind, arguments, base=base, preset=preset)
    ended = run(options, progress=progress, callbacks=callbacks, functions=functions)
    return unless_stopped(ended) if stops else unless_failed(ended)


def unless_failed(run: Run) -> Run:
    """The run, unless it ended with an error, which is raised."""
    if run.outcome.exit_code == ExitCode.ERROR:
        raise UserError(f"{run.outcome.reason}; the run is in {run.path}", exit_code=ExitCode.ERROR)
    return run


def unless_stopped(run: Run) -> Run:
    """The run, unless an error, Ctrl-C or SIGTERM ended it: then the script ends too."""
    code = unless_failed(run).outcome.exit_code
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt(f"{run.outcome.reason}; resume with out={str(run.path)!r}, resume=True")
    if code == ExitCode.TERMINATED:
        raise SystemExit(int(code))
    return run


def run(
    options: Any,
    *,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    functions: Mapping[str, Any] | None = None,
    build: Callable[[Job], Built] | None = None,
) -> Run:
    """Run a command from its options: make or resume the run directory, build, loop, write the model and the report.

    `build` makes the run's parts; that of the command's own module if not given.
    """
    check_callbacks(callbacks)
    if progress is None:
        progress = Quiet() if options.quiet else spoken()
    options = _as_started(options)
    with _processes(options) as (accelerator, peers):
        if not accelerator.is_main_process:
            progress = Quiet()
        with ExitStack() as stack:
            timer = Timer(watcher=progress)
            job = Job(options=options, accelerator=accelerator, timer=timer, stack=stack, functions=functions or {})
            build = build or import_module(f"rolecall.jobs.{options.command.replace('-', '_')}").build
            started = _start(job, build, progress, peers, callbacks)
            outcome = started.loop.go(start=started.step, title=f"{options.command} in {started.path}")
            ended = _finish(started, outcome)
        del job, started  # wrapped models hold the process group, and hang if they outlive it
        if accelerator.is_main_process:
            report_at_the_end(ended.path)
        if ended.outcome.dropped:
            peers.leave(ended.outcome.exit_code, ended.outcome.reason)
        else:
            accelerator.wait_for_everyone()  # a launcher ends all processes when one exits with an error
    return ended


def _as_started(options: Any) -> Any:
    """The options of this start, once what it needs is known to be there."""
    if options.view:
        check_view()
    if options.extend:
        passes = {"epochs": None} if options.either else {}
        options = replace(options, steps=options.steps + options.extend, **passes)
    check_address_space()
    refuse_accelerate()
    options = replace(options, device=open_device("cpu" if options.command == "marl" else options.device))
    if options.device == "cpu" and getattr(getattr(options, "train", None), "shard", None) == "fsdp2":
        from rolecall.policy.sharding import give_back_memory

        give_back_memory()
    return options


@contextmanager
def _processes(options: Any) -> Iterator[tuple[Accelerator, Peers]]:
    """The processes of the job, joined; when one fails, the others are told why."""
    store = join(options.rank_timeout)
    before = open_sockets()
    accelerator = _accelerator(options, store)
    peers = Peers(
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        timeout=options.rank_timeout,
        sockets=open_sockets() - before,
    )
    try:
        yield accelerator, peers
    except BaseException as error:
        shown = _in_words(error, peers)
        peers.leave(getattr(shown, "exit_code", ExitCode.ERROR), str(shown) or type(error).__name__)
        if shown is error:
            raise
        raise shown from error
    peers.close()
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """A run that is ready to go."""

    loop: Loop
    built: Built
    path: Path
    step: int
    """Steps that are done."""


def _start(
    job: Job, build: Callable[[Job], Built], progress: Progress, peers: Peers, callbacks: Sequence[Given]
) -> _Started:
    """Build the run's parts, make or open its directory, and go back to its last checkpoint if it is resumed."""
    options, accelerator = job.options, job.accelerator
    command, processes = options.command, accelerator.num_processes
    path = next_free(command) if options.out is None else Path(options.out).expanduser()
    # The directory is made, or an old run removed, only when rows, rewards and models have been found good.
    check_new(path.parent, path.name, resume=options.resume, overwrite=options.overwrite)
    _check_peers(peers, options, processes)
    built = build(job)
    config = configuration(options)
    if "steps" in config:
        config["steps"] = built.loop.steps  # those of `epochs`, now that the rows are known
    run = None
    if accelerator.is_main_process:
        run = job.stack.enter_context(_open(options, path))
        path = run.path
        job.stack.enter_context(disk_errors(path))
        built.watch_run(run)
        if options.view:
            job.stack.enter_context(view_beside(path, _log.warning if isinstance(progress, Quiet) else progress.say))
    if built.parts is not None:
        built.parts.check_seen(None if run is None else run.path)
    loop = Loop(
        built.learner,
        built.loop,
        run=run,
        config=config,
        write=lambda directory, extra: built.write(directory, extra | {"processes": processes}),
        evaluate=built.evaluate,
        progress=progress,
        timer=job.timer,
        agree=lambda flag: _largest(accelerator, flag),
        log=start_trackers(accelerator, options, config, path),
        callbacks=Callbacks(callbacks if run is not None else (), path=path, steps=built.loop.steps),
        updater=getattr(built.learner, "updater", None),
        peers=peers,
        parts=built.parts,
        grace=options.grace,
    )
    resumed = None
    if options.resume:
        resumed = resume(path, run, built.read, loop, config, processes=processes, strict=options.strict)
    if run is not None:
        describe(run, command, config, resumed, processes=processes, prompts=built.prompts)
        job.stack.push(partial(_note_error, run))
    start = 0 if resumed is None else resumed.step
    _check_start(accelerator, start, path)
    return _Started(loop=loop, built=built, path=path, step=start)


def _finish(started: _Started, outcome: Outcome) -> Run:
    """Write the final model and what else the job leaves."""
    loop, built, run = started.loop, started.built, started.loop.run
    if _has_result(outcome, built, loop.agree):
        if run is not None:
            if built.save_model is not None:
                _write_model(run, outcome.step, built.save_model)
            built.finish(run)
        elif built.parts is not None and built.save_model is not None:
            built.save_model(None)
    outcome = loop.notify_end(outcome)
    if run is not None and outcome.exit_code in (ExitCode.ERROR, ExitCode.DISK, ExitCode.RETRY):
        note_end(run, outcome.reason)
    lines = read_lines(run.metrics.path) if run is not None else []
    return Run(path=started.path, outcome=outcome, metrics=list(lines))


def _note_error(run: RunDir, kind: object, error: BaseException | None, trace: object) -> None:
    """What to do at the end of the block that works on a run: an error is noted in its run.json."""
    if error is not None:
        note_end(run, str(error) or type(error).__name__)


def _check_peers(peers: Peers, options: Any, processes: int) -> None:
    """All processes of the job run the same code with the same settings; from here on they watch each other."""
    alike = {"command": options.command, "rolecall version": version("rolecall"), "torch version": version("torch")}
    alike["rolecall code (sha256)"] = code_hash() if processes > 1 else ""
    peers.check_same(alike | {n: v for n, v in to_dict(options).items() if n != "quiet"})
    peers.watch()


def _in_words(error: BaseException, peers: Peers) -> BaseException:
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


def _has_result(outcome: Outcome, built: Built, agree: Callable[[float], float]) -> bool:
    """A run that is done, or that diverged with weights that are still good."""
    if outcome.exit_code is ExitCode.DIVERGED:
        bad = built.module is not None and first_non_finite(dict(built.module.named_parameters())) is not None
        return not (agree(float(bad)) if built.parts is not None else bad)
    return outcome.exit_code is ExitCode.DONE


def configuration(options: Any) -> dict[str, Any]:
    """What a run is, as config.json holds it."""
    return {name: value for name, value in to_dict(options).items() if name not in _HOW}


def _accelerator(options: RunOptions, store: Any) -> Accelerator:
    trackers = tracker_names(options)
    precision = getattr(getattr(options, "policy", None), "mixed_precision", "no")
    # Accelerate keeps the first run's precision and device for the whole process; each run has its own.
    known = PartialState._shared_state.get("device")
    moved = known is not None and known.type != torch.device(options.device).type
    AcceleratorState._reset_state(reset_partial_state=moved or store is not None)
    if store is not None:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        how: dict[str, Any] = {"store": store, "rank": rank, "world_size": count, "timeout": PATIENCE}
        kind = torch.device(options.device).type
        train: Any = getattr(options, "train", None)
        if kind != "cpu" and train is not None and train.offload:  # parts on the host are exchanged, too
            how["backend"] = f"{kind}:{torch.distributed.get_default_backend_for_device(kind)},cpu:gloo"
        PartialState(cpu=options.device == "cpu", **how)
    return Accelerator(
        cpu=options.device == "cpu",
        mixed_precision=precision,
        log_with=trackers or None,
        project_dir=FOLDER if trackers else None,  # `start_trackers` says where it really is, once the run has a place
    )


def next_free(command: str) -> Path:
    """runs/COMMAND-NUMBER with the first number that is not taken."""
    number = 1
    while (Path("runs") / f"{command}-{number}").exists():
        number += 1
    return Path("runs") / f"{command}-{number}"


def _open(options: RunOptions, path: Path) -> RunDir:
    """The run's directory. If its name is one of ours and another job took it in the meantime, the next free one."""
    while True:
        try:
            return RunDir(path.parent, path.name, resume=options.resume, overwrite=options.overwrite)
        except (RunDirError, LockedError):
            if options.out is not None or not path.exists():
                raise
            path = next_free(options.command)


def _write_model(run: RunDir, step: int, save_model: Callable[..., None]) -> None:
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
