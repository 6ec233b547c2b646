"""Models that are given as objects."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from rolecall.policy.load import Dtype, LoadedModel, LoadError, cast_weights, ready
from rolecall.policy.pretrained import without_dropout


def from_objects(
    model: Any, tokenizer: Any, *, name: str, dtype: Dtype = "float32", gradient_checkpointing: bool = False
) -> LoadedModel:
    """A model object and its tokenizer, made ready for RL. The model is copied: the given one stays as it is."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    if not isinstance(plain, PreTrainedModel) or plain.get_output_embeddings() is None:
        raise LoadError(f"a {type(model).__name__} is no causal language model of transformers: give one, or its name")
    if not hasattr(tokenizer, "get_vocab"):
        raise LoadError(f"a {type(tokenizer).__name__} is no tokenizer of transformers: give the model's own")
    if plain is not model and (
        list(model.peft_config) != ["default"] or model.peft_config["default"].peft_type != "LORA"
    ):
        raise LoadError("the model carries something else than one LoRA adapter called default: merge it first")
    if getattr(plain, "is_quantized", False):
        raise LoadError("the model is quantised already: give its name, and policy.quantize")
    copied = cast_weights(copy.deepcopy(model).to("cpu"), getattr(torch, dtype))
    without_dropout(copied.config)
    for module in copied.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and "dropout" in key:
                setattr(module, key, 0.0)
    made = ready(copied, tokenizer, name=name, gradient_checkpointing=gradient_checkpointing)
    if plain is not model:
        for key, parameter in copied.named_parameters():
            parameter.requires_grad_("lora_" in key)
    return made
