"""The package's C files, compiled once per machine and kept in a directory that only its user can write to.

Without them the same maths runs in torch, slower; one log line says what is missing. $ROLECALL_KERNELS=0 turns kernels
off. $ROLECALL_MARCH compiles them for another processor than this one, such as x86-64-v3.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rolecall.policy.load import LoadError, cache_root

_log = logging.getLogger(__name__)

_FLAGS = (
    *("-O3", "-fopenmp", "-shared", "-fPIC"),
    # Sums may be reordered, which vectors need; NaN and inf keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
)
_HEADER = Path(__file__).with_name("storage.h")
_LIBRARIES = (("-lmvec", "-lm"), ("-lm",))
_STORAGE = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""How the names of C functions end, by the dtype of what they compute."""


class Kernels(ctypes.CDLL):
    """The functions of one C file. Each takes pointers, sizes, numbers and a number of threads, in this order."""

    def call(
        self,
        name: str,
        dtype: torch.dtype,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        *numbers: float,
    ) -> None:
        """Call the function for this dtype. Tensors must be contiguous and on the CPU."""
        getattr(self, f"{name}_{_STORAGE[dtype]}")(
            *[None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors],
            *map(ctypes.c_int64, sizes),
            *map(ctypes.c_float, numbers),
            torch.get_num_threads(),
        )

    def has(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the file has the function on this processor."""
        return hasattr(self, f"{name}_{_STORAGE[dtype]}")


def wanted() -> bool:
    """Whether kernels may be used."""
    return os.environ.get("ROLECALL_KERNELS") != "0"


def kernels(source: Path, dtype: torch.dtype, *tensors: Tensor) -> Kernels | None:
    """The functions of a C file, if they may be used, can be had, and fit the dtype and these tensors."""
    fit = dtype in _STORAGE and all(
        tensor.device.type == "cpu" and tensor.dtype in _STORAGE and tensor.is_contiguous() for tensor in tensors
    )
    return library(source) if fit and wanted() else None


@functools.cache
def library(source: Path) -> Kernels | None:
    """The functions of a C file, or None where they cannot be had."""
    name, target = os.environ.get("CC", "cc"), os.environ.get("ROLECALL_MARCH", "native")
    compiler = shutil.which(name)
    if compiler is None:
        _fall_back(f"no C compiler {name!r} here, install one (Debian: apt install gcc libc6-dev) or set CC")
        return None
    parts = (source.read_text(), _HEADER.read_text(), *_FLAGS, target, platform.processor(), _cpu(), compiler)
    key = f"{source.stem}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"
    try:
        directory = _directory()
        return Kernels(str(_built(directory, key) or _build(compiler, source, target, directory, key)))
    except (OSError, subprocess.SubprocessError) as error:
        _fall_back(f"{source.name} cannot be compiled or loaded ({' '.join(str(error).split())})")
        return None


def compile_to(path: Path, source: Path, *, compiler: str, target: str) -> None:
    """Compile a C file for a target of -march; raises OSError with the compiler's first complaint."""
    for libraries in _LIBRARIES:
        files = (f"-I{_HEADER.parent}", "-o", str(path), str(source))
        command = [compiler, f"-march={target}", *_FLAGS, *files, *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            return
    said = done.stderr.strip().splitlines()
    raise OSError(next((line for line in said if "error:" in line), said[0] if said else "the compiler failed"))


@functools.cache
def _fall_back(why: str) -> None:
    """Once per reason: several files may lack the same thing."""
    _log.warning("no compiled kernels, so sampling takes 1.4 to 1.8 times as long (docs/engines.md): %s", why)


@functools.cache
def _refuse(directory: Path, why: str) -> None:
    _log.warning("kernels are not kept in %s: %s", directory, why)


def _built(directory: Path, key: str) -> Path | None:
    """The library kept for a key. Its name ends in the hash of its content; one that differs is removed."""
    for path in sorted(directory.glob(f"{key}-*.so")):
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            if path.stem == f"{key}-{hashlib.sha256(path.read_bytes()).hexdigest()}":
                return path
            path.unlink()
    return None


def _build(compiler: str, source: Path, target: str, directory: Path, key: str) -> Path:
    """Compile aside and rename: whoever else builds the same sees a whole library or none."""
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        made = Path(aside) / source.stem
        compile_to(made, source, compiler=compiler, target=target)
        with made.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return made.replace(directory / f"{key}-{digest}.so")


def _directory() -> Path:
    """The first place that only this user can write to."""
    for directory in _places():
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            why = _unsafe(directory)
        except OSError as error:
            why = error.strerror or str(error)
        if why is None:
            return directory
        _refuse(directory, why)
    raise OSError("there is no safe directory to keep them in")


def _places() -> Iterator[Path]:
    """Rolecall's cache, then this user's own in the temporary directory."""
    with contextlib.suppress(LoadError):  # no home
        yield cache_root() / "kernels"
    yield Path(tempfile.gettempdir()) / f"rolecall-kernels-{os.geteuid()}"


def _unsafe(directory: Path) -> str | None:
    """Why somebody else could put a library there, or None."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}; set ROLECALL_CACHE to a directory of your own"
    if found.st_mode & 0o022:
        return "others may write to it; remove it, or chmod it to 700 after a look at what is in it"
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everybody may write to {parent}; set ROLECALL_CACHE to a directory of your own"
    if found.st_mode & 0o077:
        directory.chmod(0o700)
    return None


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
