"""The manifest of a checkpoint: which files it has, their sizes and sha256, of which step and config it is.

A final model has one too, without the config: it goes where the model goes, and a config may name paths.
"""

import errno
import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolecall.files import fsync_path
from rolecall.policy.headers import FormatError, check_safetensors

SCHEMA = 1
"""The version of the manifest this code writes, and the newest it reads."""
MANIFEST = "manifest.json"
"""Written last, inside the checkpoint."""

_FORMAT, _MODEL = "rolecall checkpoint", "rolecall model"
_MAX_MANIFEST_BYTES = 16 << 20
_STEP = re.compile(r"step-([0-9]{6,})")
_DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO})


class CheckpointError(Exception):
    """A checkpoint cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """Its files are not those that were written."""


class RefusedCheckpointError(CheckpointError):
    """It may be whole, but it is not one for this program or this run."""


def seal(directory: Path, step: int, config: object) -> None:
    """Fsync every file, then write the manifest, then fsync every directory."""
    _seal(
        directory, {"format": _FORMAT, "schema": SCHEMA, "step": step, "config_hash": _digest(config), "config": config}
    )


def seal_model(directory: Path, step: int) -> None:
    """The same for a final model."""
    _seal(directory, {"format": _MODEL, "schema": SCHEMA, "step": step})


def check_model(directory: Path) -> None:
    """Refuse a final model whose weights are not those that were written; one without a manifest is not ours to judge.

    Files that were added, and texts that were edited, such as a chat template, are the user's business.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["format"] != _MODEL or manifest["schema"] > SCHEMA:
            return
        claimed = manifest.pop("manifest_hash", None)
        fault = None if claimed == _digest(manifest) else f"its {MANIFEST} changed"
        listed = {name: file for name, file in manifest["files"].items() if name.endswith(".safetensors")}
        fault = fault or _first_fault(directory, listed, set(listed) & set(_files_in(directory)))
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        fault = f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if fault is not None:
        raise DamagedCheckpointError(
            f"the model {directory} is damaged: {fault}; take a checkpoint of the run instead, or delete its {MANIFEST} if "
            "you changed the files yourself"
        )


def _seal(directory: Path, manifest: dict[str, object]) -> None:
    files = {}
    for name in sorted(_files_in(directory)):
        path = directory / name
        check_format(path)
        fsync_path(path)
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    if not files:
        raise ValueError(f"nothing was written into the {manifest['format']} of step {manifest['step']}")
    if MANIFEST in files:
        raise ValueError(f"{MANIFEST} is the checkpoint's own; write yours under another name")
    manifest["files"] = files
    manifest["manifest_hash"] = _digest(manifest)
    path = directory / MANIFEST
    path.write_bytes(json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode())
    fsync_path(path)
    for inner in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        fsync_path(inner)
    fsync_path(directory)


def check(path: Path) -> dict[str, Any]:
    """Check a checkpoint directory against its manifest, hashing every file once, and return the manifest."""
    manifest = _read_manifest(path)
    try:
        fault = _first_fault(path, manifest["files"], {name for name in _files_in(path) if name != MANIFEST})
    except FormatError as error:
        fault = str(error)
    except OSError as error:
        if error.errno not in _DAMAGE_ERRNOS:
            raise  # no permission, no memory, too many open files: says nothing about the checkpoint
        fault = str(error)
    if fault is not None:
        raise DamagedCheckpointError(f"{path} is damaged: {fault}")
    return manifest


def _first_fault(path: Path, listed: Mapping[str, Any], present: set[str]) -> str | None:
    """What is wrong with the files of a checkpoint, the cheapest checks first."""
    for name in sorted(listed.keys() | present):
        if name not in present:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is not in its manifest"
        size = (path / name).stat().st_size
        if size != listed[name]["size"]:
            return f"{name} has {size:,} bytes instead of {listed[name]['size']:,}"
    for name in sorted(present):
        if _sha256(path / name) != listed[name]["sha256"]:
            return f"the bytes of {name} changed (sha256 differs)"
        check_format(path / name)
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, checked for everything it can be checked for without opening another file."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {_MAX_MANIFEST_BYTES:,} bytes")
        manifest = json.loads(file.read_bytes())
        schema = manifest["schema"]
        if manifest["format"] != _FORMAT or type(schema) is not int:
            raise ValueError("it is not a manifest of this program")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE_ERRNOS:
            raise
        raise DamagedCheckpointError(
            f"{path} is damaged: its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if schema > SCHEMA:
        raise RefusedCheckpointError(
            f"{path} has schema version {schema} but this program reads up to version {SCHEMA}; use a newer rolecall"
        )
    claimed = manifest.pop("manifest_hash", None)
    if claimed != _digest(manifest) or manifest["config_hash"] != _digest(manifest["config"]):
        raise DamagedCheckpointError(f"{path} is damaged: its {MANIFEST} changed (sha256 differs)")
    match = _STEP.match(path.name)
    if match and int(match.group(1)) != manifest["step"]:
        raise DamagedCheckpointError(f"{path} is damaged: its {MANIFEST} is of step {manifest['step']}")
    return manifest


def _files_in(directory: Path) -> list[str]:
    """Names of all files under `directory`; links and devices have no place in a checkpoint."""
    names = []
    for path in directory.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.append(path.relative_to(directory).as_posix())
        elif not stat.S_ISDIR(mode):
            raise FormatError(f"{path} is a link or a device; a checkpoint holds plain files only")
    return names


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp", ".joblib", ".npz", ".zip"})
_PICKLE_STARTS = {
    b"PK\x03\x04": "a zip file, as torch.save writes",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


def check_format(path: Path) -> None:
    """Raise `FormatError` if the file is, or may hide, a pickle, or is a safetensors file with a false header.

    Looks at the name and the first bytes; of a safetensors file the header is checked against the file's size (no
    overlap, no gap, shapes that fit their bytes) and no tensor is read.
    """
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise FormatError(f"{path} looks like a pickle ({path.suffix}); only safetensors and JSON are read")
    if path.name == ".metadata":
        raise FormatError(f"{path} looks like a torch distributed checkpoint, which holds a pickle; it is not read")
    if path.suffix == ".safetensors":
        check_safetensors(path)
        return
    with path.open("rb") as file:
        start = file.read(4)
    for magic, kind in _PICKLE_STARTS.items():
        if start.startswith(magic):
            raise FormatError(f"{path} is {kind}; only safetensors and JSON are read")
