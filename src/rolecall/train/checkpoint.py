"""Checkpoints that are complete or invisible.

    checkpoints/step-000010/                  complete: manifest.json names every file with its size and sha256
                step-000010.tmp-<uuid>/       being written or being removed; swept at the next start
                step-000010.old-<uuid>/       complete, while the same step is being replaced; put back if need be
                step-000010.corrupt/          damaged; left for a person to look at
                step-000020.cut/              complete, but the run went back to before it

The latest is found by reading manifests and hashing files, never by a pointer. Pickles are never read.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rolecall.files import (
    DiskError,
    disk_errno,
    disk_error,
    fsync_path,
    plain,
    size_of,
    sweep_unfinished,
)
from rolecall.train import manifest
from rolecall.train.manifest import DamagedCheckpointError

ABSENT = "(absent)"
"""Stands for a field one of two configs does not have."""

_STEP = re.compile(r"step-([0-9]{6,})")
_OLD = re.compile(r"step-([0-9]{6,})\.old-[0-9a-f]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose every file was hashed and found to be what was written."""

    path: Path
    """Its directory."""
    step: int
    """Steps done when it was saved."""
    config: Mapping[str, Any]
    """The run's config as plain JSON values."""
    config_hash: str
    """sha256 of the config."""
    files: Mapping[str, int]
    """Bytes by file name, the manifest left out."""


def differences(old: object, new: object) -> list[tuple[str, object, object]]:
    """The fields in which two configs differ, as (dotted field, old, new), sorted by field."""
    flat_old, flat_new = _flatten(_plain_config(old)), _flatten(_plain_config(new))
    return [
        (field, flat_old.get(field, ABSENT), flat_new.get(field, ABSENT))
        for field in sorted(flat_old.keys() | flat_new.keys())
        if not _same(flat_old.get(field, ABSENT), flat_new.get(field, ABSENT))
    ]


def begin(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    config: object,
    keep: int = 2,
    protect: Iterable[int] = (),
) -> Callable[[], Path]:
    """Write step `step` aside under `root`. The function that is returned completes it, from any thread, and returns its
    directory, `step-000010`.

    `write` is given an empty directory and puts files into it; they need not have reached the disk. To complete them
    they are fsynced, hashed and named in the manifest, and only then does the directory take its name. Afterwards the
    newest `keep` checkpoints and the steps in `protect` stay, the others go; so there must be room for one more than are
    kept.

    Both raise `DiskError` if the disk is full, read-only or gone; what was written is removed and everything saved before
    is untouched, so that the run can go on and try again later. Whatever else `write` raises is passed on.
    """
    if keep < 2:
        raise ValueError(
            f"keep must be at least 2, got {keep}: a single checkpoint leaves no fallback if it is damaged"
        )
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")
    final = root / f"step-{step:06d}"
    unfinished = _aside(final, "tmp")
    plain_config, kept = _plain_config(config), {*protect, step}
    removing = partial(_removing, unfinished, final)
    with removing():
        if not root.is_dir():
            root.mkdir()
            fsync_path(root.parent)
        unfinished.mkdir()
        write(unfinished)

    def complete() -> Path:
        with removing():
            manifest.seal(unfinished, step, plain_config)
            _publish(unfinished, final)
        _retain(root, keep=keep, protect=kept)
        return final

    return complete


def save(root: Path, step: int, write: Callable[[Path], None], *, config: object, **how: Any) -> Path:
    """Write a checkpoint and complete it; takes what `begin` takes."""
    return begin(root, step, write, config=config, **how)()


@contextmanager
def _removing(unfinished: Path, final: Path) -> Iterator[None]:
    """Removes what was written if something goes wrong; what the disk is to blame for is a `DiskError`."""
    try:
        yield
    except BaseException as error:
        written = size_of(unfinished)
        code = disk_errno(error, place=unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        if code is None:
            raise
        known = error.need or 0 if isinstance(error, DiskError) else 0
        root = final.parent
        need = max(known, written, *(size_of(path) for _, path in _complete(root)))
        raise disk_error(f"checkpoint {final.name}", root, code, need=need) from error


def latest(root: Path, *, strict: bool = False, read_only: bool = False) -> Checkpoint | None:
    """The newest undamaged checkpoint under `root`, every file of it hashed once; None if there is none.

    A damaged one is named in a warning, renamed `.corrupt` and passed over; with `strict` it raises
    `DamagedCheckpointError` instead. One from a newer version of this program raises `RefusedCheckpointError`.
    With `read_only` nothing is renamed, for those who look at a run they do not hold the lock of.
    """
    for _, path in reversed(_candidates(root)):
        try:
            checkpoint = verify(path)
        except DamagedCheckpointError as error:
            if not path.exists():
                continue  # removed by the run's own retention while it was being read
            if strict:
                raise
            _log.warning("%s; going back to the checkpoint before it", error)
            if not read_only:
                _rename_free(path, "corrupt")
            continue
        if path.name != f"step-{checkpoint.step:06d}" and not read_only:
            return _put_back(checkpoint)
        return checkpoint
    return None


def verify(path: Path) -> Checkpoint:
    """Check one checkpoint directory against its manifest, hashing every file once."""
    checked = manifest.check(path)
    return Checkpoint(
        path=path,
        step=checked["step"],
        config=checked["config"],
        config_hash=checked["config_hash"],
        files={name: entry["size"] for name, entry in checked["files"].items()},
    )


def sweep(root: Path) -> list[Path]:
    """Tidy up after a killed run, and return what was removed or renamed; the caller holds the run's lock."""
    touched = sweep_unfinished(root)
    for path in sorted(root.glob("step-*.old-*")) if root.is_dir() else []:
        match = _OLD.fullmatch(path.name)
        if match and not (final := root / f"step-{match.group(1)}").exists():
            path.rename(final)
            touched.append(path)
    return touched


def cut_after(root: Path, step: int) -> list[Path]:
    """Rename checkpoints later than `step` to `.cut`, so that a run that goes back does not find them again."""
    later = [path for number, path in _candidates(root) if number > step]
    renamed = [_rename_free(path, "cut") for path in later]
    if renamed:
        _log.warning("the run goes back to step %d; later checkpoints are now %s", step, [p.name for p in renamed])
    return renamed


def _publish(unfinished: Path, final: Path) -> None:
    """Give a sealed directory its name. One that had it before is moved aside, complete, and removed by `_retain`."""
    root = final.parent
    old = None
    if final.exists():
        old = _aside(final, "old")
        final.rename(old)
        fsync_path(root)
    try:
        unfinished.rename(final)
    except BaseException:
        if old is not None:
            old.rename(final)
        raise
    fsync_path(root)


def _retain(root: Path, *, keep: int, protect: set[int]) -> None:
    complete = _complete(root)
    kept = {step for step, _ in complete[-keep:]} | protect
    replaced = [path for path in root.glob("step-*.old-*") if (root / path.name.partition(".")[0]).exists()]
    for path in [path for step, path in complete if step not in kept] + replaced:
        try:
            _remove(path)
        except OSError as error:
            _log.warning("could not remove the old checkpoint %s: %s", path, error)


def _remove(path: Path) -> None:
    """Out of sight first, so that a removal that is interrupted does not look like damage."""
    doomed = _aside(path, "tmp")
    path.rename(doomed)
    fsync_path(path.parent)
    shutil.rmtree(doomed)


def _put_back(checkpoint: Checkpoint) -> Checkpoint:
    """Give a checkpoint that was being replaced its name again; whatever had the name was found damaged or missing."""
    final = checkpoint.path.parent / f"step-{checkpoint.step:06d}"
    checkpoint.path.rename(final)
    return replace(checkpoint, path=final)


def _complete(root: Path) -> list[tuple[int, Path]]:
    """Directories that bear the name of a complete checkpoint, by step."""
    return [(step, path) for step, path in _candidates(root) if _STEP.fullmatch(path.name)]


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """All that may be a complete checkpoint, by step; of one step, the one being replaced comes before the new one."""
    found = []
    for path in root.iterdir() if root.is_dir() else []:
        match = _STEP.fullmatch(path.name) or _OLD.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match.group(1)), "." not in path.name, path))
    return [(step, path) for step, _, path in sorted(found)]


def _plain_config(config: object) -> dict[str, Any]:
    converted = plain(config, "config")
    if not isinstance(converted, dict):
        raise TypeError(f"a config is a mapping or a dataclass, got a {type(config).__name__}")
    return converted


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, child in config.items():
        if isinstance(child, dict) and child:
            flat.update(_flatten(child, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = child
    return flat


def _same(old: object, new: object) -> bool:
    """Equal, where 1 and 1.0 are equal but 1 and True are not."""
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def _aside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{uuid4().hex}")


def _rename_free(path: Path, ending: str) -> Path:
    """Rename to `step-N.<ending>`, with a number if that name is taken."""
    base = path.name.partition(".")[0]
    target, count = path.with_name(f"{base}.{ending}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{base}.{ending}-{count}")
    path.rename(target)
    fsync_path(path.parent)
    return target
