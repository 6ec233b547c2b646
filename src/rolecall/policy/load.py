"""Models by name: the built-in `tiny`, a local directory, a GGUF file, or a Hugging Face hub id.

Whatever the source, the result is an ordinary transformers causal language model made ready for RL: no dropout (old and
new log-probs must agree), no key-value cache, every embedding row trainable, all weights finite. Only safetensors and
GGUF are read; a pickle can run code when it is opened.
"""

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rolecall.errors import UserError
from rolecall.policy.tiny import tiny_model, tiny_tokenizer

Dtype = Literal["float32", "bfloat16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
"""What transformers raises on a model it cannot read."""


class LoadError(UserError):
    """A model that cannot be loaded, in one sentence: what, where, what to do."""


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
    cache_dir: str | Path | None = None,
) -> LoadedModel:
    """Load a model by name: `tiny`, a directory, a `.gguf` file, or a hub id.

    A GGUF file is converted once and kept under `cache_dir` (default: $ROLECALL_CACHE, else ~/.cache/rolecall).
    """
    if dtype not in _DTYPES:
        raise LoadError(f"unknown dtype {dtype!r}; choose one of {', '.join(map(repr, _DTYPES))}")
    name = str(name)
    path = Path(name).expanduser()
    if name == "tiny":
        model, tokenizer = cast_weights(tiny_model(), _DTYPES[dtype]), tiny_tokenizer()
    elif path.suffix == ".gguf":
        model, tokenizer = _read_directory(str(_converted_gguf(path, cache_dir)), dtype=dtype)
    elif name and path.is_dir():
        model, tokenizer = _read_directory(str(path), dtype=dtype)
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise LoadError(f"model {name!r}: no such directory; give a model directory, a .gguf file, a hub id, or 'tiny'")
    else:
        model, tokenizer = _read(name, dtype=dtype)
    return ready(model, tokenizer, name=name, gradient_checkpointing=gradient_checkpointing)


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


def save(loaded: LoadedModel, directory: str | Path) -> None:
    """Write the model and its tokenizer in Hugging Face layout, for any `from_pretrained` to read."""
    save_model(loaded.model, directory)
    loaded.tokenizer.save_pretrained(directory)


def save_model(model: PreTrainedModel, directory: str | Path) -> None:
    """Write config and safetensors. Who loads them to generate wants the cache that training turns off."""
    model.config.use_cache = True
    try:
        with _no_progress_bars():
            model.save_pretrained(directory)
    finally:
        model.config.use_cache = False


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where converted models are kept: the given directory, else $ROLECALL_CACHE, else ~/.cache/rolecall."""
    return Path(cache_dir or os.environ.get("ROLECALL_CACHE") or "~/.cache/rolecall").expanduser()


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
        if isinstance(module, torch.nn.Embedding):
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


def own_memory(model: torch.nn.Module) -> None:
    """Copy the parameters, in place, out of the file they are mapped from.

    A file may lie at any address, and sums come out differently, in the last bit, where memory is not aligned: what is
    loaded would not score exactly as what was saved. A mapped file must also not change while it is in use.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def without_dropout(config: Any) -> Any:
    """The configuration with every dropout rate at 0, set before the modules are built because they copy the rates."""
    for part in (config, config.get_text_config()):
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter")):
                setattr(part, key, 0.0)
    return config


def check_finite(model: torch.nn.Module, *, where: str) -> None:
    """Raise LoadError naming the first tensor that holds NaN or inf."""
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"model {where!r}: tensor {key!r} holds NaN or inf; the weights are broken, get them anew")


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
    for shard in shards:
        try:
            with safe_open(shard, framework="pt"):
                pass  # opening compares the header with the size of the file
        except (SafetensorError, OSError) as error:
            raise LoadError(
                f"model {str(directory)!r}: {shard.name} is missing, cut short or damaged; copy it again"
            ) from error


def read_pretrained(auto_class: Any, name: str, *, dtype: Dtype, other_tensors: bool = False) -> Any:
    """`auto_class.from_pretrained` without dropout; a tensor that the files lack is an error, not a random matrix.

    `other_tensors` says that the files are known to hold more than is read, so transformers need not report it.
    """
    with _no_progress_bars(), _errors_only() if other_tensors else nullcontext():
        config = without_dropout(AutoConfig.from_pretrained(name))
        model, report = auto_class.from_pretrained(
            name,
            config=config,
            dtype=_DTYPES[dtype],
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        raise LoadError(f"model {name!r}: tensor {min(report['missing_keys'])!r} is not in its files; copy it again")
    own_memory(model)
    return model


def _read_directory(directory: str, *, dtype: Dtype) -> tuple[Any, Any]:
    check_directory(Path(directory))
    return _read(directory, dtype=dtype)


def _check_hub(name: str) -> None:
    """Say at once that a model is not here and the hub cannot be reached, instead of after many tries."""
    try:
        known = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError as error:  # no hub id at all
        raise _not_had(name, _first_line(error)) from error
    if known or constants.HF_HUB_OFFLINE or getproxies():
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise _not_had(name, f"{host}: {error.strerror}") from error


def _not_had(name: str, why: str) -> LoadError:
    return LoadError(
        f"model {name!r} is neither 'tiny' nor a local directory or .gguf file, and cannot be had from the "
        f"Hugging Face hub; check the name and the connection ({why})"
    )


def _read(name: str, *, dtype: Dtype) -> tuple[Any, Any]:
    local = Path(name).is_dir()
    if not local:
        _check_hub(name)
    try:
        model = read_pretrained(AutoModelForCausalLM, name, dtype=dtype)
    except LoadError:
        raise
    except _READ_ERRORS as error:
        if local:
            raise LoadError(
                f"model {name!r} cannot be read as a causal language model: {_first_line(error)}"
            ) from error
        raise _not_had(name, _first_line(error)) from error
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except _READ_ERRORS as error:
        raise LoadError(
            f"model {name!r}: its tokenizer cannot be read, add the tokenizer files ({_first_line(error)})"
        ) from error


def _converted_gguf(path: Path, cache_dir: str | Path | None) -> Path:
    """The directory that holds the file as safetensors, keyed by the file's content. Made aside, then renamed."""
    if not path.is_file():
        raise LoadError(f"model {str(path)!r}: no such file; give the path of a .gguf file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_root(cache_dir) / "gguf" / digest
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{digest[:16]}-", dir=target.parent))
    try:
        _convert_gguf(path, aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was quicker, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _convert_gguf(path: Path, directory: Path) -> None:
    """Write the file's weights, de-quantised to float32, and its tokenizer in Hugging Face layout."""
    try:
        with _no_progress_bars():
            source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            tokenizer = AutoTokenizer.from_pretrained(**source)
            read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except _READ_ERRORS as error:
        raise LoadError(f"model {str(path)!r} cannot be read as GGUF: {_first_line(error)}") from error
    # The model thinks it is quantised and refuses to be saved, so its weights move into one that never was.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    settings.pop("_model_name_or_path", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    save_model(plain, directory)
    tokenizer.save_pretrained(directory)


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
    return int(declared or tokenizer.model_max_length)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Reading a model is not worth a progress bar on everybody's terminal."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _errors_only() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
