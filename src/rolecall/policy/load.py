"""Models by name: the built-in `tiny`, a local directory, a GGUF file, or a Hugging Face hub id.

Whatever the source, the result is an ordinary transformers causal language model made ready for RL: no dropout (old and
new log-probs must agree), no key-value cache, every embedding row trainable, all weights finite. Only safetensors and
GGUF are read; a pickle can run code when it is opened.
"""

import copy
import hashlib
import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rolecall.config.parts import LoadOptions
from rolecall.policy import weight_files
from rolecall.policy.gguf import read_gguf
from rolecall.policy.headers import FormatError, check_config, check_safetensors
from rolecall.policy.pretrained import (
    DTYPES,
    Attention,
    first_line,
    load_errors,
    no_progress_bars,
    read_pretrained,
    without_dropout,
)
from rolecall.policy.pretrained import Dtype as Dtype
from rolecall.policy.pretrained import LoadError as LoadError
from rolecall.policy.tiny import tiny_model, tiny_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A causal language model with all that is needed to sample from it and to train it."""

    model: PreTrainedModel
    """The transformers causal language model (or a peft wrapper around one)."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer. It may have no pad token: padding is never recognised by its id."""
    stop_ids: tuple[int, ...]
    """Ids that end a turn: the tokenizer's own first, then those of the generation config."""
    context_length: int
    """Positions the model can attend to."""
    name: str
    """The name it was loaded by."""
    has_chat_template: bool
    """False: give prompts as plain text."""


def load(
    name: str | Path,
    *,
    dtype: Dtype = "float32",
    gradient_checkpointing: bool = False,
    attention: Attention = "auto",
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
) -> LoadedModel:
    """Load a model by name: `tiny`, a directory, a `.gguf` file, or a hub id.

    `attention` is what transformers computes it with: sdpa where the model has it, else eager. Code that a model brings
    is run only with `trust_remote_code`.
    A GGUF file is converted once and kept under `cache_dir` (default: $ROLECALL_CACHE, else ~/.cache/rolecall).
    """
    if dtype not in DTYPES:
        raise LoadError(f"unknown dtype {dtype!r}; choose one of {', '.join(map(repr, DTYPES))}")
    name = str(name)
    path = Path(name).expanduser()
    if name == "tiny":
        model, tokenizer = cast_weights(tiny_model(), DTYPES[dtype]), tiny_tokenizer()
    elif path.suffix == ".gguf":
        model, tokenizer = _read(str(_converted_gguf(path, cache_dir)), dtype, attention, False)
    elif name and path.is_dir():
        model, tokenizer = _read(str(path), dtype, attention, trust_remote_code)
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise LoadError(f"model {name!r}: no such directory; give a model directory, a .gguf file, a hub id, or 'tiny'")
    else:
        model, tokenizer = _read(name, dtype, attention, trust_remote_code)
    return ready(model, tokenizer, name=name, gradient_checkpointing=gradient_checkpointing)


def from_objects(
    model: Any, tokenizer: Any, *, name: str, dtype: Dtype = "float32", gradient_checkpointing: bool = False
) -> LoadedModel:
    """A model object and its tokenizer, made ready for RL. The model is copied: the given one stays as it is."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    if not isinstance(plain, PreTrainedModel) or plain.get_output_embeddings() is None:
        raise LoadError(
            f"a {type(model).__name__} is not a causal language model of transformers: give one, or its name"
        )
    if not hasattr(tokenizer, "get_vocab"):
        raise LoadError(f"a {type(tokenizer).__name__} is not a tokenizer of transformers: give the model's own")
    if plain is not model and (
        list(model.peft_config) != ["default"] or model.peft_config["default"].peft_type != "LORA"
    ):
        raise LoadError("the model carries something else than one LoRA adapter called default: merge it first")
    if getattr(plain, "is_quantized", False):
        raise LoadError("the model is quantised already: give its name, and policy.quantize")
    copied = cast_weights(copy.deepcopy(model).to("cpu"), DTYPES[dtype])
    without_dropout(copied.config)
    for module in copied.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and "dropout" in key:
                setattr(module, key, 0.0)
    loaded = ready(copied, tokenizer, name=name, gradient_checkpointing=gradient_checkpointing)
    if plain is not model:
        for key, parameter in copied.named_parameters():
            parameter.requires_grad_("lora_" in key)
    return loaded


def ready(model: Any, tokenizer: Any, *, name: str, gradient_checkpointing: bool) -> LoadedModel:
    """A model and its tokenizer, made ready for RL in place and checked."""
    check_finite(model, where=name)
    make_trainable(model, gradient_checkpointing=gradient_checkpointing)
    _check_vocabulary(model, tokenizer, where=name)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids(model, tokenizer),
        context_length=_context_length(model, tokenizer),
        name=name,
        has_chat_template=tokenizer.chat_template is not None,
    )


def reading(options: LoadOptions) -> dict[str, Any]:
    """The options as keywords of `load`."""
    return {"attention": options.attention, "trust_remote_code": options.trust_remote_code}


def save(loaded: LoadedModel, directory: str | Path, *, weights: dict[str, Any] | None = None) -> None:
    """Write the model and its tokenizer in Hugging Face layout, for any `from_pretrained` to read; with `weights`, these in
    place of its own."""
    save_model(loaded.model, directory, weights)
    loaded.tokenizer.save_pretrained(directory)


def save_about(loaded: LoadedModel, directory: str | Path) -> None:
    """Write the model's configuration and its tokenizer, without weights."""
    loaded.model.config.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)


def save_model(model: PreTrainedModel, directory: str | Path, weights: dict[str, Any] | None = None) -> None:
    """Write config and safetensors, with the cache on that training turns off: it is needed to generate. Whichever rank asks
    writes, which transformers leaves to the first."""
    model.config.use_cache = True
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        with no_progress_bars():
            model.save_pretrained(directory, state_dict=weights, max_shard_size=weight_files.FILE_BYTES)
    finally:
        model.config.use_cache = False
        vars(model).pop("should_save_on_this_rank")


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where converted models are kept: the given directory, else $ROLECALL_CACHE, else ~/.cache/rolecall."""
    try:
        return Path(cache_dir or os.environ.get("ROLECALL_CACHE") or "~/.cache/rolecall").expanduser()
    except RuntimeError as error:
        raise LoadError(f"user {os.geteuid()} has no home directory; set ROLECALL_CACHE, or HOME") from error


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The union of the tokenizer's end-of-text id and all of the generation config's, which may be an int or a list."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    declared = declared if isinstance(declared, list | tuple) else [declared]
    return tuple(dict.fromkeys(int(i) for i in (tokenizer.eos_token_id, *declared) if i is not None))


def make_trainable(model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> None:
    """Turn off, in place, what makes two forward passes differ or a gradient vanish."""
    model.config.use_cache = False
    stop_dropout(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and "Position" not in type(module).__name__:
            # transformers sets it to the pad id and torch then drops that row's gradient: with pad == eos, as in many
            # models, the stop token's input embedding would silently never learn.
            module.padding_idx = None
    model.requires_grad_(True)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only; without dropout the numbers are the same


def stop_dropout(model: torch.nn.Module) -> None:
    """Set every dropout layer to 0, in place."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def cast_weights(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters in place and leave the buffers alone.

    `model.to(dtype)` casts buffers too: rotary frequencies in bfloat16 turn every position by a slightly wrong angle,
    while the same model read from disk keeps them in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def check_finite(model: torch.nn.Module, *, where: str) -> None:
    """Raise LoadError naming the first tensor that holds NaN or inf."""
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise LoadError(
                f"model {where!r}: tensor {key!r} holds NaN or inf; the weights are broken, download them again"
            )


def check_directory(directory: Path) -> None:
    """Raise LoadError unless the directory has a config and whole safetensors weights."""
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise LoadError(f"{str(directory)!r} holds a LoRA adapter: load its base model, then `lora.load_adapter`")
        raise LoadError(f"model {str(directory)!r}: config.json is missing; is this a model directory?")
    shards = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = [directory / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"model {str(directory)!r}: {index.name} is damaged; copy the model again") from error
    if not shards:
        pickles = [p.name for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
        if pickles:
            raise LoadError(
                f"model {str(directory)!r} has its weights in {pickles[0]}: Pickle is never read, convert it to safetensors"
            )
        raise LoadError(f"model {str(directory)!r}: no safetensors weights; is the copy complete?")
    tensors = 0
    for shard in shards:
        try:
            tensors += check_safetensors(shard)
        except (FormatError, OSError) as error:
            raise LoadError(
                f"model {str(directory)!r}: {shard.name} is missing, cut short or damaged; copy it again ({error})"
            ) from error
    try:
        check_config(directory / "config.json", tensors=tensors)
    except FormatError as error:
        raise LoadError(f"model {str(directory)!r}: its config.json cannot be read, copy it again ({error})") from error


def _check_hub(name: str) -> None:
    """Say at once that a model is not here and the hub cannot be reached, instead of after many tries."""
    try:
        known = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError as error:  # no hub id at all
        raise LoadError(_not_had(name, first_line(error))) from error
    if known or constants.HF_HUB_OFFLINE or getproxies():
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LoadError(_not_had(name, f"{host}: {error.strerror}")) from error


def _not_had(name: str, why: str) -> str:
    return (
        f"model {name!r} is neither 'tiny' nor a local directory or .gguf file, and cannot be had from the "
        f"Hugging Face hub; check the name and the connection ({why})"
    )


def _read(
    name: str, dtype: Dtype, attention: Attention, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    local = Path(name).is_dir()
    if local:
        check_directory(Path(name))
    else:
        _check_hub(name)

    def unreadable(why: str) -> str:
        return f"model {name!r} cannot be read as a causal language model: {why}" if local else _not_had(name, why)

    with load_errors(name, unreadable):
        model = read_pretrained(
            AutoModelForCausalLM, name, dtype=dtype, attention=attention, trust_remote_code=trust_remote_code
        )
    with load_errors(
        name, lambda why: f"model {name!r}: its tokenizer cannot be read, add the tokenizer files ({why})"
    ):
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _converted_gguf(path: Path, cache_dir: str | Path | None) -> Path:
    """The directory that holds the file as safetensors, keyed by the file's content. Made aside, then renamed."""
    if not path.is_file():
        raise LoadError(f"model {str(path)!r}: no such file; give the path of a .gguf file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_root(cache_dir) / "gguf" / digest
    if target.is_dir():
        return target
    with load_errors(str(path), lambda why: f"model {str(path)!r} cannot be read as GGUF: {why}"), no_progress_bars():
        model, tokenizer = read_gguf(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{digest[:16]}-", dir=target.parent))
    try:
        save_model(model, aside)
        tokenizer.save_pretrained(aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was quicker, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    head = model.get_output_embeddings()
    rows, needed = head.weight.shape[0], 1 + max(tokenizer.get_vocab().values())
    if needed > rows:
        raise LoadError(
            f"model {where!r}: its tokenizer has ids up to {needed - 1} but the head only {rows} rows; "
            "use the tokenizer that belongs to it, or resize the embeddings and save it again"
        )


def _context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = int(declared or tokenizer.model_max_length)
    # Sparse attention that keeps the best k tokens chooses differently beside padding once there are more than k.
    length = min(length, getattr(model.config.get_text_config(), "index_topk", None) or length)
    for module in model.modules():
        table, pad = getattr(module, "position_embeddings", None), getattr(module, "padding_idx", None)
        if isinstance(table, torch.nn.Embedding) and isinstance(pad, int):
            length = min(length, table.num_embeddings - pad - 1)  # RoBERTa counts positions from its pad id on
    return length
