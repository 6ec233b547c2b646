"""Nested state on disk, exactly: the tree as JSON, its tensors as safetensors, no pickle.

A tree is made of dicts, lists, tuples, tensors, str, int, float, bool and None. It comes back with the same types of
keys and containers, the same order of keys, and every number bit for bit; tensors come back on the CPU.

In the JSON, what JSON cannot say is an object whose key begins with `$`:

    {"$tensor": "state/0/exp_avg"}      the tensor of that name in the safetensors file
    {"$tuple": [...]}                   a tuple
    {"$dict": [[key, value], ...]}      a dict whose keys are not all plain strings
    {"$ordered": [[key, value], ...]}   an OrderedDict
    {"$float": "inf"}                   inf, -inf, or nan with its bits
"""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rolecall.files import disk_errno, disk_error
from rolecall.policy.sharded import local
from rolecall.train.manifest import check_format


class NotFinite(RuntimeError):
    """A weight is NaN or infinite, so nothing is saved."""


def write_state(directory: Path, name: str, state: object) -> None:
    """Write `state` as `<name>.safetensors` and `<name>.json` in `directory`; equal states give equal bytes.

    A tensor that occurs in several places is written once. Tensors that are not contiguous, or share part of their
    memory with others, are written as copies. Raises `DiskError` if there is no room.
    """
    writer = _Writer()
    tree = writer.encode(state, ())
    text = json.dumps({"state": tree}, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    path = directory / f"{name}.safetensors"
    try:
        save_file(writer.tensors, path)
    except SafetensorError as error:
        code = disk_errno(error, place=directory)
        if code is None:
            raise
        need = sum(tensor.nbytes for tensor in writer.tensors.values())
        raise disk_error(path.name, directory, code, need=need) from error
    (directory / f"{name}.json").write_bytes(text.encode())


def read_state(directory: Path, name: str) -> Any:
    """What `write_state` wrote. Raises `ValueError` if the two files are not a whole, matching pair."""
    tensors_path, tree_path = directory / f"{name}.safetensors", directory / f"{name}.json"
    check_format(tensors_path)
    with safe_open(tensors_path, framework="pt") as file:
        # Copied out of the file's memory map: the file may be removed, or its disk vanish, while they are in use.
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a dict
    unread = set(tensors)
    try:
        tree = json.loads(tree_path.read_bytes(), parse_constant=_refuse_constant)
        state = _decode(tree["state"], tensors, unread)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{tree_path} does not describe the state in {tensors_path.name}: {error!r}") from error
    if unread:
        raise ValueError(f"{tensors_path} holds {sorted(unread)[0]!r}, which {tree_path.name} does not mention")
    return state


def first_non_finite(state: object) -> str | None:
    """The path of the first tensor in `state` that holds nan or inf, such as `state/0/exp_avg`; None if all is well.
    Of a tensor that lies in parts, this rank's part."""
    for path, tensor in _tensors(state, ()):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        tensor = local(tensor)
        wide = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            return "/".join(path)
    return None


def check_finite(module: nn.Module) -> None:
    """Raise `NotFinite` if a weight is NaN or infinite."""
    bad = first_non_finite(dict(module.named_parameters()))
    if bad is not None:
        raise NotFinite(f"{bad} is not finite: this checkpoint was not written, the last one is good")


def _tensors(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _tensors(child, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _tensors(child, (*path, str(i)))


class _Writer:
    """Turns a tree into what JSON can hold, and gathers its tensors on the way."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._storages: set[int] = set()
        self._alive: list[Tensor] = []

    def encode(self, value: object, path: tuple[str, ...]) -> object:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, list) and kind is list:
            return [self.encode(child, (*path, str(i))) for i, child in enumerate(value)]
        if isinstance(value, tuple) and kind is tuple:
            return {"$tuple": [self.encode(child, (*path, str(i))) for i, child in enumerate(value)]}
        if isinstance(value, dict) and kind in (dict, OrderedDict):
            children = [(key, self.encode(child, (*path, str(key)))) for key, child in value.items()]
            if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
                return dict(children)
            tag = "$dict" if kind is dict else "$ordered"
            return {tag: [[self._key(key, path), child] for key, child in children]}
        raise TypeError(
            f"state at {_where(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved exactly; "
            "make it a dict, list, tuple, tensor, str, int, float, bool or None"
        )

    def _key(self, key: object, path: tuple[str, ...]) -> object:
        if isinstance(key, Tensor):
            raise TypeError(f"state at {_where(path)} has a tensor as a key; use a string or an int")
        return self.encode(key, (*path, "key"))

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        tensor = tensor.detach()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise TypeError(f"tensor {_where(path)} is sparse, quantized or without data; save a plain dense tensor")
        if tensor.dtype == torch.complex128:
            raise TypeError(f"tensor {_where(path)} is complex128, which safetensors lacks; use torch.view_as_real")
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and view in self._names:
            return self._names[view]
        self._alive.append(tensor)  # a freed storage's address could come again
        whole = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        if whole.untyped_storage().data_ptr() == storage:
            # The first to use a storage is written from it; safetensors refuses others that overlap with it.
            if storage in self._storages:
                whole = whole.clone()
            self._storages.add(storage)
        name = _unused("/".join(path) or "state", self.tensors)
        self.tensors[name] = whole
        self._names[view] = name
        return name


def _unused(name: str, taken: dict[str, Tensor]) -> str:
    """Keys 1 and "1" give the same path; the later one gets a mark."""
    candidate, count = name, 1
    while candidate in taken or candidate == "__metadata__":
        count += 1
        candidate = f"{name}#{count}"
    return candidate


def _decode(value: Any, tensors: dict[str, Tensor], unread: set[str]) -> Any:
    if isinstance(value, list):
        return [_decode(child, tensors, unread) for child in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(child, tensors, unread) for key, child in value.items()}
    content = value[tag]
    if tag == "$tensor":
        unread.discard(content)
        return tensors[content]
    if tag == "$tuple":
        return tuple(_decode(child, tensors, unread) for child in content)
    if tag in ("$dict", "$ordered"):
        pairs = [(_decode(key, tensors, unread), _decode(child, tensors, unread)) for key, child in content]
        return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
    if tag == "$float":
        return _float_of(content)
    raise ValueError(f"unknown mark {tag!r}")


def _float_text(value: float) -> str:
    if math.isnan(value):
        return f"nan:{struct.pack('>d', value).hex()}"
    return str(value)


def _float_of(text: str) -> float:
    if text.startswith("nan:"):
        (value,) = struct.unpack(">d", bytes.fromhex(text.removeprefix("nan:")))
        return float(value)
    return float(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _where(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the top"
