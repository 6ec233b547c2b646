"""Headers of foreign weight files, checked before a library parses them: no pickle, no bomb, nothing cut short."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

MAX_HEADER_BYTES = 4 << 20
"""Longest safetensors header that is parsed: room for some 40,000 tensors, and some 50 MB while it is read."""
_MAX_CONFIG_BYTES = 4 << 20
_MAX_GGUF_ENTRIES = 1 << 16
_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of an entry's value, by its kind."""
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


class FormatError(ValueError):
    """A file of a kind that is not read."""


def check_safetensors(path: Path) -> int:
    """Raise `FormatError` unless the header fits the file (no overlap, no gap, shapes that fit their bytes) and is of a
    sane size; returns the number of tensors. None of them is read."""
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
        with safe_open(path, framework="np") as opened:
            return len(opened.keys())
    except SafetensorError as error:
        raise FormatError(f"{path} has a false safetensors header: {error}") from error


def check_config(path: Path, *, tensors: int) -> None:
    """Raise `FormatError` unless a model's config.json is an object with no more layers than `tensors` allows.

    transformers builds the layers first and looks for their weights afterwards: ten million of them take hours.
    """
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise FormatError(f"{path} has more than {_MAX_CONFIG_BYTES:,} bytes")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not a JSON object")
    _check_layers(found, path, tensors)


def _check_layers(config: dict[str, Any], path: Path, tensors: int) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _check_layers(value, path, tensors)
        elif key in _LAYER_COUNTS and value is not None:
            if type(value) is not int or value < 0:
                raise FormatError(f"{path} has {key} {value!r}, which is not a number of layers")
            if value > max(tensors, 100):
                raise FormatError(f"{path} has {key} {value:,}, but the weights are {tensors:,} tensors")


def check_gguf(path: Path) -> None:
    """Raise `FormatError` unless the file begins as GGUF does, and counts no more than a model can have and the file holds."""
    with path.open("rb") as file:
        start = file.read(24)
    if start[:4] != b"GGUF" or len(start) < 24:
        raise FormatError(f"{path} is not a GGUF file: it does not begin with GGUF and its counts")
    version, tensors, entries = struct.unpack("<IQQ", start[4:])
    if version not in (2, 3):
        raise FormatError(f"{path} is GGUF of version {version}; versions 2 and 3 are read")
    if max(tensors, entries) > _MAX_GGUF_ENTRIES:
        raise FormatError(
            f"{path} claims {tensors:,} tensors and {entries:,} entries; at most {_MAX_GGUF_ENTRIES:,} are read"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        try:
            _walk_gguf(held, entries)
        except (ValueError, struct.error) as error:
            raise FormatError(f"{path} is cut short or damaged: an entry goes beyond its end") from error


def _walk_gguf(held: mmap.mmap, entries: int) -> None:
    """Go over all entries without reading them; raise ValueError if one claims more than there is."""
    place = 24

    def skip(size: int) -> None:
        nonlocal place
        place += size
        if place > len(held):
            raise ValueError("beyond the end")

    def number(form: str) -> int:
        skip(struct.calcsize(form))
        return int(struct.unpack_from(form, held, place - struct.calcsize(form))[0])

    for _ in range(entries):
        skip(number("<Q"))  # its name
        kind, count = number("<I"), 1
        if kind == _GGUF_ARRAY:
            kind, count = number("<I"), number("<Q")
        if kind == _GGUF_TEXT:
            for _ in range(count):
                skip(number("<Q"))
        elif kind in _GGUF_BYTES:
            skip(count * _GGUF_BYTES[kind])
        else:
            raise ValueError(f"no kind {kind}")
