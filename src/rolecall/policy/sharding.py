"""A model whose weights lie in parts on all ranks of a job (FSDP2): each layer is gathered while it computes.

`fully_shard` is called here, layer by layer and on the whole, and what it made is looked at: launchers that promise to
do so may silently train something else. A pass through a sharded model is a meeting of all ranks, so all of them make
the same number of passes (`sharded.rounds`).
"""

import ctypes
from contextlib import ExitStack, suppress
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rolecall.errors import UserError
from rolecall.policy.device import layer_names
from rolecall.policy.flat import flat_layer
from rolecall.policy.heads import ScalarHead, ScalarModel
from rolecall.policy.model import PolicyModel
from rolecall.policy.quantize import RoundedLinear

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


def mesh_of(device: torch.device, stack: ExitStack) -> DeviceMesh:
    """All ranks in a line. A process that is alone becomes a group of one, until the stack ends."""
    if not dist.is_initialized():
        stack.callback(dist.destroy_process_group)
        dist.init_process_group("gloo" if device.type == "cpu" else None, store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(
    module: nn.Module, mesh: DeviceMesh, *, mixed_precision: str = "no", offload: bool = False, frozen: bool = False
) -> None:
    """Spread a module's weights over the ranks of the mesh, in place.

    With `mixed_precision` bf16 the weights are gathered in bfloat16, and gradients are summed in float32; heads that give
    a number stay in float32. With `offload` the parts lie in the host's memory. A `frozen` module is read by
    `PolicyModel.read` too, and what it gathered stays until `sharded.rest`.
    """
    if any(isinstance(part, RoundedLinear) for part in module.modules()):
        raise UserError("quantised weights cannot be sharded: leave out policy.quantize, or use --train.shard ddp")
    for part in module.modules():
        if isinstance(part, PolicyModel | ScalarModel):
            part.settle(flat=mixed_precision == "no")  # tried and compared while every layer is whole
    precision = _precision(mixed_precision)
    place: OffloadPolicy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": place}
    for part in list(module.modules()):
        if isinstance(part, ScalarHead):
            fully_shard(part, **how)
        elif type(part).__name__ in layer_names(module):
            fully_shard(part, mp_policy=precision, reshard_after_forward=True, **how)
            part.flat_layer = MethodType(flat_layer, part)  # type: ignore[assignment]
            register_fsdp_forward_method(part, "flat_layer")
    fully_shard(module, mp_policy=precision, reshard_after_forward=not frozen, **how)
    if isinstance(module, PolicyModel):
        register_fsdp_forward_method(module, "read")
    whole = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    assert isinstance(module, FSDPModule), "fully_shard did not shard the module"
    assert not whole, f"{whole[0]} was not sharded"


def give_back_memory() -> None:
    """Have glibc return freed blocks at once, from here on: best before the model is loaded. It keeps those of the whole model,
    and of gathered layers, which come and go, for later: SmolLM2 on two ranks took 4.0 GB instead of 2.2."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)


def _precision(mixed: str) -> MixedPrecisionPolicy:
    if mixed == "no":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
