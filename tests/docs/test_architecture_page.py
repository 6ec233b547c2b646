"""docs/architecture.md names files, functions and lines of the code: they are all there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "rolecall"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STATIONS = re.findall(r"^ +([\w/]+\.py) +([\w.]+)", PAGE, re.MULTILINE)
"""(file, function) of each line of the drawing."""
PROSE = re.sub(r"^ *```.*?^ *```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
NAMED = [
    (file, name)
    for file, names in re.findall(r"`([\w/]+\.py)`((?:,? \(?(?:and )?`[\w.]+`\)?)*)", PROSE.replace("\n", " "))
    for name in re.findall(r"`([\w.]+)`", names) or [""]
]


def defined(path: Path) -> set[str]:
    """Functions, classes, methods and names at the top of a module."""
    tree = ast.parse(path.read_text())
    found = {
        target.id
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "name"), sorted({*STATIONS, *NAMED}))
def test_what_the_page_names_exists(file, name):
    assert (SRC / file).is_file()
    assert not name or name in defined(SRC / file)


def test_the_length_of_the_way_is_counted_right():
    functions, files = len(set(STATIONS)), len({file for file, _ in STATIONS})
    assert f"That is {functions} functions in {files} files." in PAGE


def test_quoted_lines_stand_in_the_file_named_before_them():
    quoted = re.findall(r"`([\w/]+\.py)`, `[\w.]+`[^`]*\n\n +```python\n +(.+)\n", PAGE)
    assert len(quoted) == PAGE.count("```python") == 3
    for file, line in quoted:
        assert line in (SRC / file).read_text(), line


def test_every_room_is_on_the_page():
    rooms = {path.parent.name for path in SRC.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/`", PAGE, re.MULTILINE))
    alone = {path.name for path in SRC.glob("[a-z]*.py")}
    assert alone <= set(re.findall(r"`(\w+\.py)`", PAGE))
