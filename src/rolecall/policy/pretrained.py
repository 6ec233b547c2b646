"""transformers' `from_pretrained` as training needs it: no dropout, no foreign code, no tensor that is not in the files."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rolecall.errors import UserError

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_log = logging.getLogger("rolecall")


class LoadError(UserError):
    """A model that cannot be loaded, in one sentence: what, where, what to do."""


def read_pretrained(
    auto_class: Any,
    name: str,
    *,
    dtype: Dtype,
    attention: Attention = "auto",
    trust_remote_code: bool = False,
    other_tensors: bool = False,
) -> Any:
    """`auto_class.from_pretrained` without dropout; a tensor that the files lack is an error, not a random matrix.

    `other_tensors` says that the files are known to hold more than is read, so transformers need not report it.
    """
    with no_progress_bars(), _errors_only() if other_tensors else nullcontext():
        config = without_dropout(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code))
        if auto_class is AutoModelForCausalLM:
            _make_causal(config)

        def read(implementation: str) -> Any:
            return auto_class.from_pretrained(
                name,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=implementation,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )

        try:
            model, report = read("sdpa" if attention == "auto" else attention)
        except ValueError as error:
            if attention != "auto" or "scaled_dot_product_attention" not in str(error):
                raise
            model, report = read("eager")
            _log.info("model %s: its attention is eager, because %s has no sdpa", name, type(model).__name__)
    if report["missing_keys"]:
        raise LoadError(f"model {name!r}: tensor {min(report['missing_keys'])!r} is not in its files; copy it again")
    own_memory(model)
    return model


def _make_causal(config: Any) -> None:
    """Turn off, in place, what a family's configuration keeps for other uses than a causal language model."""
    for part in (config, config.get_text_config()):
        for flag in ("is_decoder", "causal"):  # BERT and its kin, XLM: they attend to both sides unless told so
            if getattr(part, flag, None) is False:
                setattr(part, flag, True)
        if getattr(part, "rescale_every", 0):
            part.rescale_every = 0  # RWKV halves its weights in place when it stops training, for fp16


def without_dropout(config: Any) -> Any:
    """The configuration with every dropout rate at 0, set before the modules are built because they copy the rates."""
    for part in (config, config.get_text_config()):
        for key, value in list(vars(part).items()):
            if part.model_type == "phimoe" and "jitter" in key:
                continue  # there it is a threshold of the router, noise or not
            if isinstance(value, float) and any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter")):
                setattr(part, key, 0.0)
    return config


def own_memory(model: torch.nn.Module) -> None:
    """Copy the parameters, in place, out of the file they are mapped from.

    A file may lie at any address, and sums come out differently, in the last bit, where memory is not aligned: what is
    loaded would not score exactly as what was saved. A mapped file must also not change while it is in use.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@contextmanager
def load_errors(name: str, sentence: Callable[[str], str]) -> Iterator[None]:
    """What transformers raises while it builds what a model's files say, wherever that leads, as a LoadError with the
    sentence for the first line of it."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"model {name!r} brings Python code of its own, which is not run: read it and, if you trust it, "
                "give --policy.trust_remote_code"
            ) from error
        raise LoadError(sentence(first_line(error))) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """No progress bars of transformers for the time of the `with`."""
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
