"""Token pieces as text: a character that is spread over several tokens is shown on the last of them."""

import unicodedata
from collections.abc import Iterator, Sequence

from rolecall.visible import visible_token

_MORE = "…"
_SIGNS = {"\n": "↵", "\t": "⇥"}


def spelt(pieces: Sequence[bytes]) -> list[tuple[str, str]]:
    """For each piece what its box shows, and a note where it holds only part of a character.

    e4 | b8 | ad 21   ->   e4… | …b8… | …ad 中!
    """
    characters = list(_characters(b"".join(pieces)))
    shown, begin, first = [], 0, 0
    for piece in pieces:
        end = begin + len(piece)
        while first < len(characters) and characters[first][1] <= begin:
            first += 1
        last = first
        while last < len(characters) and characters[last][0] < end:
            last += 1
        shown.append(_box(piece, begin, end, characters[first:last]))
        begin = end
    return shown


def _characters(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(first byte, one past the last, character); a byte that is part of none stands alone, as a lone surrogate."""
    at = 0
    for character in data.decode("utf-8", "surrogateescape"):
        size = len(character.encode("utf-8", "surrogateescape"))
        yield at, at + size, character
        at += size


def _box(piece: bytes, begin: int, end: int, characters: Sequence[tuple[int, int, str]]) -> tuple[str, str]:
    text, notes, lead, tail = "", [], "", ""
    for start, stop, character in characters:
        if start < begin and stop > end:
            return f"{_MORE}{piece.hex(' ')}{_MORE}", f"Part of {_visible(character)}, which the next tokens complete."
        if start < begin:
            lead = f"{_MORE}{piece[: stop - begin].hex(' ')} "
            notes.append(f"Completes {_visible(character)}, which the tokens before it began.")
        if stop > end:
            tail = f"{' ' if text else ''}{piece[start - begin :].hex(' ')}{_MORE}"
            notes.append(f"Begins {_visible(character)}, which the next token continues.")
        else:
            text += character
    if any("\udc80" <= c <= "\udcff" for c in text):
        notes.append("Holds a byte that is part of no character.")
    return f"{lead}{_visible(text)}{tail}", " ".join(notes)


def _visible(text: str) -> str:
    """As `visible_token` without its quotes; a stray byte as `\\xe4`, a mark that combines on a circle of its own."""
    plain = "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else _SIGNS.get(c, c) for c in text)
    shown = visible_token(plain)[1:-1]
    return f"◌{shown}" if shown and unicodedata.combining(shown[0]) else shown
