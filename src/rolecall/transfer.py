"""Tensors between the host and an accelerator, so that the host waits for it as seldom as it can.

What says where things lie (token ids, masks, lengths, places) stays on the host, where it can be looked at without waiting.
Copies to the device go on while the host does something else; what comes back is fetched together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. From the host to an accelerator it goes through pinned memory, and nobody waits for it."""
    if tensor.device.type != "cpu" or torch.device(device).type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, all of one device, on the host, for which it waits once: they come in one copy, as float64, which
    holds what bool and floating-point tensors do."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    joined = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
