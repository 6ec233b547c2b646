"""What a bug report needs to say about the machine. No names, no paths of the user's."""

import os
import platform
import re
import sys
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path

import rolecall

_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "pyarrow", "pydantic", "gguf")
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "OMP_PROC_BIND", "MALLOC_ARENA_MAX", "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED",
)  # fmt: skip
_OWN_EXTRAS = ("dev", "mutate")
"""Extras for working on rolecall itself."""


def environment() -> dict[str, str]:
    """Facts by name, in the order to show them."""
    facts = {
        "rolecall": rolecall.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
    }
    facts |= {name: _version(name) or "not installed" for name in _PACKAGES}
    facts |= _cpu() | {"memory": _memory(), "allocator": _allocator()} | _torch()
    set_ = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    facts["variables"] = " ".join(set_) or "none of those that matter"
    return facts | _extras()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu() -> dict[str, str]:
    info = _read("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": f"{name[1] if name else platform.processor() or 'unknown'}, {os.cpu_count()} cores, {usable} usable",
        "cpu flags": " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "unknown",
    }


def _memory() -> str:
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    if not found:
        return "unknown"
    total, available = (int(found.get(key, 0)) / 2**20 for key in ("MemTotal", "MemAvailable"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    limited = f", limited to {int(limit) / 2**30:.1f} GiB" if limit.isdigit() else ""
    return f"{total:.1f} GiB, {available:.1f} GiB free{limited}"


def _allocator() -> str:
    loaded = _read("/proc/self/maps")
    for name in ("tcmalloc", "jemalloc", "mimalloc"):
        if f"lib{name}" in loaded:
            return f"{name} (preloaded)"
    own = platform.libc_ver()[0] or "the system's"
    for name in ("tcmalloc_minimal", "tcmalloc", "jemalloc"):
        if (found := find_library(name)) is not None:
            return f"{own}; {name} is installed and makes updates faster: start with LD_PRELOAD={found}"
    return f"{own}; tcmalloc makes updates faster: install it (Debian: apt install libtcmalloc-minimal4)"


def _torch() -> dict[str, str]:
    """What torch says of itself, if it can be imported at all."""
    try:
        import torch
    except Exception as error:  # a broken installation is what a report may be about
        return {"torch import": f"failed: {' '.join(str(error).split())}"}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch threads": f"{torch.get_num_threads()} ({torch.get_num_interop_threads()} between operators)",
        "torch cpu": f"{torch.backends.cpu.get_cpu_capability()}, mkldnn {_yes(torch.backends.mkldnn.is_available())}, "
        f"mkl {_yes(torch.backends.mkl.is_available())}",
        "accelerators": ", ".join(devices) or "none",
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _extras() -> dict[str, str]:
    """Each extra: the versions found, or the command that gets what is missing."""
    wanted: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("rolecall") or []
    except metadata.PackageNotFoundError:
        return {"extras": "unknown: rolecall itself is not installed as a package"}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name and extra[1] not in _OWN_EXTRAS:
            wanted.setdefault(extra[1], []).append(name[0])
    facts = {}
    for extra_name, packages in wanted.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        found = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        get = f"{', '.join(missing)} missing: {Path(sys.executable).name} -m pip install 'rolecall[{extra_name}]'"
        facts[f"extra {extra_name}"] = "; ".join(part for part in (found, get if missing else "") if part)
    return facts
