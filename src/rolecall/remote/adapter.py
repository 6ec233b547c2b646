"""An adapter on its way to servers that keep the weights it belongs to: only its own tensors are sent, and they merge it."""

from torch import Tensor, float64, tensor

from rolecall.policy.load import LoadedModel
from rolecall.policy.lora import merged_weights
from rolecall.serving.inside_vllm.rolecall_weights import HALF_A, HALF_B, SCALE, merged


def adapter_alone(policy: LoadedModel) -> dict[str, Tensor]:
    """Copies of the adapter's two halves and its scale, under the plain name of each weight that it changes."""
    found = {}
    for name, layer in policy.model.get_base_model().named_modules():
        if "default" in getattr(layer, "lora_A", {}):
            found[f"{name}.weight{HALF_A}"] = layer.lora_A["default"].weight.detach().to("cpu", copy=True)
            found[f"{name}.weight{HALF_B}"] = layer.lora_B["default"].weight.detach().to("cpu", copy=True)
            found[f"{name}.weight{SCALE}"] = tensor(layer.scaling["default"], dtype=float64)
    return found


def base_weights(policy: LoadedModel) -> dict[str, Tensor]:
    """The weights that the adapter belongs to, by their plain names. They do not train, so they are no copies on a CPU."""
    own = policy.model.get_base_model().named_parameters()
    return {name.replace(".base_layer.", "."): p.detach().cpu() for name, p in own if "lora_" not in name}


def can_be_merged(policy: LoadedModel) -> bool:
    """Whether merging `adapter_alone` gives what peft gives: not for a quantised base, DoRA, or layers of another form. The
    adapter must not be all zeros."""
    expected, base, alone = merged_weights(policy), base_weights(policy), adapter_alone(policy)
    if expected.keys() != base.keys():
        return False
    try:
        found = merged(base, alone)
    except (RuntimeError, KeyError):  # of other shapes, or under other names
        return False
    return all(
        float((found[name].float() - w.cpu().float()).abs().max()) <= 0.01 * float(w.float().abs().max())
        for name, w in expected.items()
    )
