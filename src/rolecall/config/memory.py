"""What a training process holds in memory, worked out from a model's config.json before anything is loaded.

Weights, gradients and the optimiser's two moments have the dtype of the weights. Activations are what the flat forward pass
(`policy.flat`) keeps of a micro-batch for the backward pass; families that it cannot run keep more.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolecall.config.plan import CHUNK_LOGITS, processes
from rolecall.planning.cost import Shape

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


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """A model's shape by its config.json; None if it is of a family with other layers."""
    if any("expert" in key and value for key, value in config.items()):
        return None
    try:
        return Shape.of(config)
    except (KeyError, TypeError, ValueError):
        return None


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Those of a LoRA adapter on all linear layers: rank x (rows + columns) of each of their seven matrices."""
    asked, kept, w, f = (
        shape.heads * shape.head_size,
        shape.key_heads * shape.head_size,
        shape.width,
        shape.feed_forward,
    )
    return rank * shape.layers * (2 * (asked + w) + 2 * (kept + w) + 3 * (f + w))


def activation_bytes(shape: Shape, working: int) -> int:
    """What a layer keeps of a token, `working` bytes for a number in the working dtype; the residual stream is in float32."""
    asked, kept = shape.heads * shape.head_size, shape.key_heads * shape.head_size
    return 2 * shape.width * 4 + (2 * shape.width + 2 * asked + 2 * kept + 2 * shape.feed_forward) * working


def memory_line(options: Any, *, reference: bool = False, critic: bool = False, sampler: bool = False) -> str:
    """What each process holds while it trains, part by part, for `--dry-run`."""
    config = config_of(options.model)
    shape = None if config is None else shape_of(config)
    if shape is None:
        return (
            "memory: 16 bytes per parameter with float32 weights (4 each for weights and gradients, 8 for the optimiser), 4 more "
            "for a reference, and activations; how many parameters there are is not known before the model is read"
        )
    parts = _parts(options, shape, reference=reference, critic=critic)
    said = ", ".join(f"{name} {_shown(held)}" for name, held in parts.items())
    whole = f"memory of each process, about: {said}; {_shown(sum(parts.values()))} in all"
    copy = shape.parameters * _BYTES[options.engine.dtype or options.policy.dtype] if sampler else 0
    return whole + (f", plus {_shown(copy)} of the sampler's weights" if sampler else "")


def _parts(options: Any, shape: Shape, *, reference: bool, critic: bool) -> dict[str, float]:
    policy, tokens = options.policy, options.optim.token_budget
    each, working = _BYTES[policy.dtype], 2 if "bf" in policy.mixed_precision + policy.dtype else 4
    lora, linear = policy.lora_rank is not None, shape.layers * (shape.layer - 2 * shape.width)
    trained = adapter_parameters(shape, policy.lora_rank) if lora else shape.parameters
    weights = shape.parameters * each + (trained * each if lora else 0)
    if policy.quantize != "none":
        weights -= linear * (each - _BYTES[policy.quantize])
    models = 2 if critic else 1  # a critic of its own trains all its weights
    moved = trained + (shape.parameters if critic else 0)
    sharded = options.train.shard == "fsdp2"
    share = processes() if sharded else 1
    kept = tokens * activation_bytes(shape, working)
    if policy.gradient_checkpointing:  # the input of every layer, and one layer's own
        kept += tokens * shape.width * working * shape.layers
    else:
        kept *= shape.layers
    # Two layers; embedding and output layer are gathered with the whole, and their gradients are whole before they are spread.
    outside = shape.parameters - shape.layers * shape.layer
    gathered = (2 * shape.layer + outside * (1 if lora else 2)) * working
    parts = {
        "weights": (weights + (shape.parameters * each if critic else 0)) / share,
        "gradients": moved * each / share,
        "optimiser": 2 * moved * each / share,
        "reference": (shape.parameters * each if reference and not lora else 0) / share,
        "reward model": 4 * _reward_parameters(options) / (1 if getattr(options, "ahead", 0) else share),
        "gathered layers": float(gathered) if sharded else 0,
        f"activations of {tokens:,} tokens": float(models * kept),
        "logits": float(_LOGIT_COPIES * 4 * min(CHUNK_LOGITS, shape.vocabulary * tokens)),
    }
    return {name: held for name, held in parts.items() if held}


def _reward_parameters(options: Any) -> int:
    """Those of the reward model that scores answers; 0 if functions do, or nothing."""
    given: tuple[str, ...] = getattr(options, "reward", ())
    if len(given) != 1 or not Path(given[0]).expanduser().is_dir():
        return 0
    config = config_of(given[0])
    shape = None if config is None else shape_of({**config, "tie_word_embeddings": True})  # it has no logits
    return 0 if shape is None else shape.parameters


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
