"""The training commands: progress on the terminal, a summary at the end, the exit code."""

import logging
import os
import sys
from typing import Any

from rolecall.cli.progress import Bars
from rolecall.jobs.running import Run
from rolecall.train.exit_codes import ExitCode
from rolecall.train.progress import Lines, Progress, Quiet


def sft(options: Any) -> int:
    """Run `rolecall sft`."""
    from rolecall.jobs.sft import run

    return _finish(run(options, progress=display(quiet=options.quiet)), "sft", quiet=options.quiet)


def rm(options: Any) -> int:
    """Run `rolecall rm`."""
    from rolecall.jobs.rm import run

    return _finish(run(options, progress=display(quiet=options.quiet)), "rm", quiet=options.quiet)


def rl(options: Any) -> int:
    """Run `rolecall rl`."""
    from rolecall.jobs.rl import run

    return _finish(run(options, progress=display(quiet=options.quiet)), "rl", quiet=options.quiet)


def marl(options: Any) -> int:
    """Run `rolecall marl`."""
    from rolecall.jobs.marl import run

    return _finish(run(options, progress=display(quiet=options.quiet)), "marl", quiet=options.quiet)


def display(*, quiet: bool) -> Progress:
    """Bars on a terminal, plain lines elsewhere, nothing if quiet; warnings are shown either way."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rolecall").setLevel(logging.WARNING if quiet else logging.INFO)
    if quiet:
        return Quiet()
    return Bars() if sys.stderr.isatty() else Lines()


def _finish(run: Run, command: str, *, quiet: bool) -> int:
    code = run.outcome.exit_code
    if os.environ.get("RANK", "0") != "0":  # of several processes, the first speaks
        return int(code)
    if not quiet:
        print(f"run: {run.path}")
        if code == ExitCode.DONE:
            print(f"model: {run.model}")
        if run.report.is_file():
            print(f"report: {run.report}")
        for line in run.evaluations[-1:]:
            shown = ", ".join(f"{n.removeprefix('eval_')} {v:.3f}" for n, v in line.items() if n.startswith("eval_"))
            print(f"last evaluation (step {line['step']}): {shown}")
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        print(f"go on with: rolecall {command} --out {run.path} --resume", file=sys.stderr)
    return int(code)
