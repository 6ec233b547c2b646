"""LoRA adapters, through peft.

There is only ever one adapter, the one that trains. An adapter that is already there (from SFT) is merged into the
weights before a new one goes on top, so that with the adapter off the model is what it was before RL: the reference is
SFT, not the bare base model, and needs no second copy of the weights. Where it is the old adapter that trains on, the
reference is a copy (`train.reference`).
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rolecall.policy.dropout import KeyedDropout
from rolecall.policy.load import LoadedModel, LoadError, check_finite, make_trainable, save, stop_dropout
from rolecall.policy.quantize import restore
from rolecall.policy.sharded import gathered, in_parts
from rolecall.policy.weight_files import files_hold, outline_of, write_files


def add_adapter(
    loaded: LoadedModel,
    *,
    rank: int = 16,
    alpha: float = 32,
    target_modules: str | Sequence[str] = "all-linear",
    rs: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> LoadedModel:
    """The model with a fresh adapter; only the adapter trains. Its output is at first exactly that of the model.

    The given model is built into the result and must not be used any more. The seed decides the adapter's random half
    and what `dropout` drops. `rs` scales it by alpha / sqrt(rank) instead of alpha / rank (rsLoRA).
    """
    peft = _peft()
    base_name = "" if has_adapter(loaded) else loaded.name  # merged, they are no longer the weights of that name
    base = merge(loaded).model
    checkpointing = bool(base.is_gradient_checkpointing)
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        use_rslora=rs,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = peft.get_peft_model(base, config)
        except ValueError as error:
            linear = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)})
            raise LoadError(f"LoRA finds no layers {targets} in {loaded.name!r}; it has {', '.join(linear)}") from error
    model.peft_config["default"].base_model_name_or_path = base_name
    set_dropout(model, dropout, seed=seed)
    return replace(loaded, model=model.train(checkpointing))


def load_adapter(loaded: LoadedModel, directory: str | Path, *, trainable: bool = True) -> LoadedModel:
    """The model with an adapter read from a directory, without the dropout that its configuration may name.

    The given model must not be used any more.
    """
    peft = _peft()
    directory = Path(directory)
    if has_adapter(loaded):
        raise LoadError("the model already carries an adapter: merge it first with `lora.merged`")
    if not (directory / "adapter_model.safetensors").is_file():
        raise LoadError(
            f"adapter {str(directory)!r}: adapter_model.safetensors is missing; give a directory written by "
            "`lora.save_adapter` or by peft (Pickle is never read)"
        )
    checkpointing = bool(loaded.model.is_gradient_checkpointing)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # they would stay random
            model = peft.PeftModel.from_pretrained(loaded.model, directory, is_trainable=trainable)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, UserWarning) as error:
        reason = str(error).strip().splitlines()[0]
        raise LoadError(f"adapter {str(directory)!r} does not fit model {loaded.name!r}: {reason}") from error
    check_finite(model, where=str(directory))
    stop_dropout(model)
    return replace(loaded, model=model.train(checkpointing))


def set_dropout(model: Any, rate: float, *, seed: int) -> None:
    """Drop this share of the adapter's inputs while it trains (`policy.dropout`), in place."""
    model.peft_config["default"].lora_dropout = rate
    layers = [
        m.lora_dropout for m in model.modules() if isinstance(getattr(m, "lora_dropout", None), torch.nn.ModuleDict)
    ]
    for number, layer in enumerate(layers):
        layer["default"] = KeyedDropout(rate, seed=seed, number=number) if rate else torch.nn.Identity()


def continues(loaded: LoadedModel, *, rank: int, alpha: float | None, targets: Sequence[str], rs: bool) -> bool:
    """Whether the adapter that the model carries is one of these settings; no alpha and no targets fit any."""
    config = loaded.model.peft_config["default"]
    return bool(
        config.r == rank
        and config.use_rslora == rs
        and alpha in (None, config.lora_alpha)
        and (not targets or set(targets) == set(config.target_modules))
    )


def merge(loaded: LoadedModel) -> LoadedModel:
    """The model with its adapter, if it has one, worked into the weights. The given one must not be used any more."""
    if not has_adapter(loaded):
        return loaded
    checkpointing = bool(loaded.model.is_gradient_checkpointing)
    restore(loaded.model)
    plain = loaded.model.merge_and_unload(safe_merge=True)
    make_trainable(plain, gradient_checkpointing=checkpointing)
    return replace(loaded, model=plain)


def has_adapter(loaded: LoadedModel) -> bool:
    """Whether the model carries an adapter."""
    return hasattr(loaded.model, "peft_config")


def is_fresh(model: Any) -> bool:
    """Whether the adapter changes nothing yet: switched off, the model is then what it is now."""
    halves = ("lora_B", "lora_embedding_A")  # those that begin as zeros
    return not any(bool(p.any()) for name, p in model.named_parameters() if any(half in name for half in halves))


@contextmanager
def reference(model: Any) -> Iterator[Any]:
    """The model as it was before its adapter began to train, for the time of the `with`. No second copy is made."""
    if not hasattr(model, "disable_adapter"):
        raise ValueError("the model carries no adapter to switch off: keep a frozen copy of it as the reference")
    with model.disable_adapter():
        yield model


def merged(loaded: LoadedModel) -> LoadedModel:
    """A copy with the adapter worked into plain weights. The given model stays as it is and can train on.

    Taken from a copy because adding an adapter to the weights and taking it off again does not restore every bit.
    """
    if in_parts(loaded.model):
        return assembled(loaded)
    return merge(replace(loaded, model=copy.deepcopy(loaded.model)))


def merged_weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """The weights by their plain names, with the adapter, if there is one, worked in: no copy of the whole is made."""
    if not has_adapter(loaded):
        return {name: p.detach() for name, p in loaded.model.named_parameters()}
    base, found = loaded.model.get_base_model(), {}
    layers = dict(base.named_modules())
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        weight, place = parameter.detach(), name.rpartition(".base_layer.")
        if place[1] and place[2] == "weight":
            weight = weight + layers[place[0]].get_delta_weight("default").detach()
        found[name.replace(".base_layer.", ".")] = weight
    return found


def assembled(loaded: LoadedModel, *, keep: bool = True) -> LoadedModel:
    """A plain model on the CPU with the whole weights of one that lies in parts, adapter worked in; all ranks must ask.

    Those that do not `keep` it get the given model back.
    """
    weights = gathered(merged_weights(loaded), keep=keep)
    if not keep:
        return loaded
    base = loaded.model.get_base_model() if has_adapter(loaded) else loaded.model
    model = outline_of(base)
    model.to_empty(device="cpu")
    buffers = dict(base.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    own = dict(model.named_parameters())
    for name, weight in weights.items():
        own[name].data = weight
    model.tie_weights()
    model.generation_config = base.generation_config
    make_trainable(model)
    return replace(loaded, model=model)


def export_parts(loaded: LoadedModel, directory: Path | None) -> None:
    """`export` of a model that lies in parts, adapter or not, gathered a file at a time; all ranks must ask, and the one with
    a directory writes. Models whose tensors transformers converts when it saves them are put together there first."""
    base = loaded.model.get_base_model() if has_adapter(loaded) else loaded.model
    outline = outline_of(base).to(base.dtype)
    names = files_hold(outline)
    if names is None:
        whole = assembled(loaded, keep=directory is not None)
        if directory is not None:
            save(whole, directory)
        return
    held = dict(base.named_buffers()) | merged_weights(loaded)
    if directory is not None:
        outline.generation_config = base.generation_config
        save(replace(loaded, model=outline), directory, weights={})
    write_files({name: held[name] for name in names}, directory)


def export(loaded: LoadedModel, directory: str | Path) -> None:
    """Write plain Hugging Face weights with the adapter merged in, and the tokenizer."""
    save(merged(loaded), directory)


def export_base(loaded: LoadedModel, directory: str | Path) -> None:
    """Write the weights the adapter sits on, without it: the reference as a model of its own."""
    if not has_adapter(loaded):
        raise ValueError("the model carries no adapter, so it is its own base: use `load.save`")
    copied = copy.deepcopy(loaded.model)
    restore(copied)
    save(replace(loaded, model=copied.unload()), directory)


def save_adapter(loaded: LoadedModel, directory: str | Path, *, base: str | None = None) -> None:
    """Write the adapter alone, in peft's layout, with the name of the model it belongs to.

    An adapter that sits on top of a merged one belongs to weights that have no name yet: write those once with
    `export_base` and pass their directory as `base`.
    """
    if not has_adapter(loaded):
        raise ValueError("the model carries no adapter to save; add one with `lora.add_adapter`")
    config = loaded.model.peft_config["default"]
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(
            "the adapter sits on weights into which another one was merged, so it is no use without them: write them "
            "with `lora.export_base` and pass their directory as base"
        )
    saved, config.base_model_name_or_path = config.base_model_name_or_path, str(name)
    try:
        # Embeddings never train under an adapter, and looking for them would ask the hub.
        loaded.model.save_pretrained(directory, save_embedding_layers=False)
    finally:
        config.base_model_name_or_path = saved


def check_installed() -> None:
    """Raise unless peft is there, before time is spent on reading a large model."""
    _peft()


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise LoadError("LoRA adapters need the peft package: pip install 'rolecall[lora]'") from error
    return peft
