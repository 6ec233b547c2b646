"""docs/architecture.md names files, functions and lines of the code: they are all there, and are called as it is drawn."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from rolecall.cli import main
from rolecall.jobs import data
from rolecall.maths import advantages, losses
from rolecall.maths.roles import TrainRule
from rolecall.rewards.records import Scored
from rolecall.rollout.native import NativeEngine

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "rolecall"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DRAWN = [
    (len(space), file, name) for space, file, name in re.findall(r"^( +)([\w/]+\.py) +([\w.]+)", PAGE, re.MULTILINE)
]
"""(indentation, file, function) of each line of the drawing."""
STATIONS = [(file, name) for _, file, name in DRAWN]
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
    assert functions <= 12
    assert files <= 8


def drawn_stacks():
    """What each line of the drawing is called by, outermost first, and itself."""
    stacks, above = [], []
    for indentation, *station in DRAWN:
        above = [one for one in above if one[0] < indentation] + [(indentation, tuple(station))]
        stacks.append([station for _, station in above])
    return stacks


class Counting:
    """A reward that tells the answers to a prompt apart."""

    names = ("number",)

    def score(self, samples, *, state=None):
        stations("reward")
        return [Scored(scores={"number": float(s.sample_index)}, total=float(s.sample_index)) for s in samples]

    def take_metrics(self):
        return {}


ROOMS = ("cli", "jobs", "recipes", "train")
TRACED: list[tuple[str, list[tuple[str, str]]]] = []


def stations(landmark):
    """Note which functions of the drawn rooms are being called; functions inside a function are a part of it."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        # The table of losses is one of lambdas.
        if any(path.is_relative_to(SRC / room) for room in ROOMS) and name != "<lambda>":
            found.insert(0, (str(path.relative_to(SRC)), name))
        frame = frame.f_back
    TRACED.append((landmark, list(dict.fromkeys(found))))


def watch(monkeypatch, owner, name, counts=lambda *args: True):
    inner = getattr(owner, name)

    def traced(*args, **kwargs):
        if counts(*args):
            stations(name)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, traced)


def test_a_step_is_called_as_it_is_drawn(tmp_path, monkeypatch):
    """From the command to sampling, scoring, verdicts, advantage, the loss that has a gradient, and the optimiser."""
    TRACED.clear()
    monkeypatch.setattr(data, "open_reward", lambda *args, **kwargs: Counting())
    watch(monkeypatch, NativeEngine, "stream")
    watch(monkeypatch, TrainRule, "verdicts")
    watch(monkeypatch, advantages, "grpo")
    watch(monkeypatch, losses, "ppo_clip", lambda logprobs, *_: logprobs.requires_grad)
    watch(monkeypatch, torch.optim.AdamW, "step")
    small = "--model tiny --prompts 2 --samples 2 --sampling.max_new_tokens 4 --steps 1 --eval.every 0 --quiet"
    assert main(["rl", "--preset", "grpo", *small.split(), "--out", str(tmp_path / "run")]) == 0
    update = [name for name, _ in TRACED].index("step") + 1
    step = TRACED[:update]  # what follows are checks of the step
    assert [name for name, _ in step] == ["stream", "reward", "verdicts", "grpo", "ppo_clip", "step"]
    called = [tuple(stack[: depth + 1]) for _, stack in step for depth in range(len(stack))]
    assert list(dict.fromkeys(called)) == [tuple(stack) for stack in drawn_stacks()]


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
