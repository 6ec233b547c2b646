"""Weights on their way to engines in other processes: written once as safetensors, read by all of them."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rolecall.policy.sharded import whole

_PREFIX = "rolecall-"


Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter that trains over weights that stay: they are published once, and after that the adapter's own tensors."""

    base: Weights
    """By the names that an engine has for them."""
    now: Callable[[], Weights]
    """Copies of the adapter's tensors as they are at this moment."""
    merge: Callable[[Weights, Weights], Weights]
    """(base, adapter) -> what an engine loads; of a module that workers can import."""


def hold_weights(weights: Mapping[str, Tensor], dtype: torch.dtype | None, *, copy: bool = False) -> dict[str, Tensor]:
    """Weights on the CPU, in a dtype or as they are. Those in parts are gathered: all ranks ask."""
    return {name: whole(w.detach()).to("cpu", dtype or w.dtype, copy=copy).contiguous() for name, w in weights.items()}


def write_held(path: Path, held: Mapping[str, Tensor]) -> None:
    """Write weights aside, then rename the file."""
    aside = path.with_suffix(".tmp")
    save_file(dict(held), aside)
    aside.replace(path)


def own_directory(weights_bytes: int, *, inside: Path | None = None) -> Path:
    """A new directory for weights: `inside` of another; else in shared memory if three copies fit; else where temporary
    files go. What processes of this machine that were killed left there is removed."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 3 * weights_bytes
    place = inside or (shared if fits else Path(tempfile.gettempdir()))
    if inside is None:  # what is shared may be of a process on another machine
        _remove_left(place)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))


def _remove_left(place: Path) -> None:
    for left in place.glob(f"{_PREFIX}*-*"):
        number = left.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdigit() and Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)
