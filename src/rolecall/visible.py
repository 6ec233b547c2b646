"""Text that a model wrote, made safe to show: what would act on it or hide in it is shown as an escape."""

import unicodedata

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_JOINERS = "\u200c\u200d"


def visible_text(text: str) -> str:
    """For reading: line breaks, tabs and the joiners of scripts and emoji stay; controls and direction marks do not."""
    return "".join(c if c in "\n\t" or c in _JOINERS or not _hidden(c) else _escape(c) for c in text)


def visible_token(text: str) -> str:
    """For looking closely, between quotes: all that cannot be seen is escaped, spaces other than the common one too.

    A byte that is no whole character comes as `\\xe2` already, so a backslash is not doubled.
    """
    return f"'{''.join(_escape(c) if _hidden(c) or (c.isspace() and c != ' ') else c for c in text)}'"


def _hidden(character: str) -> bool:
    """Controls, format characters (ESC, U+202E …), surrogates, private and unassigned ones, line separators."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
