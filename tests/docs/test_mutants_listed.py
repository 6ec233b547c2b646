"""The list of mutants fits the code, the tests and the page; `make mutants-listed` runs it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def listed():
    spec = importlib.util.spec_from_file_location("mutants_listed", ROOT / "benchmarks" / "mutants_listed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTED = listed()


@pytest.mark.parametrize("mutant", LISTED.MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_changed_is_there_once_and_so_are_the_tests(mutant):
    LISTED.source(mutant, ROOT / "src")
    assert mutant.new != mutant.old
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / file).read_text()


def test_text_that_is_gone_is_an_error():
    with pytest.raises(SystemExit, match="occurs 0 times in recipes"):
        LISTED.source(LISTED.MUTANTS[0]._replace(old="no such text"), ROOT / "src")


def test_the_page_has_a_line_for_every_mutant():
    table = LISTED.PAGE.read_text().split(LISTED.BEGIN)[1].split(LISTED.END)[0]
    lines = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    assert [(name.removeprefix("| "), where) for name, where, _ in lines] == [
        (mutant.name, f"`{mutant.file}`") for mutant in LISTED.MUTANTS
    ]
