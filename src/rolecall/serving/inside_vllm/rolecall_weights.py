"""Weights that arrive as tensors: by a broadcast of torch.distributed, or as an adapter for weights that are there already.

Needs torch alone: vLLM's processes import this file by its path, the trainer and `rolecall serve` as a part of rolecall.
Nothing is pickled. What is to come, by name, dtype and shape, is announced by HTTP; then each tensor is broadcast, bytes only,
in a process group of its own that no other part of the program knows of.
"""

import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

HALF_A, HALF_B, SCALE = ".lora_A", ".lora_B", ".lora_scale"
"""What the names of an adapter's tensors end with, after the name of the weight that it changes."""


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with an adapter worked in, weight + B A scale, by the same operations as peft: the same bits on the same machine."""
    found = dict(base)
    for name in [name.removesuffix(HALF_A) for name in adapter if name.endswith(HALF_A)]:
        a, b, weight = adapter[name + HALF_A], adapter[name + HALF_B], base[name]
        wide = torch.float32 if a.dtype in (torch.bfloat16, torch.float16) and a.device.type == "cpu" else a.dtype
        delta = (b.to(wide) @ a.to(wide)) * adapter[name + SCALE].item()
        found[name] = weight + delta.to(a.dtype).to(weight.dtype)
    return found


def announced(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """What is to come: the name, dtype and shape of each."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def send(where: Mapping[str, Any], listening: int, tensors: Mapping[str, Tensor]) -> None:
    """Broadcast tensors in the order in which they were announced. `listening` is a socket at the place that `where` names."""
    limit = timedelta(seconds=where["seconds"])
    store = TCPStore(
        where["host"],
        where["port"],
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    group = _group(store, where, rank=0, here=where["host"])
    for tensor in tensors.values():
        given = tensor.detach().to(_device(where)).contiguous()
        group.broadcast(given.view(-1).view(torch.uint8), 0).wait(limit)


def receive(where: Mapping[str, Any], *, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `where` announces, one at a time. A `RuntimeError` if one does not come in time."""
    limit = timedelta(seconds=where["seconds"])
    store = TCPStore(where["host"], where["port"], is_master=False, timeout=limit)
    group = _group(store, where, rank=rank, here=own_address(where["host"], where["port"]))
    for name, dtype, shape in where["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=_device(where))
        group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait(limit)
        yield name, tensor


def own_address(host: str, port: int) -> str:
    """The address of this machine that another one is reached from. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _device(where: Mapping[str, Any]) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if where["backend"] == "nccl" else torch.device("cpu")


def _group(store: TCPStore, where: Mapping[str, Any], *, rank: int, here: str) -> ProcessGroup:
    """A process group that listens on one address, on which the others are reached."""
    kind: Any
    if where["backend"] == "nccl":
        kind = torch.distributed.ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = torch.distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=here, lazy_init=False)]
    options._timeout = timedelta(seconds=where["seconds"])
    group: ProcessGroup = kind(store, rank, where["size"], options)
    return group
