"""Which files may lie in a checkpoint: never a pickle, and safetensors only with a sane header. Nothing is executed."""

import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

MAX_HEADER_BYTES = 4 << 20
"""Longest safetensors header that is parsed: room for some 40,000 tensors, and some 50 MB while it is read."""

_PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp", ".joblib", ".npz", ".zip"})
_PICKLE_STARTS = {
    b"PK\x03\x04": "a zip file, as torch.save writes",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


class FormatError(ValueError):
    """A file of a kind that is not read."""


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
        _check_safetensors(path)
        return
    with path.open("rb") as file:
        start = file.read(4)
    for magic, kind in _PICKLE_STARTS.items():
        if start.startswith(magic):
            raise FormatError(f"{path} is {kind}; only safetensors and JSON are read")


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    if len(start) < 9 or start[8:] != b"{":
        raise FormatError(f"{path} is not a safetensors file: it does not begin with a header")
    (length,) = struct.unpack("<Q", start[:8])
    if length > size - 8:
        raise FormatError(f"{path} claims a header of {length:,} bytes but is {size:,} bytes long")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{path} has a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise FormatError(f"{path} has a false safetensors header: {error}") from error
