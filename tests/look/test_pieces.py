"""What the box of a token shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.look.pieces import spelt


@pytest.mark.parametrize(
    ("pieces", "boxes"),
    [
        ([b"a", b" b"], ["a", " b"]),
        ([b"\xe4", b"\xb8", b"\xad!"], ["e4…", "…b8…", "…ad 中!"]),
        ([b"x\xf0\x9f", b"\x98\x80y"], ["x f0 9f…", "…98 80 😀y"]),
        ([b"\xe4", b"A"], ["\\xe4", "A"]),  # begun and never gone on with
        ([b"\xff\xfe"], ["\\xff\\xfe"]),
        ([b"\xe4\xb8"], ["\\xe4\\xb8"]),  # cut off at the end of the answer
        ([b"\n", b"\t"], ["↵", "⇥"]),
        (["\u0301".encode()], ["◌\u0301"]),
        (["\u202e\x1b\x00\u200b".encode()], ["\\u202e\\x1b\\x00\\u200b"]),
        ([b"", b"a"], ["", "a"]),
        ([], []),
    ],
)
def test_boxes(pieces, boxes):
    assert [box for box, _ in spelt(pieces)] == boxes


def test_parts_of_a_character_say_so():
    begins, goes_on, ends = (note for _, note in spelt([b"\xe4", b"\xb8", b"\xad"]))
    assert begins == "Begins 中, which the next token continues."
    assert goes_on == "Part of 中, which the next tokens complete."
    assert ends == "Completes 中, which the tokens before it began."
    assert spelt([b"\xff"])[0][1] == "Holds a byte that is part of no character."
    assert spelt([b"whole"])[0][1] == ""


@given(st.text(st.characters(categories=["L", "N", "P", "S"])), st.data())
def test_however_a_text_is_cut_its_characters_appear_once_and_in_order(text, data):
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shown = "".join(box for box, _ in spelt(pieces))
    at = 0
    for character in text:
        at = shown.index(character, at) + 1
    assert len(spelt(pieces)) == len(pieces)
