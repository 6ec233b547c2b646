"""The front pages keep their word: links and folders exist, both languages show the same code."""

import ast
import re
from pathlib import Path

import pytest

from rolecall.cli.commands import COMMANDS, imported
from rolecall.config.schema import schema
from rolecall.maths.roles import Role, Verdict

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "README.zh-CN.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [text for kind, text in _BLOCK.findall((ROOT / page).read_text()) if kind == language]


def shell_lines(page):
    """The commands of a page's shell blocks; a backslash at the end goes on."""
    for block in blocks(page, "bash"):
        yield from block.replace("\\\n", " ").strip().splitlines()


def test_every_command_stands_in_the_table():
    for page in ("README.md", "README.zh-CN.md"):
        assert set(re.findall(r"^\| `rolecall ([\w-]+)`", (ROOT / page).read_text(), re.MULTILINE)) == {
            command.name for command in COMMANDS
        }


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in ("README.md", "docs/quickstart.md"):
        for line in shell_lines(page):
            if line.startswith("make "):
                assert line.split()[1] in targets


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    text = _BLOCK.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#")):
            assert ((ROOT / page).parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_tree_is_the_tree(page):
    (tree,) = [text for text in blocks(page, "") if text.startswith("src/rolecall/")]
    shown = {line.split()[0].rstrip("/") for line in tree.splitlines()[1:]}
    folders = {p.name for p in (ROOT / "src/rolecall").iterdir() if p.is_dir() and (p / "__init__.py").is_file()}
    assert shown == folders | {"types.py"}


def test_both_languages_show_the_same_commands_and_code():
    for language in ("bash", "python"):
        assert blocks("README.md", language) == blocks("README.zh-CN.md", language)
    sizes = [(ROOT / page).read_text().count("\n## ") for page in ("README.md", "README.zh-CN.md")]
    assert sizes[0] == sizes[1]
    names = [set(re.findall(r"`([^`]+)`", _BLOCK.sub("", (ROOT / p).read_text()))) for p in PAGES[:2]]
    assert names[0] == names[1]
    for page in (ROOT / "docs/zh").glob("*.md"):
        pages = [str(p.relative_to(ROOT)) for p in (ROOT / "docs" / page.name, page)]
        english, chinese = (_BLOCK.findall((ROOT / p).read_text()) for p in pages)
        assert english == chinese, page.name


def test_the_page_of_roles_shows_what_python_prints(capsys):
    (code,) = blocks("docs/roles.md", "python")
    exec(code, {})
    eligible, verdicts = capsys.readouterr().out.splitlines()
    assert [word == "True" for word in re.findall("True|False", eligible)] == [False, True, True, True, False]
    assert ", ".join(ast.literal_eval(verdicts)) in code
    for table, members in (("role", Role), ("verdict", Verdict)):
        rows = (ROOT / "docs/roles.md").read_text().split(f"| {table} |", 1)[1]
        assert set(re.findall(r"^\| `(\w+)`", rows.split("\n\n")[0], re.MULTILINE)) == {m.name for m in members}


def test_every_page_is_in_the_sites_navigation():
    named = set(re.findall(r"[\w/+.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_workflows_call_make_targets_that_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / ".ci/run", ROOT / "AGENTS.md"]
    words = [found for file in files for found in re.findall(r"\bmake ([a-z -]+)|\btarget: \[(.*)\]", file.read_text())]
    called = [word for one, several in words for word in (one + several.replace(",", " ")).split()]
    assert {"check", "test-vllm"} < set(called)
    assert set(called) <= set(targets)


@pytest.mark.parametrize("page", PAGES)
def test_python_on_a_page_is_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", ["docs/rewards.md", "docs/data.md"])
def test_the_snippets_of_a_page_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = blocks(page, "python")
    assert len(snippets) >= 3
    scope = {"__name__": "__main__"}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), scope)


@pytest.mark.filterwarnings("ignore:the rows or the environment bring tools")  # tiny's template shows none
@pytest.mark.parametrize("page", ["docs/from-trl.md", "docs/from-verl.md"])
def test_the_code_of_a_migration_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), scope)
    assert scope["run"].metrics[-1]["rewards/failed"] == 0


@pytest.mark.parametrize("page", ["docs/from-trl.md", "docs/from-verl.md", "docs/python.md"])
def test_the_options_a_page_names_exist(page):
    known = {
        key
        for command in COMMANDS
        for section in schema(imported(command.options)).sections()
        for key in (section.key, *(option.key for option in section.options()))
    }
    text = _BLOCK.sub("", (ROOT / page).read_text())
    ours = [line.split("|")[-2] for line in text.splitlines() if line.startswith("| `")]
    sections = ("algorithm", "optim", "sampling", "chat", "save", "eval", "engine", "policy")
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)\b", " ".join(ours)):
        if name.partition(".")[0] in sections:
            assert name in known, name


def test_the_example_of_the_first_page_of_the_site_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/index.md", "python")
    assert "steps=20" in example
    exec(
        compile(example.replace("steps=20", "steps=1, prompts=2, sampling={'max_new_tokens': 4}"), "index", "exec"), {}
    )
    assert "runs/rl-1/report.html" in capsys.readouterr().out


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    """As it stands but for the number of steps, on the rows that the quickstart writes.

    After one step of SFT no answer is right, so that only an entropy bonus trains.
    """
    monkeypatch.chdir(tmp_path)
    (rows,) = [block for block in blocks("docs/quickstart.md", "python") if "demos.jsonl" in block]
    exec(compile(rows, "quickstart", "exec"), {})
    (example,) = blocks("README.md", "python")
    short = (
        example.replace("steps=60", "steps=1")
        .replace('"steps": 120', '"steps": 1')
        .replace('"every": 40', '"every": 1')
        .replace('"eval": held_out', '"eval": held_out, "algorithm.entropy_coef": 0.01')
    )
    assert not re.search("60|120", short)
    scope = {"__name__": "readme"}
    exec(compile(short, "README", "exec"), scope)
    assert scope["run"].report.is_file()
    assert scope["run"].evaluations
