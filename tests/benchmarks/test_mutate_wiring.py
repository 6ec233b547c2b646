"""`make mutate-wiring` on a toy package: what it edits, what it leaves alone, and that its verdicts are those of the tests."""

import argparse
import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from mutants import mutants_of, sample
from mutate_wiring import State, explained, report, run

TOY = '''"""Prose."""
__all__ = ["half"]
TABLE = {"up": 1, "down": -1}


def half(x: int = 2, *, loud: bool = False) -> float:
    """Prose of 2 words."""
    if x < 0:
        raise ValueError("not below 0")
    log.info("half of 2")
    return x / 2


def step(way: str) -> int:
    return abs(TABLE[way]) * TABLE[way]
'''
SMALL = """TABLE = {"two": 2, "six": 6}


def half(x):
    return None if x < 0 else abs(x) / TABLE["two"]


def unused(a):
    return -a
"""
TEST = """import pytest
from toy_room.room.maths import TABLE, half

def test_half():
    assert half(4) == 2

@pytest.mark.parametrize("name", [name for name in TABLE if name != "two"])
def test_others(name):
    assert TABLE[name] < 9
"""


@pytest.fixture
def toy(tmp_path):
    """The state of a project of one file and one file of tests."""
    (tmp_path / "src/toy_room/room").mkdir(parents=True)
    (tmp_path / "src/toy_room/room/maths.py").write_text(SMALL)
    (tmp_path / "tests/room").mkdir(parents=True)
    (tmp_path / "tests/room/test_toy_room.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return State(tmp_path, package="toy_room")


def settings(**changed):
    given = {"rooms": ["room"], "tests": ["room"], "only": "", "share": 1.0, "seed": 0, "children": 1, "most": None}
    return argparse.Namespace(**given | changed)


def edits(source):
    return {(m.before, m.after) for m in mutants_of("toy.py", source.encode())}


def test_operators_arguments_tables_and_statements_are_edited():
    source = (
        'T = {"a": f, "b": g}\ndef f(x, y):\n    save(x.detach(), near=y)\n    return x if x in y and not y else -x\n'
    )
    changed = dict.fromkeys(after for _, after in edits(source))
    assert {"pass", 'T = {"b": g}', 'T = {"a": g, "b": g}', "save(x, near=y)", "save(x.detach())"} <= changed.keys()
    lines = {after for before, after in edits(source) if before.startswith("return")}
    assert "return x if x not in y and not y else -x" in lines
    assert "return x if x in y or not y else -x" in lines
    assert "return x if x in y and (y) else -x" in lines
    assert "return x if x in y and not y else (x)" in lines
    assert all(ast.parse(m.apply(source.encode())) for m in mutants_of("toy.py", source.encode()))


def test_prose_annotations_logs_and_raises_are_left_alone():
    touched = {before for before, _ in edits(TOY)}
    assert touched == {
        'TABLE = {"up": 1, "down": -1}',
        "def half(x: int = 2, *, loud: bool = False) -> float:",
        "if x < 0:",
        "return x / 2",
        "return abs(TABLE[way]) * TABLE[way]",
    }


def test_c_is_edited_outside_comments():
    source = "// 0 + 1\n#include <a.h>\nint f(int n) { return n + 1; /* n < 0 */ }\n"
    assert edits_c(source) == {
        "int f(int n) { return n - 1; /* n < 0 */ }",
        "int f(int n) { return n + 2; /* n < 0 */ }",
    }


def edits_c(source):
    return {m.after for m in mutants_of("toy.c", source.encode())}


def test_an_edit_elsewhere_in_the_file_moves_no_draw():
    before = mutants_of("toy.py", TOY.encode())
    after = mutants_of("toy.py", TOY.replace('"""Prose."""', '"""Prose\n\nof more lines."""').encode())
    drawn = [[m.key for m in sample(found, share=0.3, seed=0)] for found in (before, after)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != [m.key for m in sample(before, share=0.3, seed=1)]


def test_survivors_that_a_page_lists_are_explained(capsys):
    mutants = mutants_of("rolecall/room/maths.py", SMALL.encode())
    survivors = {m.key: {"noticed": False, "seconds": 1.0, "count": 3} for m in mutants}
    page = "The same either way:\n" + "".join(f"  - `{m.key}`\n" for m in mutants[1:])
    assert report(mutants, survivors, explained(page)) == 1
    printed = capsys.readouterr().out
    assert mutants[0].key in printed
    assert mutants[1].key not in printed


@pytest.mark.slow
def test_a_wrong_edit_is_noticed_an_equal_one_survives_and_nothing_is_run_twice(toy, capsys):
    mutants = run(settings(), toy)
    verdicts = {m.key.split(": ", 1)[1]: toy.results[m.key]["noticed"] for m in mutants}
    line = 'return None if x < 0 else abs(x) / TABLE["two"]'
    assert verdicts[f"{line} => {line.replace('/', '*')}"]
    table = 'TABLE = {"two": 2, "six": 6} => TABLE = '
    assert verdicts[f'{table}{{"two": 3, "six": 6}}']
    assert not verdicts[f"{table}{{\"two\": 2, 'XXsix': 6}}"]  # the name of a test is another one, and no test fails
    assert not verdicts[f"{line} => {line.replace('abs(x)', '(x)')}"]  # the same, since x is not below 0
    assert not verdicts["return -a => return (a)"]  # no test runs it
    zero = f"toy_room/room/maths.py::half: {line} => {line.replace('<', '<=')}"
    assert not toy.results[zero]["noticed"]
    assert (toy.source / "toy_room/room/maths.py").read_text() == SMALL

    lines = toy.results_path.read_text()
    run(settings(), State(toy.root, package="toy_room"))
    assert toy.results_path.read_text() == lines

    # With a test for it, what survived is run again; what was noticed is not.
    (toy.root / "tests/room/test_toy_room.py").write_text(TEST + "\ndef test_zero():\n    assert half(0) == 0\n")
    capsys.readouterr()
    run(settings(), again := State(toy.root, package="toy_room"))
    assert again.results[zero]["noticed"]
    assert "abs(x) *" not in capsys.readouterr().out
