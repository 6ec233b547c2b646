"""The conformance kit: rolecall passes it, the field's silent bugs do not, and wrong adapters get one sentence."""

import ast
import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from planted import HEAD, PLANTED

from rolecall.cli import main
from rolecall.conformance.load import NAMES, SHIPPED
from rolecall.conformance.run import run_cases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/conformance.md"


@pytest.fixture(scope="module")
def own():
    """What rolecall's own adapter gets."""
    return run_cases("rolecall")


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """Writes my.py where the command runs."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("my.py").write_text(HEAD + text)
        return "my.py"

    return write


def test_rolecall_passes_everything(own):
    assert [result for result in own.results if result.outcome != "passes"] == []
    assert len(own.results) > 100
    assert all(result.about for result in own.results)
    assert set(own.calls) == set(NAMES)


def test_the_table(adapter, capfd):
    assert main(["conformance", "--adapter", adapter("masked_mean = right.masked_mean\n")]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^masks +3 +0 +11$", out, re.MULTILINE)
    assert re.search(r"^all +3 +0 +\d+$", out, re.MULTILINE)
    assert "not offered at all: answer_mask, " in out


@pytest.fixture(scope="module")
def noticed(tmp_path_factory):
    """The cases that differ for each planted bug. Bugs of different functions share an adapter, to run few of them."""
    adapters = []
    for bug, (text, _) in PLANTED.items():
        function = re.match(r"def (\w+)", text)[1]
        free = next((held for held in adapters if function not in held), None)
        if free is None:
            adapters.append(free := {})
        free[function] = bug
    found = {}
    for i, held in enumerate(adapters):
        path = tmp_path_factory.mktemp("planted") / f"bugs_{i}.py"
        path.write_text(HEAD + "\n".join(PLANTED[bug][0] for bug in held.values()))
        report = run_cases(str(path))
        differing = [result.case for result in report.results if result.outcome == "differs"]
        found |= dict.fromkeys(held.values(), differing)
    return found


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_noticed(bug, noticed):
    assert PLANTED[bug][1] in noticed[bug]


def test_what_differs_is_said(adapter, capfd):
    text = 'REASONS = {"mean_golden": "because"}\ndef masked_mean(x, mask):\n    return x.mean()\n'
    assert main(["conformance", "--adapter", adapter(text)]) == 1
    out = capfd.readouterr().out
    assert (
        "masks: mean_golden differs\n  Padding is neither in the sum nor in the count.\n  expected 3, got 6\n  because"
        in out
    )


def test_json(adapter, capfd):
    text = 'REASONS = {"mean_golden": "because"}\ndef masked_mean(x, mask):\n    "x.mean()"\n    print("noise")\n    return x.mean()\n'
    assert main(["conformance", "--adapter", adapter(text), "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["calls"] == {"masked_mean": "x.mean()"}
    assert set(report["versions"]) == {"rolecall", "torch"}
    (golden,) = [result for result in report["results"] if result["case"] == "mean_golden"]
    assert golden == {
        "section": "masks",
        "case": "mean_golden",
        "about": "Padding is neither in the sum nor in the count.",
        "outcome": "differs",
        "said": "expected 3, got 6",
        "reason": "because",
    }


def test_a_missing_choice_is_not_offered(adapter):
    text = (
        "def gae(rewards, values, mask, *, gamma, lam):\n    return right.gae(rewards, values, mask, gamma=gamma, lam=lam)\n"
        "def grpo(scores, groups, *, scale='group'):\n    if scale == 'batch': raise NotImplementedError('no batch')\n"
        "    return right.grpo(scores, groups, scale=scale)\n"
    )
    report = run_cases(adapter(text))
    said = {result.case: (result.outcome, result.said) for result in report.results}
    assert said["gae_golden"] == ("passes", "")
    assert said["gae_of_a_cut_row_bootstraps_its_value"] == ("not offered", "gae does not take bootstrap")
    assert said["grpo_equals_the_loop[group]"] == ("passes", "")
    assert said["grpo_equals_the_loop[batch]"] == ("not offered", "no batch")
    assert said["rloo_golden"] == ("not offered", "not offered")
    assert report.count("differs") == 0


def test_an_exception_of_the_library_is_a_difference(adapter):
    report = run_cases(adapter("def masked_mean(x, mask):\n    raise RuntimeError('no kernel')\n"))
    assert {result.said for result in report.results if result.outcome == "differs"} == {"RuntimeError: no kernel"}


def test_the_readers_pytest_settings_have_no_effect(adapter, monkeypatch):
    name = adapter("masked_mean = right.masked_mean\n")
    Path("pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    assert run_cases(name).count("passes") == 3


WRONG = {
    "def masked_maen(x, mask):\n    return x\n": "unknown function masked_maen: did you mean masked_mean?",
    "def gae(rewards, mask):\n    return rewards\n": "it must take (rewards, values, mask, *, gamma, lam, bootstrap=None)",
    "def masked_mean(x, mask, dim):\n    return x\n": "defines masked_mean wrongly (missing a required argument: 'dim')",
    "def _helper():\n    pass\n": "offers nothing: define some of answer_mask,",
    "import no_such_library\n": "cannot be imported: No module named 'no_such_library'",
    "def gae(:\n": "cannot be imported: invalid syntax",
    "REASONS = {'mean_goldn': ''}\nmasked_mean = right.masked_mean\n": "unknown case mean_goldn: did you mean mean_golden?",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_adapter_gets_one_sentence(text, adapter, capfd):
    assert main(["conformance", "--adapter", adapter(text)]) == 2
    said = capfd.readouterr().err
    assert WRONG[text] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nosuch.py", "there is no adapter nosuch.py: give a Python file, or one of rolecall, trl, verl, openrlhf"),
        ("openrhlf", "there is no adapter openrhlf: did you mean openrlhf?"),
    ],
)
def test_no_such_adapter(name, sentence, capfd):
    assert main(["conformance", "--adapter", name]) == 2
    assert sentence in capfd.readouterr().err


def test_a_library_that_is_not_installed(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "rolecall.conformance.adapters.trl", raising=False)
    assert main(["conformance", "--adapter", "trl"]) == 2
    assert "pip install trl" in capfd.readouterr().err


def test_without_pytest(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["conformance", "--adapter", "rolecall"]) == 2
    assert "need pytest: pip install 'rolecall[conformance]'" in capfd.readouterr().err


def test_the_plugin_is_not_loaded_into_other_peoples_tests():
    assert not [point for point in entry_points(group="pytest11") if point.value.startswith("rolecall")]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_adapters_name_functions_and_cases_that_there_are(name, own):
    """Read, not imported: the libraries are not installed here."""
    tree = ast.parse((ROOT / f"src/rolecall/conformance/adapters/{name}.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert functions <= set(NAMES)
    assert all(
        ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in functions
    )
    dicts = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REASONS"
    ]
    explained = {key.value for one in dicts for key in one.keys}
    assert explained <= {result.case.partition("[")[0] for result in own.results}


def test_the_pages_adapter_runs(tmp_path):
    """The adapter in the head of the page passes what it offers, but for the case whose reason it gives."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "my_adapters.py"
    path.write_text(text)
    report = run_cases(str(path))
    differing = {result.case: result.reason for result in report.results if result.outcome == "differs"}
    assert differing == {"mean_of_nothing": "definition: my trainer never makes an empty batch."}
    assert report.count("passes") > 10
    assert not report.idle_reasons


def test_the_page_is_of_these_cases(own):
    """A case that is added or renamed asks for the page to be written anew: python benchmarks/conformance.py."""
    made = PAGE.read_text().partition("written by benchmarks/conformance.py -->")[2]
    assert f"{len(own.results)} cases, with rolecall" in made
    cases = re.findall(r"^\| `(\w+)`: (.*?) \| passes \|", made.partition("## Every case")[2], re.MULTILINE)
    asked = {result.case.partition("[")[0]: result.about.replace("|", "\\|") for result in own.results}
    assert dict(cases) == asked
    assert re.search(r"trl \d.*verl \d.*openrlhf \d", made)
