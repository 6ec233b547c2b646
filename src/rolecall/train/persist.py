"""What a checkpoint holds: the policy in Hugging Face layout, and everything else the run needs to go on exactly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rolecall.policy.load import LoadedModel, save, save_about
from rolecall.policy.lora import export, has_adapter
from rolecall.policy.sharded import rest, spread
from rolecall.train.manifest import RefusedCheckpointError
from rolecall.train.parts import FOLDER, Parts
from rolecall.train.state import check_finite, read_state, write_state

_STATE = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """How weights become files of a checkpoint that others can load, and come back from them."""

    save: Callable[[Path], None]
    """Writes them into a directory."""
    load: Callable[[Path], Mapping[str, Tensor]]
    """Reads them, by the names of the module's parameters."""
    about: Callable[[Path], None] = lambda directory: None
    """Writes what describes the model, where its weights are saved in parts."""
    beside: Callable[[str], bool] | None = None
    """Whether a parameter is not in these files; None if all are."""


def policy_files(policy: LoadedModel) -> ModelFiles:
    """The Hugging Face files of a policy. They do not hold heads, critics and adapters."""
    adapted = has_adapter(policy)

    def load(directory: Path) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for path in [] if adapted else sorted(directory.glob("model*.safetensors")):
            weights |= {f"model.{name}": tensor for name, tensor in load_file(path).items()}
        return weights

    return ModelFiles(
        save=partial(export if adapted else save, policy),
        load=load,
        about=partial(save_about, policy),
        beside=lambda name: not name.startswith("model.") or (adapted and "lora_" in name),
    )


def write_checkpoint(
    directory: Path,
    *,
    files: ModelFiles,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    learner: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write all state of a run into a directory; refuse if any weight is not finite."""
    check_finite(module)
    files.save(directory)
    state = {"optimizer": optimizer.state_dict(), "learner": dict(learner), "extra": dict(extra)}
    if files.beside is not None:
        state["beside"] = {name: p.detach() for name, p in module.named_parameters() if files.beside(name)}
    write_state(directory, _STATE, state)


def read_checkpoint(
    directory: Path, *, files: ModelFiles, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint's weights and optimiser back, also into a sharded module; returns (learner state, extra)."""
    state = read_state(directory, _STATE)
    rest(module)
    own, beside = dict(module.named_parameters()), state.get("beside", {})
    weights = {**beside, **files.load(directory)}
    missing = [name for name, p in own.items() if p.requires_grad and name not in weights]
    odd = [n for n, w in weights.items() if n in own and own[n].shape != w.shape]
    for name in [*missing, *odd, *sorted(beside.keys() - own.keys())]:
        there, here = (str(tuple(w[name].shape)) if name in w else "absent" for w in (weights, own))
        raise RefusedCheckpointError(
            f"the checkpoint {directory} is of another model: {name} is {there} there and {here} here"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            if name in weights:
                parameter.copy_(spread(weights[name], parameter))
    try:
        load_optimizer(optimizer, state["optimizer"])
    except ValueError as error:
        raise RefusedCheckpointError(
            f"the checkpoint {directory} is of another model: its optimiser has other parameters ({error})"
        ) from error
    return state["learner"], state["extra"]


def write_parts(directory: Path, parts: Parts, *, learner: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """The same of a sharded run, on rank 0: every rank writes its part of weights and optimiser."""
    optimizer = parts.write(directory)
    held = {name: None if name == "reference" else value for name, value in learner.items()}  # among the parts
    write_state(directory, _STATE, {"optimizer": optimizer, "learner": held, "extra": dict(extra)})


def read_parts(directory: Path, parts: Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put the checkpoint of a sharded run back, whatever the number of ranks and whether they shard; returns (learner state,
    extra)."""
    state = read_state(directory, _STATE)
    parts.read(directory, state["optimizer"])
    return state["learner"], state["extra"]


def has_parts(directory: Path) -> bool:
    """Whether a checkpoint is of a sharded run."""
    return (directory / FOLDER).is_dir()


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put an optimiser's moments back; its settings stay those of this run, which may have been changed."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{sizes[0]} there and {sizes[1]} here")
    if any(hasattr(p, "device_mesh") for p in parameters):
        for number, held in state["state"].items():
            p = parameters[number]
            optimizer.state[p] = {key: spread(x, p) if x.shape == p.shape else x for key, x in held.items()}
        return
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
