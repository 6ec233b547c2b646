"""A tiny random model of every causal family that transformers knows: its default configuration with small sizes."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rolecall.policy.tiny import PAD_ID, TURN_END_ID, TURN_START_ID

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CONTEXT = 128

_SIZES: dict[int, str] = {
    32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim output_embedding_size dim_model emb_dim "
    "attention_hidden_size lru_width encoder_hidden_size cross_hidden_size embedding_dim hidden_dim",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size feed_forward_size intermediate_size_mlp dff block_ff_dim "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk num_experts_per_token moe_k top_k "
    "linear_num_key_heads num_experts_per_token top_k_experts index_n_heads n_mamba_heads moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_encoder_attention_heads num_decoder_attention_heads num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads mamba_n_heads mamba_num_heads linear_num_heads index_topk",
    8: "head_dim attention_head_size d_kv kv_channels attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size linear_head_dim "
    "mamba_head_dim dim_head global_head_dim hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank mamba_d_head mamba_headdim qk_head_dim o_lora_rank sliding_window window_size "
    "attention_window_size",
    264: "vocab_size vocab_size_per_layer_input",
    CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions",
    1: "n_group topk_group n_groups mamba_n_groups first_k_dense_replace num_nextn_predict_layers n_shared_experts "
    "num_shared_experts num_hash_layers num_dense_layers",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_SMALL |= {"eos_token_id": TURN_END_ID, "pad_token_id": PAD_ID, "bos_token_id": TURN_START_ID}
_COUNTS_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_OWN: dict[str, dict[str, Any]] = {}
"""What a family needs beside."""


def tiny_of(family: str, *, seed: int = 0) -> Any:
    """A random model of the family whose answers are neither constant nor noise."""
    config = small_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
    model.generation_config = GenerationConfig(eos_token_id=TURN_END_ID)
    return model


def small_config(family: str) -> Any:
    """The family's default configuration with small sizes."""
    kind = CONFIG_MAPPING[family]
    own = _OWN.get(family, {})
    try:
        default = kind()
    except Exception:
        default = kind(**own)
    return kind(**_small(default) | own)


def _small(config: Any) -> dict[str, Any]:
    """New values of the sizes that a configuration has, those of the configurations in it included."""
    found: dict[str, Any] = {}
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            found[name] = type(value)(**_small(value)).to_dict()
        elif name in _SMALL and (value is None or isinstance(value, int)) and not isinstance(value, bool):
            if value is not None or name.endswith("_token_id"):
                found[name] = _SMALL[name]
    layers = next((values[n] for n in _COUNTS_LAYERS if values.get(n)), 0)
    per_layer = {n: v for n, v in values.items() if isinstance(v, list) and layers and len(v) == layers}
    if per_layer:
        # One layer of each kind that the family has.
        kinds = list(zip(*(map(str, v) for v in per_layer.values()), strict=True))
        chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:4]
        chosen = chosen if len(chosen) > 1 else [0, 1]
        found |= {n: [v[i] for i in chosen] for n, v in per_layer.items()}
        found |= {n: len(chosen) for n in _COUNTS_LAYERS if n in values}
    return found
