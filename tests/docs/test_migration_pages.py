"""The tables of names on the pages for people who come from TRL and verl are the tables that settings are read by."""

import re
import shlex
from pathlib import Path

import pytest

from rolecall.cli import main
from rolecall.config.foreign_trl import TRL
from rolecall.config.foreign_verl import VERL
from rolecall.jobs.arguments import TRL_ARGUMENTS

DOCS = Path(__file__).parents[2] / "docs"
OURS = {"algorithm.gamma", "algorithm.lam"}
"""verl's names that are ours, too."""


def rows(page):
    """(names, what stands for them, where they differ) of each row of the tables of three columns."""
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith("| `") and len(cells) == 3:
            yield re.findall(r"`([^`]+)`", cells[0]), cells[1], cells[2]


@pytest.mark.parametrize(("page", "table"), [("from-trl.md", TRL), ("from-verl.md", VERL)])
def test_every_name_stands_on_the_page_with_what_it_is_here(page, table):
    by_name = {entry.name: entry for entry in table}
    shown = {name: (here, how) for names, here, how in rows(page) for name in names}
    beside = set(TRL_ARGUMENTS) - set(by_name) if table is TRL else OURS
    assert set(shown) == set(by_name) | beside
    for name, entry in by_name.items():
        here, how = shown[name]
        for key in entry.keys:
            assert f"`{key}`" in here, name
        if entry.unused:
            assert re.search("without effect|always|every step", f"{here} {how}"), name


def test_arguments_of_trl_stand_on_the_page_with_ours():
    shown = {name: here for names, here, _ in rows("from-trl.md") for name in names}
    for name, ours in TRL_ARGUMENTS.items():
        assert f"`{ours}`" in shown[name]


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md"])
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        words = shlex.split(block.replace("\\\n", " "))
        assert (words[0], words[-1]) == ("rolecall", "--dry-run")
        assert main(words[1:]) == 0
        assert "# the command line (" in capsys.readouterr().out
        once = ["1" if word == "50" else word.replace("steps=50", "steps=1") for word in words[1:-1]]
        assert once != words[1:-1]
        trains = ["--algorithm.entropy_coef", "0.01"]  # although an untrained model's answers all score 0
        assert main([*once, *trains, "--eval.rows", "4", "--quiet"]) == 0
