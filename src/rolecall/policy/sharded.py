"""What lies in parts on the ranks of a job (`policy.sharding`): gathered, or this rank's part. Of other tensors and modules, they
themselves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(module: Any) -> bool:
    """Whether a module's weights lie in parts."""
    return hasattr(module, "set_requires_gradient_sync")


def in_parts(module: nn.Module) -> bool:
    """Whether any weight of a module, which may be inside a sharded one, lies in parts."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def rest(module: nn.Module) -> None:
    """Free what was gathered for a pass."""
    for part in module.modules():
        if is_sharded(part):
            part.reshard()  # type: ignore[operator]


def rounds(module: nn.Module, count: int) -> int:
    """Passes that this rank makes through a module, `count` of them its own.

    A pass through a sharded module is a meeting of all ranks: all make as many as the one with most.
    """
    if not is_sharded(module):
        return count
    most = torch.tensor(count, device=local(next(module.parameters())).device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def whole(tensor: Tensor) -> Tensor:
    """The tensor gathered; all ranks must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, as another one lies: whole, or in parts."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    held: Any = like
    tensor = tensor.to(local(like).device)
    return distribute_tensor(tensor, held.device_mesh, held.placements, src_data_rank=None)


def gathered(weights: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors whole, on the CPU, gathered one at a time; nothing on ranks that do not `keep` them."""
    found = {}
    for name, tensor in weights.items():
        full = whole(tensor.detach())
        if keep:
            found[name] = full.to("cpu", copy=True)  # what was gathered may be padded
    return found
