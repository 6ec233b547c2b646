"""The training commands: progress on the terminal, a summary at the end, the exit code."""

import json
import os
import sys
from shlex import quote
from textwrap import fill
from typing import Any

from rolecall.cli.progress import display
from rolecall.jobs import running
from rolecall.jobs.running import Run
from rolecall.train.exit_codes import ExitCode


def run(options: Any) -> int:
    """Run a training command: progress while it runs, then what it made."""
    command = options.command
    done = running.run(options, progress=display(quiet=options.quiet))
    if command == "best-of-n" and not options.quiet and done.outcome.exit_code == ExitCode.DONE:
        _show_best(done)
    return _finish(done, command, quiet=options.quiet)


def _show_best(done: Run) -> None:
    """The curve over n as a table."""
    from rolecall.recipes.best_of_n import ANSWERS, CURVE

    found = json.loads((done.path / CURVE).read_text())
    judged = {line["k"]: line for line in found.get("judge_of_best", [])}
    print(f"{'best of':>8}  {'score':>16}" + (f"  {'judge':>16}" if judged else "") + "  KL at most")
    for line in found["best_of"]:
        sides = [line, *([judged[line["k"]]] if line["k"] in judged else [])]
        shown = "  ".join(f"{side['mean']:8.4f} ± {side['standard_error']:.3f}" for side in sides)
        print(f"{line['k']:8d}  {shown}  {line['kl_bound']:10.2f}")
    print(f"answers: {done.path / ANSWERS}")


def _finish(run: Run, command: str, *, quiet: bool) -> int:
    code = run.outcome.exit_code
    if os.environ.get("RANK", "0") != "0":  # of several processes, the first speaks
        return int(code)
    if not quiet:
        print(f"run: {run.path}")
        if code == ExitCode.DONE and run.model.is_dir():
            print(f"model: {run.model}")
        if run.report.is_file():
            print(f"report: {run.report}")
        for line in [] if sys.stderr.isatty() else run.evaluations[-1:]:  # a terminal still shows it above
            shown = ", ".join(f"{n.removeprefix('eval_')} {v:.3f}" for n, v in line.items() if n.startswith("eval_"))
            print(fill(f"last evaluation (step {line['step']}): {shown}", 80, subsequent_indent="  "))
    elif code not in (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        print(f"rolecall {command}: {run.outcome.reason}", file=sys.stderr)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        print(f"resume with: rolecall {command} --out {quote(str(run.path))} --resume", file=sys.stderr)
    return int(code)
