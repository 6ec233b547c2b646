"""The text of single tokens, for people to look at. A token may be a piece of a character."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from rolecall.policy.tiny import byte_characters


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token writes, special tokens by name. A byte that is no whole character is written `\\xe2`."""
    return [_text(tokenizer, int(i)) for i in ids]


def _text(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:  # a row of the head that the tokenizer does not use
        return f"<unused {token}>"
    if "\ufffd" in text:
        known = _bytes_of_characters()
        if all(character in known for character in name):
            return bytes(known[character] for character in name).decode("utf-8", errors="backslashreplace")
        return str(name)  # <0xE2> of a tokenizer that falls back to bytes
    if name.startswith("▁") and not text.startswith(" "):
        return f" {text}"  # decoding drops the space in front of the first word
    return text


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}
