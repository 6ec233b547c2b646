"""Objects that are given in Python in the place of a name."""

from typing import Any

from rolecall.errors import UserError

GIVEN = "(given in Python)"
"""How config.json begins what it says of an object."""


class GivenObject(str):
    """An object in the place of a name: rows, a model with its tokenizer, a reward. As a text, what config.json says."""

    value: Any

    def __new__(cls, about: str, value: Any) -> "GivenObject":
        made = super().__new__(cls, f"{GIVEN} {about}")
        made.value = value
        return made


def resolve_source(source: Any, what: str) -> Any:
    """The object if one was given, else the name. Raises if it was an object when the run began and is not given now."""
    if isinstance(source, GivenObject):
        return source.value
    if isinstance(source, str) and source.startswith(GIVEN):
        raise UserError(f"this run's {what} came from Python: resume it from Python too, with the same {what}")
    return source
