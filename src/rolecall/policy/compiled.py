"""C files of this package, compiled once per machine by the compiler that is there, or not at all.

Without a compiler the same maths runs in torch, slower; one log line says so. $ROLECALL_KERNELS=0 turns kernels off.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

from rolecall.policy.load import cache_root

_log = logging.getLogger(__name__)

_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # Sums may be reordered, which vectors need; NaN and inf keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
)
_HEADER = Path(__file__).with_name("storage.h")
_LIBRARIES = (("-lmvec", "-lm"), ("-lm",))


def wanted() -> bool:
    """Whether kernels may be used."""
    return os.environ.get("ROLECALL_KERNELS") != "0"


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C file, or None where they cannot be had."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        _log.info("no C compiler found: going on without compiled kernels, which is slower")
        return None
    about = "\n".join([source.read_text(), _HEADER.read_text(), *_FLAGS, platform.processor(), _cpu(), compiler])
    name = f"{source.stem}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    path = cache_root() / "kernels" / name
    try:
        if not path.is_file():
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("the kernels could not be compiled, going on without them, which is slower: %s", error)
        return None


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Where a contiguous tensor's data lie."""
    return ctypes.c_void_p(tensor.data_ptr())


def _compile(compiler: str, source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        made = Path(aside) / path.name
        for libraries in _LIBRARIES:
            command = [compiler, *_FLAGS, f"-I{_HEADER.parent}", "-o", str(made), str(source), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                made.replace(path)
                return
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the compiler failed")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
