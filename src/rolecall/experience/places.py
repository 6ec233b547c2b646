"""A folder at any address that `fsspec` knows: s3://, gs://, sftp://, memory://, file://. Files in it are written whole or not at all."""

import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import Any, TypeVar
from uuid import uuid4

from rolecall.experience.parquet import StoreError
from rolecall.files import TMP_MARK

_TRIES = 4
_DEADLINE_S = 15.0
"""How long an address may take to show that it can be read or written before that is an error."""
_BUCKETS = {"s3", "gs", "gcs", "abfs", "az", "oss", "r2"}
"""Kinds of store that have no folders; to make one would make a bucket, which a wrong address should not."""
T = TypeVar("T")


def is_address(place: str) -> bool:
    """Whether a text is an address rather than a path."""
    return "://" in place


class Place:
    """A folder. What fails is tried again, then a `StoreError` that names the address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            import fsspec

            # A folder that is listed again shows what is there now.
            self._fs, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = (
                "rolecall[store]" if url.startswith("s3") else getattr(error.__cause__, "name", None) or "fsspec[full]"
            )
            raise StoreError(f"{url} needs a package that is missing ({error}): pip install '{extra}'") from error
        except Exception as error:
            raise StoreError(f"{url} is not an address that can be opened: {_in_words(error)}") from error
        self._path = path.rstrip("/")

    def __truediv__(self, name: str) -> "Place":
        below = object.__new__(Place)
        below.url, below._fs, below._path = f"{self.url}/{name}", self._fs, f"{self._path}/{name}"
        return below

    def __str__(self) -> str:
        return self.url

    def check(self) -> None:
        """Write, list and remove a file, now rather than after the first step."""
        name = f"check{TMP_MARK}{uuid4().hex}"

        def work() -> None:
            self._write(name, b"rolecall")
            self._fs.rm_file(f"{self._path}/{name}")

        _within(_DEADLINE_S, work, f"{self} cannot be written")

    def names(self) -> list[str]:
        """The files that are there whole, by name; none if there is no such folder."""

        def work() -> list[str]:
            try:
                found = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

        return [name for name in _within(_DEADLINE_S, work, f"{self} cannot be read") if TMP_MARK not in name]

    def read(self, name: str) -> bytes:
        """A file's bytes."""
        return _tried(lambda: bytes(self._fs.cat_file(f"{self._path}/{name}")), f"{self}/{name} cannot be read")

    def open(self, name: str) -> Any:
        """A file to read from, of which only what is asked for is fetched."""
        return _tried(lambda: self._fs.open(f"{self._path}/{name}", "rb"), f"{self}/{name} cannot be read")

    def write(self, name: str, content: bytes) -> None:
        """A file, whole or not at all; one that is there is replaced."""
        _tried(lambda: self._write(name, content), f"{self}/{name} cannot be written")

    def remove(self, name: str) -> None:
        """A file, if it is there."""

        def work() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}")

        _tried(work, f"{self}/{name} cannot be removed")

    def _write(self, name: str, content: bytes) -> None:
        aside = f"{self._path}/{name}{TMP_MARK}{uuid4().hex}"
        if not _BUCKETS.intersection([self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol):
            self._fs.makedirs(self._path, exist_ok=True)
        self._fs.pipe_file(aside, content)
        self._fs.mv(aside, f"{self._path}/{name}")


def _tried(work: Callable[[], T], what: str) -> T:
    for number in range(1, _TRIES):
        with suppress(Exception):  # libraries of stores raise what they like; the last one is shown
            return work()
        sleep(0.25 * 2**number)
    try:
        return work()
    except Exception as error:
        raise StoreError(f"{what}: {_in_words(error)}; check the address, the network and your keys") from error


def _within(seconds: float, work: Callable[[], T], what: str) -> T:
    """Libraries try an address that does not answer for minutes."""
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if done:
        return done[0]
    why = _in_words(failed[0]) if failed else f"no answer within {seconds:g} s"
    raise StoreError(f"{what}: {why}; check the address, the network and your keys")


def _in_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
