"""Loads decode.c: compiled once per machine by the C compiler that is there, or not at all.

Without a compiler the engine runs the same maths in torch, several times slower on small batches; one log line says so.
$ROLECALL_KERNELS=0 turns the kernels off.
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

import torch
from torch import Tensor

from rolecall.policy.load import cache_root

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("decode.c")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # Sums may be reordered, which vectors need; NaN and inf keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
)
_LIBRARIES = (("-lmvec", "-lm"), ("-lm",))
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Kernels:
    """The compiled functions for one storage type. Tensors must be contiguous and on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        name = _NAMES[dtype]
        self._attend, self._add_norm, self._gated, self._draw = (
            getattr(library, f"{function}_{name}") for function in ("attend", "add_norm", "gated", "draw")
        )

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, heads: int
    ) -> Tensor:
        """Rotate, store the new key and value of each row in its slot, attend. Returns [rows, heads x width]."""
        rows, (_, kv, room, width) = len(qkv), keys.shape
        out = torch.empty(rows, heads * width, dtype=qkv.dtype)
        self._attend(
            *(_pointer(t) for t in (qkv, cos, sin, keys, values, lengths, out)),
            *(ctypes.c_int64(n) for n in (rows, heads, kv, width, room)),
            ctypes.c_float(width**-0.5),
            torch.get_num_threads(),
        )
        return out

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add to x in place, and return it normed."""
        out = torch.empty_like(x)
        self._add_norm(
            _pointer(x),
            None if added is None else _pointer(added),
            _pointer(weight),
            _pointer(out),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int64(x.shape[1]),
            ctypes.c_float(eps),
            torch.get_num_threads(),
        )
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._gated(
            _pointer(gate_up), _pointer(out), ctypes.c_int64(rows), ctypes.c_int64(width), torch.get_num_threads()
        )
        return out

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs; a token is -1 where the logits are not finite."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        self._draw(
            *(_pointer(t) for t in (logits, u, tokens, logprobs)),
            ctypes.c_int64(logits.shape[0]),
            ctypes.c_int64(logits.shape[1]),
            ctypes.c_float(1.0 / temperature),
            torch.get_num_threads(),
        )
        return tokens, logprobs


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The kernels for weights of this dtype; None where there are none."""
    if dtype not in _NAMES or os.environ.get("ROLECALL_KERNELS") == "0":
        return None
    library = _library()
    return None if library is None else Kernels(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        _log.info("no C compiler found: sampling without compiled kernels, which is slower")
        return None
    about = "\n".join([_SOURCE.read_text(), *_FLAGS, platform.processor(), _cpu(), compiler])
    path = cache_root() / "kernels" / f"decode-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("the kernels could not be compiled, sampling without them, which is slower: %s", error)
        return None


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        made = Path(aside) / path.name
        for libraries in _LIBRARIES:
            command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE), *libraries]
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


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
