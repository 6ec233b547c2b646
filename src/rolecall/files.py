"""Files that survive a crash: atomic writes, fsync, and disk errors that say how much room is missing."""

import errno
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from uuid import uuid4

TMP_MARK = ".tmp-"
"""Part of the name of everything that is not finished yet; whatever carries it is removed at the next start."""

_DISK_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE}
)
_ERRNO_IN_TEXT = re.compile(r"\b(?:os error|errno) (\d+)", re.IGNORECASE)


class DiskError(Exception):
    """The disk is full, read-only or gone. What was there before is untouched."""

    def __init__(self, message: str, *, path: Path, need: int | None = None, free: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        """What could not be written."""
        self.need = need
        """Bytes that are needed, if known."""
        self.free = free
        """Bytes that are free, if the disk still answers."""


def disk_errno(error: BaseException, *, place: Path) -> int | None:
    """The errno if `error`, or what it was raised from, is about the disk rather than about the data.

    Libraries wrap the system's error in types of their own and keep the number only in the text. A missing file counts
    only if `place`, where the writing went on, is gone; a refused permission only if it concerns `place`.
    """
    seen: BaseException | None = error
    while seen is not None:
        code = seen.errno if isinstance(seen, OSError) else None
        if code is None and (match := _ERRNO_IN_TEXT.search(str(seen))):
            code = int(match.group(1))
        if code in _DISK_ERRNOS:
            return code
        if code in (errno.ENOENT, errno.ENOTDIR) and not place.is_dir():
            return code
        if code in (errno.EACCES, errno.EPERM) and _concerns(seen, place):
            return code
        seen = seen.__cause__ or seen.__context__
    return None


def _concerns(error: BaseException, place: Path) -> bool:
    filename = getattr(error, "filename", None)
    if not isinstance(filename, str | Path):
        return False
    named, place = Path(filename).absolute(), place.absolute()
    return named == place or place in named.parents or named in place.parents


def disk_error(what: str, path: Path, code: int, *, need: int = 0) -> DiskError:
    """A `DiskError` in one sentence: what was being written, why it failed, bytes needed and free, what to do.

    `need` is what is known to be needed. A disk that proved full needs more than is free now, whatever is known.
    """
    free = free_bytes(path)
    if code == errno.ENOSPC and free is not None:
        need = max(need, free + 1)
    room = f" (needs at least {need:,} bytes, {free:,} are free)" if need and free is not None else ""
    full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room or choose another disk" if full else "check that the directory exists and is writable"
    message = f"could not write {what} to {path}: {os.strerror(code)}{room}; {remedy}"
    return DiskError(message, path=path, need=need or None, free=free)


def free_bytes(path: Path) -> int | None:
    """Bytes free where `path` lies or would lie; None if that cannot be known."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def fsync_path(path: Path) -> None:
    """Put a file's bytes, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write one file so that, whenever the process or the machine dies, the old or the new one is there whole.

    `content` is the bytes, or a function that writes the file whose path it is given. Raises `DiskError` if there is
    no room; the old file is then untouched.
    """
    aside = path.with_name(f"{path.name}{TMP_MARK}{uuid4().hex}")
    try:
        if isinstance(content, bytes):
            aside.write_bytes(content)
        else:
            content(aside)
        fsync_path(aside)
        aside.replace(path)
        fsync_path(path.parent)
    except BaseException as error:
        need = len(content) if isinstance(content, bytes) else size_of(aside)
        code = disk_errno(error, place=path.parent)
        with suppress(OSError):  # a disk that is gone cannot be cleaned; the next start sweeps it
            aside.unlink(missing_ok=True)
        if code is None:
            raise
        raise disk_error(path.name, path.parent, code, need=need) from error


def size_of(path: Path) -> int:
    """Bytes in a file, or in all files under a directory; 0 for what is gone or cannot be looked at."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(size_of(child) for child in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0


def sweep_unfinished(directory: Path) -> list[Path]:
    """Remove what an interrupted write left in `directory`; the caller holds the run's lock."""
    removed = []
    for path in sorted(directory.glob(f"*{TMP_MARK}*")) if directory.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(path)
    return removed


def plain(value: object, where: str = "") -> object:
    """`value` as JSON can hold it: records and mappings become dicts, sequences lists, nan and inf strings."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, where)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{where}.{f.name}".lstrip(".")) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(child, f"{where}.{key}".lstrip(".")) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, f"{where}[{i}]") for i, child in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(child, where) for child in value), key=repr)
    raise TypeError(
        f"{where or 'the value'} is a {type(value).__name__}, which JSON cannot hold; make it a plain value"
    )
