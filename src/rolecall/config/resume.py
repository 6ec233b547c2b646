"""The settings of a run that is to be gone on with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.files import TMP_MARK

_BEFORE_CONFIG = {".lock", "rollouts", "updates", "checkpoints", "trackers", "metrics.jsonl", "timing.jsonl"}
"""What a run's directory holds before its config.json is written."""


def saved_settings(out: str | None) -> dict[str, Any]:
    """What config.json of the run in `out` holds; nothing if the run was killed before it had one, so that it begins."""
    if out is None:
        raise UserError("resume needs out: which run?")
    path = Path(out).expanduser() / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        if _barely_begun(path.parent):
            return {}
        raise UserError(f"there is no run to resume in {out}: it has no config.json; start it without resume") from None
    except ValueError:
        raise UserError(f"{path} cannot be read; start the run again with overwrite") from None


def _barely_begun(directory: Path) -> bool:
    """Whether a directory holds nothing but what a run makes before its first step."""
    if not directory.is_dir():
        return False
    log = directory / "metrics.jsonl"
    known = all(child.name in _BEFORE_CONFIG or TMP_MARK in child.name for child in directory.iterdir())
    return known and not (log.is_file() and log.stat().st_size)


def rewritten(words: Sequence[str]) -> list[str]:
    """`--steps +500` as `--extend 500`, and `--init-from RUN` as `--model RUN`."""
    out: list[str] = []
    for word in words:
        if out and out[-1] == "--steps" and word.startswith("+"):
            out[-1:] = ["--extend", word[1:]]
        elif word.partition("=")[0] in ("--init-from", "--init_from"):
            out.append("--model" + word[len("--init-from") :])
        elif word.startswith("--steps=+"):
            out += ["--extend", word.removeprefix("--steps=+")]
        else:
            out.append(word)
    return out
