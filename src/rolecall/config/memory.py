"""What a training process holds in memory, worked out from a model's config.json before anything is loaded.

Weights, gradients and the optimiser's two moments have the dtype of the weights. Activations are what the flat forward pass
(`policy.flat`) keeps of a micro-batch for the backward pass; families that it cannot run keep more.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.config.plan import CHUNK_LOGITS, processes

TINY: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "vocab_size": 259,
    "tie_word_embeddings": True,
}
"""The built-in model's."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5625}
"""Of a weight; 4 bits have a scale per 64."""
_LOGIT_COPIES = 4
"""Tensors of a chunk's size that exist while the gradient of its logits is computed in torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """How large a Llama-family model is."""

    parameters: int
    linear: int
    """Those in the layers' matrices."""
    sides: int
    """Rows and columns of these matrices together: a LoRA adapter of rank r has r times as many parameters."""
    layers: int
    width: int
    between: int
    """Numbers that a layer keeps of a token in the working dtype."""
    vocabulary: int


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """The size by a config.json; None if it is of a family with other layers."""
    try:
        h, layers, middle = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "intermediate_size"))
        heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    if any("expert" in key and value for key, value in config.items()):
        return None
    d = int(config.get("head_dim") or h // heads)
    kv = int(config.get("num_key_value_heads") or heads)
    shapes = [(heads * d, h), (kv * d, h), (kv * d, h), (h, heads * d), (middle, h), (middle, h), (h, middle)]
    linear = layers * sum(rows * columns for rows, columns in shapes)
    embeddings = vocabulary * h * (1 if config.get("tie_word_embeddings", False) else 2)
    return ModelSize(
        parameters=linear + embeddings + (2 * layers + 1) * h,
        linear=linear,
        sides=layers * sum(rows + columns for rows, columns in shapes),
        layers=layers,
        width=h,
        between=2 * h + (2 * heads + 2 * kv) * d + 2 * middle,
        vocabulary=vocabulary,
    )


def memory_line(options: Any, *, reference: bool = False, critic: bool = False, sampler: bool = False) -> str:
    """What each process holds while it trains, part by part, for `--dry-run`."""
    config = config_of(options.model)
    size = None if config is None else model_size(config)
    if size is None:
        return (
            "memory: 16 bytes per parameter with float32 weights (4 each for weights and gradients, 8 for the optimiser), 4 more "
            "for a reference, and activations; how many parameters there are is not known before the model is read"
        )
    parts = _parts(options, size, reference=reference, critic=critic)
    said = ", ".join(f"{name} {_shown(held)}" for name, held in parts.items())
    whole = f"memory of each process, about: {said}; {_shown(sum(parts.values()))} in all"
    copy = size.parameters * _BYTES[options.engine.dtype or options.policy.dtype] if sampler else 0
    return whole + (f", beside {_shown(copy)} of the sampler's weights" if sampler else "")


def _parts(options: Any, size: ModelSize, *, reference: bool, critic: bool) -> dict[str, float]:
    policy, tokens = options.policy, options.optim.token_budget
    each, working = _BYTES[policy.dtype], 2 if "bf" in policy.mixed_precision + policy.dtype else 4
    lora = policy.lora_rank is not None
    trained = size.sides * policy.lora_rank if lora else size.parameters
    weights = size.parameters * each + (trained * each if lora else 0)
    if policy.quantize != "none":
        weights -= size.linear * (each - _BYTES[policy.quantize])
    models = 2 if critic else 1  # a critic of its own trains all its weights
    moved = trained + (size.parameters if critic else 0)
    sharded = options.train.shard == "fsdp2"
    share = processes() if sharded else 1
    kept = tokens * (2 * size.width * 4 + size.between * working)
    if policy.gradient_checkpointing:  # the input of every layer, and one layer's own
        kept = kept + tokens * size.width * working * size.layers
    else:
        kept *= size.layers
    parts = {
        "weights": (weights + (size.parameters * each if critic else 0)) / share,
        "gradients": moved * each / share,
        "optimiser": 2 * moved * each / share,
        "reference": (size.parameters * each if reference and not lora else 0) / share,
        "gathered layers": 2 * size.linear / size.layers * working if sharded else 0,
        f"activations of {tokens:,} tokens": float(models * kept),
        "logits": float(_LOGIT_COPIES * 4 * min(CHUNK_LOGITS, size.vocabulary * tokens)),
    }
    return {name: held for name, held in parts.items() if held}


def config_of(model: str) -> Mapping[str, Any] | None:
    """A model's config.json, as far as it is on this machine: its own, a run's, or one that was downloaded before."""
    if model == "tiny":
        return TINY
    path = Path(model).expanduser()
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    for place in (path / "model", path, *sorted(cache.glob("snapshots/*"))):
        try:
            found = json.loads((place / "config.json").read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _shown(held: float) -> str:
    return f"{held / 1e9:,.1f} GB" if held >= 1e8 else f"{held / 1e6:,.0f} MB" if held >= 1e6 else "1 MB"
