"""A tiny random model of every causal family that transformers knows: its default configuration with small sizes."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from learners import learner_of, options_of
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.policy.reading import outputs_of
from rolecall.policy.tiny import PAD_ID, TURN_END_ID, TURN_START_ID, tiny_tokenizer
from rolecall.recipes.guard import Guard
from rolecall.rollout.open import open_engine

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CONTEXT = 128

_SIZES: dict[int, str] = {
    32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim output_embedding_size dim_model emb_dim "
    "attention_hidden_size lru_width encoder_hidden_size cross_hidden_size embedding_dim hidden_dim hidden_size_global",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size feed_forward_size intermediate_size_mlp dff block_ff_dim "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk num_experts_per_token moe_k top_k "
    "linear_num_key_heads num_experts_per_token top_k_experts index_n_heads n_mamba_heads moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_encoder_attention_heads num_decoder_attention_heads num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads mamba_n_heads mamba_num_heads linear_num_heads",
    8: "head_dim attention_head_size d_kv kv_channels attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size linear_head_dim "
    "mamba_head_dim dim_head global_head_dim hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank mamba_d_head mamba_headdim qk_head_dim o_lora_rank sliding_window window_size "
    "attention_window_size",
    264: "vocab_size vocab_size_per_layer_input",
    64: "index_topk",
    CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions",
    1: "n_group topk_group n_groups mamba_n_groups first_k_dense_replace num_nextn_predict_layers n_shared_experts "
    "num_shared_experts num_hash_layers num_dense_layers",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_SMALL |= {"eos_token_id": TURN_END_ID, "pad_token_id": PAD_ID, "bos_token_id": TURN_START_ID}
_SMALL |= {"logit_scale": 0.7, "logits_scaling": 1.7, "lm_head_multiplier": 1.4, "embedding_multiplier": 1.3}
_SMALL |= {"final_logit_softcapping": 3.0, "output_logit_soft_cap": 3.0, "residual_multiplier": 0.9, "scale_emb": 2}
_SMALL |= {"is_decoder": True, "causal": True}
_COUNTS_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 8,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 4,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
_ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
    "mamba_dt_rank": 4,
    "mamba_headdim": 32,
}
_MORE: list[tuple[str, dict[str, Any]]] = [
    (
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear",
        {"num_key_value_heads": 4},
    ),
    ("minicpm3 youtu longcat_flash bailing_hybrid", {"num_key_value_heads": 4}),
    ("deepseek_v2", {"num_experts_per_tok": 2}),
    ("longcat_flash", {"zero_expert_num": 2}),
    ("bailing_hybrid", {"num_expert_group": 2, "topk_group": 1}),
    ("camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod", {"pad_token_id": 1}),
    ("xglm prophetnet", {"pad_token_id": 1}),
    ("xmod", {"default_language": "en_XX"}),
    ("hunyuan_v1_dense hunyuan_v1_moe ministral nemotron", {"head_dim": 8}),
    ("nemotron", {"num_key_value_heads": 2}),
    ("codegen gptj", {"rotary_dim": 4}),
    ("bamba", _MAMBA2 | {"attn_layer_indices": [1]}),
    ("falcon_h1", _MAMBA2),
    ("granitemoehybrid", _MAMBA2 | {"layer_types": ["linear_attention", "full_attention"]}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}),
    ("mamba2", {"num_heads": 4, "head_dim": 16, "chunk_size": 16}),
    ("dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"]}),
    ("zaya", {"num_experts_per_tok": 1}),
    ("zamba zamba2", _ZAMBA),
    ("xlstm", {"num_blocks": 2, "chunk_size": 16, "qk_dim_factor": 1.0}),
    ("reformer", {"axial_pos_embds": False, "num_buckets": 4}),
    ("roc_bert", {"pronunciation_vocab_size": 264, "shape_vocab_size": 264}),
    ("cohere_compass_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    ("dbrx", {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}),
    ("dbrx", {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}),
    ("gemma3n_text", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("gemma3n_text", {"num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "laurel_rank": 4}),
    ("gemma3n_text", {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}),
    ("qwen4_exp_text", _QWEN4),
    ("qwen4_exp", {"text_config": _QWEN4}),
    ("blt", {"encoder_hash_byte_group_vocab": 64}),
]
"""What families need beside."""


def tiny_of(family: str, *, seed: int = 0) -> Any:
    """A random model of the family whose answers are neither constant nor noise."""
    config = small_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter += 0.05 * torch.randn_like(parameter)
                elif (std := float(parameter.std())) > 0:
                    width = parameter.shape[-1] if len(parameter) != _SMALL["vocab_size"] else 16
                    parameter *= max(1.0, width**-0.5 / std)
    model.generation_config = GenerationConfig(eos_token_id=TURN_END_ID)
    return model


def small_config(family: str) -> Any:
    """The family's default configuration with small sizes."""
    kind = CONFIG_MAPPING[family]
    settings = _small(kind())
    for families, more in _MORE:
        if family in families.split():
            settings |= {k: settings[k] | v if isinstance(settings.get(k), dict) else v for k, v in more.items()}
    return kind(**settings)


def _small(config: Any) -> dict[str, Any]:
    """New values of the sizes that a configuration has, those of the configurations in it included."""
    found: dict[str, Any] = {}
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            found[name] = type(value)(**_small(value)).to_dict()
        elif name in _SMALL and (type(value) in (int, float, bool) or name.endswith("_token_id")):
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


def save_tiny(family: str, directory: Path) -> Any:
    """Write the model with the byte tokenizer as a model directory, and return it as transformers has it."""
    model = tiny_of(family)
    model.save_pretrained(directory)
    if family in ("emu3", "mllama"):  # their text model alone has no name of its own
        small_config(family).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model.eval()


def rows_of(lengths: Sequence[int]) -> list[Tensor]:
    """Rows of different tokens."""
    return [torch.tensor([(7 + 3 * row + 37 * i + i * i) % 250 for i in range(n)]) for row, n in enumerate(lengths)]


@torch.no_grad()
def own_logprobs(model: Any, row: Tensor) -> Tensor:
    """log p(token t | tokens < t) for t > 0 by the model's own logits, the row alone."""
    logits = outputs_of(model, row[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]


@torch.no_grad()
def our_logprobs(module: PolicyModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """The same by the module that trains, all rows in one batch padded on the right with what happens to stand there."""
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=99) for row in rows])
    wanted = torch.stack([(torch.arange(width) < len(row)) & (torch.arange(width) > 0) for row in rows])
    found = module(ids, wanted, temperature=1.0).logprobs
    return [line[1 : len(row)] for line, row in zip(found, rows, strict=True)]


def check_family(family: str, directory: Path, *, steps: int = 2) -> str:
    """Take GRPO steps with a tiny model of the family, and check what must hold; returns how the model is read."""
    own = save_tiny(family, directory)
    policy = load(directory)
    # Tokens as ids only: families keep some for pictures and sound.
    rows = rows_of((21, 9, 14))
    module = PolicyModel(policy.model)
    for expected, found in zip((own_logprobs(own, row) for row in rows), our_logprobs(module, rows), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)
    options = options_of(steps=steps, prompts=2, samples=3, sampling={"max_new_tokens": 6}, optim={"lr": 1e-2})
    engine = open_engine(policy, name="hf")
    learner = learner_of(options, _reward, engine=engine, policy=policy, rows=[{"prompt": "go:"}, {"prompt": "on up:"}])
    guard = Guard(options, policy=policy, updater=learner.updater, engine=engine, engine_dtype=torch.float32)
    learner.watches.append(guard)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for step in range(1, steps + 1):
        rollout = learner.collect(step)
        for trajectory in rollout.trajectories:
            (again,) = our_logprobs(learner.module, [torch.tensor(trajectory.ids)])
            sampled = torch.tensor(trajectory.behaviour_logprobs[1:])
            chosen = torch.isfinite(sampled) & (torch.arange(len(sampled)) + 1 >= trajectory.turns[0][0])
            assert chosen.any()
            torch.testing.assert_close(again[chosen], sampled[chosen], atol=5e-4, rtol=1e-4)
        learner.update(rollout)
        metrics = learner.metrics()
        assert isfinite(metrics["loss"]), metrics
        assert metrics["engine_in_sync"] == 1
    moved = sum(not torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert moved, "no weight moved"
    return policy.model.config._attn_implementation


def _reward(sample: Any) -> float:
    return sum(i % 2 == 0 for i in sample.completion_ids) / len(sample.completion_ids)
