"""The end of a training command: what it made, on the terminal, and the exit code."""

import json
import os
import sys
from shlex import quote
from textwrap import fill
from typing import Any

from rolecall.cli.progress import display as display
from rolecall.jobs.running import Run
from rolecall.train.exit_codes import ExitCode


def finish(run: Run, options: Any) -> int:
    """Say what a training command made, and how it ended."""
    code, quiet = run.outcome.exit_code, options.quiet
    if options.command == "best-of-n" and not quiet and code == ExitCode.DONE:
        _show_best(run)
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
        print(f"rolecall {options.command}: {run.outcome.reason}", file=sys.stderr)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        print(f"resume with: rolecall {options.command} --out {quote(str(run.path))} --resume", file=sys.stderr)
    return int(code)


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
