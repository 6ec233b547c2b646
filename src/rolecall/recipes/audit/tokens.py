"""How an audit names tokens and texts in its evidence."""

import re
from collections.abc import Iterable
from typing import Any

from rolecall.policy.token_text import token_texts

_LONGEST = 60
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def named(tokenizer: Any, token: int) -> str:
    """A token with its id: `'<|im_end|>' (258)`."""
    return f"{token_texts(tokenizer, [token])[0]!r} ({token})"


def named_all(tokenizer: Any, ids: Iterable[int]) -> str:
    """Several tokens with their ids."""
    return ", ".join(named(tokenizer, i) for i in ids) or "none"


def quoted(text: Any) -> str:
    """A text as Python would write it, cut to a length that fits a line."""
    shown = text if isinstance(text, str) else str(text)
    return repr(shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…")


def share(part: int, whole: int) -> str:
    """`3 of 8 (38%)`."""
    return f"{part} of {whole} ({part / max(1, whole):.0%})"


def is_text(tokenizer: Any, token: int) -> bool:
    """True if the token is a piece of ordinary text; those made for a purpose are written `<…>` or `[…]`.

    Told by the name because a tokenizer marks as special whatever its settings call eos or pad, letters too.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    return name is not None and not _SPECIAL.fullmatch(name)


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that are no text, those too that the settings give no part to."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def encoded(tokenizer: Any, text: str) -> tuple[int, ...] | None:
    """The text's tokens and none around it; None if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair, which JSON can hold
        return None
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
