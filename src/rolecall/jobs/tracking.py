"""tensorboard, trackio and wandb, which get the numbers of metrics.jsonl under the same names."""

import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from rolecall.errors import UserError
from rolecall.train import checkpoint

FOLDER = "trackers"
"""Where in a run's directory local trackers write."""


def tracker_names(options: Any) -> list[str]:
    """The trackers that the options ask for, all of them installed."""
    names = list(getattr(getattr(options, "save", None), "trackers", ()))
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"the tracker {name} is not installed: pip install 'rolecall[track]'")
    return names


def start_trackers(
    accelerator: Accelerator, options: Any, config: Mapping[str, Any], path: Path
) -> Callable[[Mapping[str, float], int], None]:
    """What logs a step's numbers. The run's directory is there already: trackers write into it."""
    if not options.save.trackers:
        return lambda metrics, step: None
    flat = {name: value for name, value, _ in checkpoint.differences(config, {})}
    plain = {name: value for name, value in flat.items() if isinstance(value, int | float | str | bool)}
    accelerator.project_configuration = ProjectConfiguration(project_dir=str(path / FOLDER))
    try:
        accelerator.init_trackers(path.name, config=plain)
    except Exception as error:  # a tracker's own: not logged in, no connection …
        if not options.resume:
            shutil.rmtree(path / FOLDER, ignore_errors=True)  # so that the same command can be tried again
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{' or '.join(options.save.trackers)} cannot start: {why}; or leave out save.trackers"
        ) from error
    return lambda metrics, step: accelerator.log(dict(metrics), step=step)
