"""GGUF files as ordinary transformers models."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolecall.policy.headers import FormatError, check_gguf


def read_gguf(path: Path) -> tuple[Any, Any]:
    """The file's model, de-quantised to float32, and its tokenizer. What is wrong with the file raises what it likes."""
    _check(path)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The model thinks it is quantised and refuses to be saved, so its weights move into one that never was.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    return plain, tokenizer


def _check(path: Path) -> None:
    """Raise FormatError if the file is cut short, or claims more layers than it has tensors for."""
    check_gguf(path)
    try:
        found = GGUFReader(path)
    except Exception as error:  # it reads what the file says, wherever that leads
        raise FormatError(f"{path} is cut short or damaged") from error
    for name, field in found.fields.items():
        if name.endswith(".block_count") and int(field.contents()) > len(found.tensors):
            raise FormatError(f"{path} claims {field.contents():,} layers but has {len(found.tensors):,} tensors")
