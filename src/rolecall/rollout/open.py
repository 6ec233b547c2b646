"""The engine for a loaded model."""

import logging

import torch

from rolecall.errors import UserError
from rolecall.policy.families import unsupported
from rolecall.policy.load import LoadedModel
from rolecall.rollout.engine import Engine
from rolecall.rollout.hf import HFEngine
from rolecall.rollout.native import NativeEngine

_ENGINES: dict[str, type[NativeEngine] | type[HFEngine]] = {"native": NativeEngine, "hf": HFEngine}
_logger = logging.getLogger(__name__)


def open_engine(
    loaded: LoadedModel,
    *,
    name: str = "auto",
    dtype: torch.dtype | None = None,
    max_rows: int = 64,
    version: int = 0,
) -> Engine:
    """An engine with a copy of the model's weights in `dtype` (default: the model's own).

    `auto` is the native engine where it can run the model, else the hf engine.
    """
    place = loaded.model.device.type
    elsewhere = f"it samples on the CPU, and the model is on {place}" if place != "cpu" else None
    if name == "native" and elsewhere:
        raise UserError(
            f"the native engine cannot sample from {loaded.name}: {elsewhere}; use --engine.name hf, or sample elsewhere with "
            "--engine.workers or --engine.servers"
        )
    if name == "auto":
        reason = elsewhere or unsupported(loaded.model)
        if reason is not None:
            _logger.info("sampling from %s with the hf engine, not the native one: %s", loaded.name, reason)
        name = "native" if reason is None else "hf"
    if name not in _ENGINES:
        raise ValueError(f"unknown engine {name!r}; choose 'auto', 'native' or 'hf'")
    return _ENGINES[name](
        loaded.model,
        loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        context_length=loaded.context_length,
        dtype=dtype,
        max_rows=max_rows,
        version=version,
    )
