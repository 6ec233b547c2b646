"""Every command's run in `rolecall view`: in the table with its command and numbers, and with all pages."""

import pytest

import rolecall
from rolecall.look.view.pages import Pages
from rolecall.look.view.runs import Runs

SMALL = {"steps": 2, "quiet": True, "save.every": 0}
ROWS = SMALL | {"model": "tiny", "rows": "sorting:length=2"}
ASKED = {"prompts": 2, "samples": 2, "sampling.max_new_tokens": 4, "algorithm.entropy_coef": 0.01}
COMMANDS = {
    "sft": ("sft", ROWS | {"batch": 2}),
    "rm": ("rm", ROWS | {"batch": 2}),
    "dpo": ("dpo", ROWS | {"batch": 2}),
    "rl": ("rl", ROWS | ASKED),
    "agents": ("rl", SMALL | ASKED | {"model": "tiny", "env": "guessing", "algorithm.aggregate": "token-mean"}),
    "marl": ("marl", SMALL | {"env": "climbing", "algo": "ippo", "episodes": 2, "record.every": 1}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("commands") / "runs"
    for name, (command, settings) in COMMANDS.items():
        getattr(rolecall, command)(out=str(place / name), **settings)
    return Runs(place)


def test_all_are_in_the_table(runs):
    found = {one.id: one for one in runs.summaries()}
    assert {name: (one.command, one.state, one.step) for name, one in found.items()} == {
        name: (command, "done", 2) for name, (command, _) in COMMANDS.items()
    }
    assert all(one.last is not None and len(one.spark) == 2 for one in found.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_all_have_curves_a_page_and_their_answers(name, runs):
    pages = Pages(runs, version="")
    assert f"<h1>{name} " in pages.run(name)
    curves = pages.curves(name)["charts"]
    assert all(chart["xs"][-2:] == [1, 2] for chart in curves if "eval" not in chart["name"])
    assert {"sft": "loss", "rm": "loss", "dpo": "loss", "marl": "return"}.get(name, "reward") in {
        c["name"] for c in curves
    }
    assert pages.findings(name)["found"] == []
    recorded = runs.files(runs.root / name).rollouts
    assert bool(recorded) == (name in ("rl", "agents", "marl"))
    if recorded:
        assert f"/run/{name}/answers/2/0" in pages.answers(name, {})
        assert "Step 2, answer 0" in pages.answer(name, 2, 0, {})
