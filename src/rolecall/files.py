"""Files that survive a crash: the old one or the new one is there, whole."""

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

TMP_MARK = ".tmp-"
"""Part of the name of everything that is not finished yet."""


def fsync_path(path: Path) -> None:
    """Put a file's bytes, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write one file so that, whenever the process or the machine dies, the old or the new one is there whole.

    `content` is the bytes, or a function that writes the file whose path it is given.
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
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
