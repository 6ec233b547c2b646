"""A model's weights as Hugging Face files: one, or several and their index if it is large.

What lies in parts on the ranks of a job is gathered a file at a time, so that no rank ever holds the whole.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rolecall.policy.sharded import gathered

FILE_BYTES = 5 * 10**9
"""The weights of a larger model are split into files of at most so many bytes; a tensor is never split."""


def write_files(weights: Mapping[str, Tensor], directory: Path | None) -> None:
    """Write tensors into `model.safetensors`, or `model-00001-of-….safetensors` and an index.

    Of tensors that lie in parts all ranks must ask; those without a directory only help to gather.
    """
    shapes = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in weights.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        held = gathered({name: weights[name] for name in names}, keep=directory is not None)
        if directory is not None:
            save_file(held, directory / file, metadata={"format": "pt"})
    if split.is_sharded and directory is not None:
        about = {"total_parameters": sum(w.numel() for w in weights.values()), **split.metadata}
        text = json.dumps({"metadata": about, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(text + "\n")


def outline_of(model: Any) -> Any:
    """The same model without weights."""
    with torch.device("meta"):
        return getattr(type(model), "__wrapped__", type(model))(copy.deepcopy(model.config))


def files_hold(model: Any) -> list[str] | None:
    """The names under which transformers saves a model's tensors, if they are those that it has; None if some are converted."""
    state = model.state_dict()
    saved = revert_weight_conversion(model, dict(state))
    if saved.keys() != state.keys() or any(saved[name] is not state[name] for name in state):
        return None
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    return [name for name in state if name not in left_out]
