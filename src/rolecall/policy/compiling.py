"""A model's layers compiled with torch.compile, where a user asks for it."""

from torch import nn

from rolecall.policy.heads import ScalarModel
from rolecall.policy.model import PolicyModel


def compile_layers(module: nn.Module) -> int:
    """Compile the layers of every model inside, in place, for inputs of any length; how many there are.

    Names and weights stay as they are, and copies are not compiled. The model's own forward pass is used from here on, not
    the flat one, which has kernels of its own.
    """
    parts = list(module.modules())
    names = {name for part in parts for name in getattr(part, "_no_split_modules", None) or ()}
    layers = [part for part in parts if type(part).__name__ in names]
    for part in parts:
        if isinstance(part, PolicyModel | ScalarModel):
            part.settle(flat=False)
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
