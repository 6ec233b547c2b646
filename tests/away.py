"""An accelerator for machines that have none: a device of its own for torch, whose tensors lie in the host's memory.

torch lets Python register a backend. Here each of its tensors wraps one of the host, and every operation is looked at
before it runs. A tensor of the host among those of the device is an error, as it is on a GPU. What makes the host wait until
a GPU has done all that was asked of it is counted, by the line of our code that asks. Results are real, so that whole
commands run there. Kernels, streams and memory are not those of a GPU: about these it says nothing.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "away"
DEVICE = f"{NAME}:0"
SOURCE = str(Path(__file__).parents[1] / "src" / "rolecall")
aten = torch.ops.aten

_MOVES = {aten.copy_.default, aten._to_copy.default}
_BY_SHAPE = {
    *(aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._unique2.default),
    *(aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.bincount.default),
    aten._local_scalar_dense.default,
}
"""Operations whose result, or its shape, the host has to know."""


class Mixed(Exception):
    """Tensors of both devices went into one operation."""


class Away(torch.Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Away":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.held})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        assert isinstance(new, Away)
        self.held = new.held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert a tensor of another device to numpy: copy it to the host first")

    def storage(self) -> Any:  # type: ignore[override]
        return self.held.storage()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Away":
        return Away(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Sees every operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """By the line of our code."""
        self.pinned: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._pin_memory.default:
            made = args[0].clone()
            self.pinned.add(made.untyped_storage().data_ptr())
            return made
        if func is aten.is_pinned.default:
            return args[0].untyped_storage().data_ptr() in self.pinned
        if _waits(func, args, kwargs or {}, self.pinned):
            self.waits[_place()] += 1
        return _run(func, args, kwargs or {})


def _waits(func: Any, args: Any, kwargs: dict[str, Any], pinned: set[int]) -> bool:
    """Whether the host waits until the device has done all before it."""
    away = [isinstance(x, Away) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func in _MOVES:
        target = isinstance(args[0], Away) if func is aten.copy_.default else _is_away(kwargs.get("device"), away[0])
        source = args[1] if func is aten.copy_.default else args[0]
        if target == isinstance(source, Away):
            return False
        later = args[2] if func is aten.copy_.default and len(args) > 2 else kwargs.get("non_blocking", False)
        return not (target and later and source.untyped_storage().data_ptr() in pinned)
    if not any(away):
        return False
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func in _BY_SHAPE


def _is_away(device: Any, default: bool) -> bool:
    return default if device is None else torch.device(device).type == NAME


def _place() -> str:
    """The innermost line of our code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(SOURCE):
            return f"{frame.filename.removeprefix(SOURCE + os.sep)}:{frame.lineno} {frame.line}"
    return "?"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, Away)]
    odd = [x for x in tensors if not isinstance(x, Away) and x.dim()]
    if ours and odd and func not in _MOVES:
        raise Mixed(f"{func}: {[(tuple(x.shape), str(x.device)) for x in tensors]} at {_place()}")
    target = bool(ours)
    if kwargs.get("device") is not None:
        target = _is_away(kwargs["device"], False)
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default:
        target = isinstance(args[0], Away)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    given = {id(x.held): x for x in ours}
    plain_args, plain_kwargs = tree_map_only(Away, lambda x: x.held, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if func is aten._to_copy.default and target != bool(ours):
        out = out.clone() if out is plain_args[0] else out
    return tree_map_only(Tensor, lambda x: given.get(id(x)) if id(x) in given else Away(x) if target else x, out)


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def set_device(self, *_: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    def is_bf16_supported(self, *_: Any) -> bool:
        return True


_LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")
"""What autocast computes in the lower precision."""


def register() -> tuple[Library, Library]:
    """Make the device known to torch, for the rest of the process: call it in a child, and keep what it returns."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = Library("_", "IMPL", "AutocastPrivateUse1")
    library.fallback(fallthrough_kernel)
    matrices = Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _LOWER:
        matrices.impl(name, partial(_lowered, name))
    return library, matrices


def _lowered(name: str, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(NAME)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype == torch.float32 else x

    with torch.autocast(NAME, enabled=False):
        return getattr(torch.ops.aten, name)(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))


@contextmanager
def watched() -> Iterator[Watch]:
    """Everything is looked at."""
    plain = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return plain(*args, **kwargs).to(device)  # what torch does too, but where no mode sees it

    def generator(device: Any = "cpu", kind: Any = torch.Generator) -> torch.Generator:
        return kind("cpu" if _is_away(device, False) else device)

    with mock.patch("torch.tensor", tensor), mock.patch("torch.Generator", generator), Watch() as found:
        yield found


def in_child(work: Callable[[Watch, Any], Any], argument: Any) -> Any:
    """work(watch, argument) of a test module, in a process that has the device. Both speak JSON.

    Not in a fork: torch's autograd counts the devices when it first runs, and in tests it has run.
    """
    paths = [str(Path(__file__).parent), str(Path(sys.modules[work.__module__].__file__ or "").parent)]
    code = f"import sys; sys.path[:0] = {paths}; import away; away._child({work.__module__!r}, {work.__name__!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = json.dumps(argument)
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def _child(module: str, name: str) -> None:
    """The other side."""
    known = register()
    work = getattr(importlib.import_module(module), name)
    with watched() as watch:
        found = work(watch, json.load(sys.stdin))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    assert known
