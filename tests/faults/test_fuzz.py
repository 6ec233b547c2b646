"""Readers of foreign bytes give a result or a sentence, whatever they read."""

import pytest
from fuzzed import READERS, attempt

FOUND = {"rows-json": (1044,), "rows-parquet": (3236,), "rollouts": (1009,), "updates": (1007,)}
"""Seeds at which a reader once crashed, hung or said more than a sentence."""


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name, tmp_path):
    for seed in (*FOUND.get(name, ()), *range(120)):
        attempt(name, tmp_path, seed)
