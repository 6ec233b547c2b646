"""The device that a run is on, from the name that a user gave it, and models compiled for it."""

import logging

import torch
from torch import nn

from rolecall.config.plan import processes
from rolecall.errors import UserError
from rolecall.policy.heads import ScalarModel
from rolecall.policy.model import PolicyModel

_log = logging.getLogger("rolecall")


def open_device(name: str) -> str:
    """The device by its name, made current if it has a number; `auto` is the accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if found is not None and found.type == "mps":
            _log.info("training on the CPU: mps has no float64, in which losses are added up")
            return "cpu"
        name = "cpu" if found is None else found.type
        if found is not None:
            _log.info("training on %s (%s); --device cpu trains on the CPU", name, _title(found))
        return name
    device = torch.device(name)
    if device.type == "cpu":
        return name
    if found is None or found.type != device.type:
        there = "no GPU" if found is None else f"{found.type} only"
        raise UserError(f"device {name} was asked for, but torch finds {there}; use --device auto, or --device cpu")
    if device.type == "mps":
        raise UserError("device mps cannot train: it has no float64, in which losses are added up; use --device cpu")
    if device.index is not None:
        if processes() > 1:
            raise UserError(f"device {name} is one, and there are {processes()} processes: give --device {device.type}")
        if device.index >= torch.accelerator.device_count():
            raise UserError(f"device {name} was asked for, but torch finds {torch.accelerator.device_count()} of them")
        torch.accelerator.set_device_index(device.index)
    return name


def set_tf32(device: torch.device, *, on: bool) -> None:
    """Whether matrix products of float32 numbers round them first; only NVIDIA's GPUs can. It holds for the whole process."""
    if on and device.type != "cuda":
        raise UserError(f"policy.tf32 is for NVIDIA GPUs, and this run is on {device.type}: leave it out")
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


def _title(device: torch.device) -> str:
    """What the accelerator is called."""
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


def compile_layers(module: nn.Module) -> int:
    """Compile the layers of every model inside, in place, for inputs of any length; how many there are.

    Names and weights stay as they are, and copies are not compiled. The model's own forward pass is used from here on, not
    the flat one, which has kernels of its own.
    """
    parts, names = list(module.modules()), layer_names(module)
    layers = [part for part in parts if type(part).__name__ in names]
    for part in parts:
        if isinstance(part, PolicyModel | ScalarModel):
            part.settle(flat=False)
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def layer_names(module: nn.Module) -> set[str]:
    """The classes of the layers that models inside are made of, as transformers names them."""
    return {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
