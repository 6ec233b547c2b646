"""JSON lines that are whole or absent, and whose failure never stops a run."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rolecall.errors import UserError
from rolecall.files import plain

LOST_LINES = "lost_lines"
"""Key in the first line after a gap: how many lines before it the disk would not take."""

_BLOCK = 1 << 16
_log = logging.getLogger(__name__)


class JsonLines:
    """Appends one JSON object per line, each with one write.

    Opening cuts a torn last line. A line the disk does not take is taken back and counted; the next line that gets
    through says in `lost_lines` how many are missing before it. Non-finite numbers are the strings "nan", "inf" and
    "-inf", which `float()` reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Lines lost since this file was opened."""
        self._gap = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with path.open("rb") as file:
            self._end = _sound_end(file)
        self._cut(self._end)

    def append(self, record: Mapping[str, object]) -> bool:
        """Write one line; False if the disk did not take it."""
        fields = {LOST_LINES: self._gap, **record} if self._gap else record
        line = (json.dumps(plain(fields), allow_nan=False, ensure_ascii=False) + "\n").encode()
        try:
            self._cut(self._end)  # in case what an earlier failure left could not be taken back then
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            if not self._gap:
                _log.warning("%s takes no more lines (%s); the run continues without them", self.path, error.strerror)
            self._gap += 1
            self.lost += 1
            try:
                self._cut(self._end)
            except OSError as again:
                _log.debug("could not take back part of a line in %s: %s", self.path, again)
            return False
        self._end += len(line)
        self._gap = 0
        return True

    def cut_after(self, step: int) -> int:
        """Drop everything from the first line whose `step` is later than `step`; returns the number of lines cut."""
        position, cut = 0, 0
        keep = self._end
        with self.path.open("rb") as file:
            for line in file:
                if not cut and not _is_later(line, step):
                    position += len(line)
                    continue
                if not cut:
                    keep = position
                cut += 1
        self._cut(keep)
        self._end = keep
        os.fsync(self._descriptor)
        return cut

    def sync(self) -> None:
        """Put all lines on the disk; done before a checkpoint, so that none it counts on can be lost."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut(self, end: int) -> None:
        if os.fstat(self._descriptor).st_size > end:
            os.ftruncate(self._descriptor, end)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSON lines file; a torn last one, as a running job may show for a moment, is left out. A damaged
    one in the middle is a `UserError`."""
    with path.open("rb") as file:
        end = _sound_end(file)
        file.seek(0)
        records = []
        for number, line in enumerate(file.read(end).splitlines(), 1):
            record = _parse(line)
            if record is None:
                raise UserError(f"{path}, line {number}, is not a JSON object; bring back a whole copy of it")
            records.append(record)
    return records


def _sound_end(file: BinaryIO) -> int:
    """Where the last whole line that is a JSON object ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = _line_start(file, end)
        file.seek(start)
        line = file.read(end - start)
        if line.endswith(b"\n") and _parse(line) is not None:
            return end
        end = start
    return 0


def _line_start(file: BinaryIO, end: int) -> int:
    """Where the line that ends at `end` (its newline included, if it has one) begins."""
    upto = end - 1
    while upto > 0:
        begin = max(0, upto - _BLOCK)
        file.seek(begin)
        found = file.read(upto - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        upto = begin
    return 0


def _is_later(line: bytes, step: int) -> bool:
    record = _parse(line)
    number = record.get("step") if record else None
    return isinstance(number, int) and number > step


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
