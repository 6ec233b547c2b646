"""What single tokens write, whatever kind of tokenizer they are of."""

from types import SimpleNamespace

import pytest

from rolecall.policy.tiny import byte_characters, tiny_tokenizer
from rolecall.policy.token_text import token_bytes, token_texts


def tokenizer_of(name, text):
    """One token of that name, which decodes to that text."""
    return SimpleNamespace(convert_ids_to_tokens=lambda token: name, decode=lambda ids, **how: text)


@pytest.mark.parametrize(
    ("name", "text", "written"),
    [
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("XX<0xE2>", "\ufffd", b"XX<0xE2>"),
        ("â", "\ufffd", b"\xe2"),
        ("®", "\ufffd", b"\xae"),
        ("®漢", "\ufffd", "®漢".encode()),
        ("▁word", "word", b" word"),
        ("<|im_end|>", "<|im_end|>", b"<|im_end|>"),
        (None, "", b"<unused 7>"),
    ],
)
def test_a_token_writes_its_bytes(name, text, written):
    assert token_bytes(tokenizer_of(name, text), [7]) == [written]


def test_pieces_of_a_character_are_shown_as_bytes():
    ids = tiny_tokenizer()("é", add_special_tokens=False)["input_ids"]
    assert token_texts(tiny_tokenizer(), ids) == ["\\xc3", "\\xa9"]


def test_printable_bytes_are_their_own_characters_and_all_differ():
    found = byte_characters()
    assert [found[b] for b in (0x21, 0x7E, 0xA1, 0xAC, 0xAE, 0xFF)] == ["!", "~", "¡", "¬", "®", "ÿ"]
    assert len(set(found)) == 256
