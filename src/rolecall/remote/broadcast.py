"""Weights to several servers at once, by torch.distributed: through gloo, or through NCCL where trainer and servers have GPUs.

Each broadcast is a process group of its own. A server that is lost in the middle breaks it for all, within the time that
servers may be silent; then each of them gets the weights alone (`remote.server`).
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rolecall.serving.inside_vllm.rolecall_weights import announced, own_address, send


@dataclass(frozen=True, kw_only=True, slots=True)
class Receiver:
    """A server that takes part."""

    url: str
    processes: int
    cuda: bool
    load: Callable[[Mapping[str, Any]], Coroutine[Any, Any, str | None]]
    """Has it join the broadcast that it is told of, and load what comes; the hash of that, where it gives one."""


async def broadcast(
    tensors: Mapping[str, Tensor], receivers: Sequence[Receiver], *, seconds: float
) -> list[str | BaseException | None]:
    """Send tensors to all. What each server says, or why it failed; none waits longer than `seconds` for another."""
    addresses = [own_address(part.hostname or "", part.port or 80) for part in (urlsplit(r.url) for r in receivers)]
    # One of another machine reaches only an address of the network; one of this machine reaches that, too.
    host = next((a for a in addresses if not ip_address(a).is_loopback), addresses[0])
    on_gpus = all(r.cuda for r in receivers) and torch.cuda.is_available()
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    where = {
        "host": host,
        "port": listening.getsockname()[1],
        "size": 1 + sum(r.processes for r in receivers),
        "backend": "nccl" if on_gpus else "gloo",
        "seconds": seconds,
        "tensors": announced(tensors),
    }
    ranks = [1 + sum(r.processes for r in receivers[:i]) for i in range(len(receivers))]
    loads = [r.load({**where, "rank": rank}) for r, rank in zip(receivers, ranks, strict=True)]
    sending = asyncio.to_thread(send, where, listening.detach(), tensors)
    # Whether sending failed is what servers say: it ends no later than they do, or by its own limit.
    _, *said = await asyncio.gather(sending, *loads, return_exceptions=True)
    return said
