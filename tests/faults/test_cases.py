"""The table of faults names tests that exist, and the page of promises lists the same faults."""

import ast
from functools import cache
from pathlib import Path

import pytest
from cases import CASES

TESTS = Path(__file__).parents[1]


@cache
def functions(file):
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_case_is_left_out():
    assert list(CASES) == list(range(1, 39))


@pytest.mark.parametrize("number", CASES)
def test_what_shows_a_case_exists(number):
    for test in CASES[number].tests:
        file, _, name = test.partition("::")
        assert name in functions(file)


@pytest.mark.parametrize("number", CASES)
def test_the_page_lists_every_case_with_its_tests(number):
    page = (TESTS.parent / "docs" / "reliability.md").read_text().splitlines()
    (row,) = [line for line in page if line.startswith(f"| {number} | ")]
    assert CASES[number].fault in row
    for test in CASES[number].tests:
        assert test.split("/")[-1] in row
