"""How a run goes on: its last good checkpoint, what changed since, and what config.json and run.json say of it."""

import json
import logging
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rolecall.files import write_atomically
from rolecall.look.run import FORMAT
from rolecall.train import checkpoint
from rolecall.train.loop import Loop
from rolecall.train.rundir import RunDir

_log = logging.getLogger("rolecall")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """How a run goes on."""

    step: int
    """Steps done."""
    changed: list[tuple[str, object, object]]
    """(setting, as it was, as it is now)."""
    bit_exact: bool
    """True if what comes is what would have come without the interruption."""


def resume(
    path: Path,
    run: RunDir | None,
    read: Callable[[Path], dict[str, Any]],
    loop: Loop,
    config: Mapping[str, Any],
    *,
    processes: int,
    strict: bool,
) -> Resumed:
    """Put the last good checkpoint back; a run that was stopped before its first one begins again.

    `read` puts the state back from a checkpoint's directory and returns its extra. With `strict` a damaged checkpoint is an
    error, even if there is a good one before it.
    """
    found = checkpoint.latest(path / "checkpoints", strict=strict, read_only=run is None)
    if found is None:
        if run is not None:
            _log.warning("%s has no checkpoint to resume from: it begins at its first step", path)
            run.cut_after(-1)
        return Resumed(step=0, changed=[], bit_exact=True)
    extra = read(found.path)
    changed = checkpoint.differences(found.config, config)
    before = int(extra.get("processes", processes))
    if before != processes:
        changed.append(("processes", before, processes))
    matter = [(name, old, new) for name, old, new in changed if _matters(name, old, new, config)]
    if processes > 1:  # sums in another order
        matter += [one for one in changed if one[0] == "train.shard" and one[1] != checkpoint.ABSENT]
    loop.load_state_dict(extra["loop"])
    if run is not None:
        for name, old, new in matter:
            _log.warning("resuming with %s changed from %s to %s: not bit-exact with the run before", name, old, new)
        run.cut_after(found.step)
    return Resumed(step=int(extra["step"]), changed=changed, bit_exact=not matter and not config.get("inflight"))


def _matters(name: str, old: object, new: object, config: Mapping[str, Any]) -> bool:
    """Whether a changed setting changes what is learned from here on."""
    if name == "epochs":
        return False  # the number of steps says it
    if old == checkpoint.ABSENT and (not new or name == "reward_deadline"):
        return False  # an option that the version before did not have, and that is not used
    if name == "steps":
        return bool(config.get("optim", {}).get("schedule", "constant") != "constant")
    if name == "eval.every":
        return bool(old) != bool(new)  # with evaluation, rows without a test split are split
    return name in ("eval.held_out", "eval.data") or not name.startswith(("save.", "store.", "eval.", "train."))


def describe(
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
    if config.get("inflight"):
        about["exact"] = "not exact: with async.inflight what is sampled depends on timing"
    write_atomically(run.config, json.dumps(config, indent=1).encode())
    write_atomically(run.run, json.dumps(about, indent=1).encode())


def note_end(run: RunDir, why: str) -> None:
    """Say in run.json that an error ended the run. It stays until the run continues."""
    with suppress(OSError):  # the disk may be what failed
        about = json.loads(run.run.read_text()) | {"ended": why}
        write_atomically(run.run, json.dumps(about, indent=1).encode())
