"""Readers of foreign bytes give a result or a sentence, whatever they read."""

import pytest
from fuzzed import MOST, READERS, fuzz

FOUND = {"rows-json": (1044,), "rows-parquet": (3236,), "rollouts": (1009,), "updates": (1007,)}
"""Seeds at which a reader once crashed, hung or said more than a sentence."""


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence_and_in_bounded_memory(name, tmp_path):
    assert fuzz(name, tmp_path, (*FOUND.get(name, ()), *range(120)))[1] <= MOST


def test_a_reader_that_takes_too_much_memory_is_caught(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "greedy", ("x", lambda path: path.write_bytes(b"x"), lambda path: b"x" * (2 * MOST)))
    with pytest.raises(AssertionError, match="greedy: seed 1"):
        fuzz("greedy", tmp_path, range(3))
