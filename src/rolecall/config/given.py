"""Models that are given in Python in the place of a name."""

from typing import Any

GIVEN = "(given in Python)"
"""How config.json begins what it says of an object."""


class GivenModel(str):
    """A model object with its tokenizer. As a text, what config.json says of it."""

    model: Any
    """The transformers (or peft) model."""
    tokenizer: Any

    def __new__(cls, model: Any, tokenizer: Any) -> "GivenModel":
        made = super().__new__(cls, f"{GIVEN} {type(model).__name__}")
        made.model, made.tokenizer = model, tokenizer
        return made
