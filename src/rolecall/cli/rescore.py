"""`rolecall rescore` on the terminal."""

import sys
from shlex import quote

from rolecall.cli.train import display
from rolecall.config.rescore import RescoreOptions
from rolecall.jobs.rescore import run_from


def run(options: RescoreOptions) -> int:
    """Score, and say what came out and how to train on it."""
    found = run_from(options, progress=display(quiet=options.quiet))
    if not options.quiet:
        print(
            f"{found.answers} answers of {found.steps} steps: mean score {_text(found.before)} -> {_text(found.after)}"
        )
        print(f"run: {found.path}")
        print(f"train on it with: rolecall rl --from {quote(str(found.path))}")
    if found.failed:
        print(f"{found.failed} of {found.answers} rewards failed", file=sys.stderr)
    return 0


def _text(mean: float | None) -> str:
    return "none" if mean is None else f"{mean:.4f}"
