"""`rolecall doctor`: what looks wrong with a run."""

from pathlib import Path

from rolecall.look.doctor import Finding, findings


def doctor(run: str | Path) -> list[Finding]:
    """The findings of a run, read from its files: `doctor("runs/rl-1")`. Empty if nothing looks wrong."""
    return findings(Path(run).expanduser())
