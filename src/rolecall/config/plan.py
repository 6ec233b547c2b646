"""Lines that the batch plans of several commands share."""

import json
import os
from pathlib import Path

CHUNK_LOGITS = 2**23
"""Logits that exist at a time while training, whatever the batch: 8M entries, 32 MB in fp32."""
TINY_VOCABULARY = 259


def passes_line(epochs: float, per_step: int) -> str:
    """The length of a run that is given in passes; how many rows there are is known when they are read."""
    return f"in all: {epochs:g} passes over the training rows, {epochs:g} x rows / {per_step} steps, rounded up"


def processes() -> int:
    """How many were started to train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_line(count: int, what: str) -> str:
    """How a step is shared by the processes that torchrun started, if it did."""
    ranks = processes()
    if ranks == 1:
        return "ranks: 1"
    return f"ranks: {ranks}, each with {count // ranks} to {-(-count // ranks)} of the {count} {what}"


def logits_line(model: str, token_budget: int) -> str:
    """What the logits of a micro-batch would take, and what they do take."""
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        return f"logits: at most {4 * CHUNK_LOGITS // 2**20} MB at a time, in chunks, whatever the vocabulary"
    whole, held = 4 * vocabulary * token_budget, 4 * min(CHUNK_LOGITS, vocabulary * token_budget)
    return (
        f"logits: {held / 2**20:.0f} MB at a time, in chunks (a whole micro-batch of {token_budget:,} tokens x "
        f"vocabulary {vocabulary:,} would take {whole / 2**20:,.0f} MB)"
    )


def vocabulary_of(model: str) -> int | None:
    """The size of a model's vocabulary, as far as it is known without loading anything."""
    if model == "tiny":
        return TINY_VOCABULARY
    path = Path(model).expanduser()
    for place in (path / "model" / "config.json", path / "config.json"):
        try:
            return int(json.loads(place.read_text())["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
