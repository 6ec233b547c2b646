"""Which models the hand-written forward passes (the native engine's, the flat trunk) can stand in for."""

import re
from typing import Any

_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
_WEIGHT = re.compile(
    r"(model\.)?(embed_tokens|norm)\.weight|lm_head\.weight"
    r"|(model\.)?layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight"
    r"|(model\.)?layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.(weight|bias)"
)


def unsupported(model: Any) -> str | None:
    """Why they cannot run this transformers model, or None if they can."""
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        return f"it attends over a sliding window of {window} tokens"
    rope = config.rope_parameters or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return "its rotary frequencies change with the length"
    if rope.get("partial_rotary_factor", 1.0) != 1:
        return "it rotates a part of each head only"
    odd = next((name for name, _ in model.named_parameters() if not _WEIGHT.fullmatch(name)), None)
    return None if odd is None else f"it has a weight {odd} of its own"
