"""What single tokens write, for people to look at. A token may be a piece of a character."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from rolecall.policy.tiny import byte_characters

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How a tokenizer that falls back to bytes names one."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token writes, special tokens by name. A byte that is no whole character is written `\\xe2`."""
    return [piece.decode("utf-8", errors="backslashreplace") for piece in token_bytes(tokenizer, ids)]


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """What each token writes as UTF-8, special tokens by name. A character may be spread over several tokens."""
    known = {token: _bytes(tokenizer, token) for token in {int(i) for i in ids}}
    return [known[int(i)] for i in ids]


def _bytes(tokenizer: Any, token: int) -> bytes:
    name = None if token < 0 else tokenizer.convert_ids_to_tokens(token)
    if name is None:  # a row of the head that the tokenizer does not use, or an id that files declare in place of none
        return f"<unused {token}>".encode()
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        if byte := _FALLBACK.fullmatch(name):
            return bytes([int(byte[1], 16)])
        known = _bytes_of_characters()
        if all(character in known for character in name):
            return bytes(known[character] for character in name)
        return str(name).encode()
    if name.startswith("▁") and not text.startswith(" "):
        text = f" {text}"  # decoding drops the space in front of the first word
    return text.encode()


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}
