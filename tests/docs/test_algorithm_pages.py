"""docs/algorithms: a page for every preset, links that lead somewhere and lines that are there."""

import re
from pathlib import Path

import pytest

from rolecall.config.rl import RLOptions

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [*RLOptions.presets, "dpo", "best-of-n", "expert-iteration"])
def test_every_algorithm_has_its_page(name):
    text = (FOLDER / f"{name}.md").read_text()
    for section in ("Details that matter", "What is logged", "Neighbours, in lines of code", "Measured"):
        assert f"\n## {section}\n" in text
    assert "```bash\nrolecall " in text
    assert f"]({name}.md)" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = _BLOCK.sub("", (FOLDER / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#")):
            assert (FOLDER / target.partition("#")[0]).exists(), target


def test_the_index_says_what_the_presets_are():
    rows = re.findall(
        r"^\| \[([\w+-]+)\]\(.*\| ([\w +]+) \| (\d) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _, _ in rows} == set(RLOptions.presets)
    for name, samples, steps in rows:
        preset = RLOptions.presets[name]
        o = preset["algorithm"]
        assert int(samples.split()[0]) == preset["samples"], name
        assert int(steps) == o.get("epochs", 1) * o.get("minibatches", 1), name
