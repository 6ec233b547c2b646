"""The tools that come with the library: a Python program, and a search in a folder, in a worker."""

import json

import pytest
from talking import play, spoken, talker
from test_gateway import WITH_TOOLS

from rolecall.agents import toolbox
from rolecall.agents.bm25 import ranked
from rolecall.agents.environments import check_name
from rolecall.agents.pool import EnvPool
from rolecall.tasks.env import EnvError
from rolecall.types import Finish


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "birds.txt").write_text(
        "A heron stands still.\n\n" + "x " * 400 + "\n\nThe swift never lands, the swift sleeps in the air."
    )
    (tmp_path / "trees").mkdir()
    (tmp_path / "trees" / "oak.md").write_text("An oak grows slowly.")
    (tmp_path / "picture.bin").write_bytes(b"\0swift")
    return tmp_path


def test_a_policy_runs_a_program_and_searches_a_folder(folder):
    program = {
        "name": "python",
        "arguments": {"code": "import socket\nprint(6 * 7)\nsocket.create_connection(('1.1.1.1', 80), 2)"},
    }
    lines = [
        "<python>print(6 * 7)</python>",
        "<search>where does a swift sleep</search>",
        f"<tool_call>{json.dumps(program)}</tool_call>",
        "42",
    ]
    with EnvPool(f"tools:python,search={folder}", workers=1) as envs:
        assert [tool["function"]["name"] for tool in envs.tools] == ["python", "search"]
        (episode,) = play(
            envs, talker(*lines), [{"prompt": "6*7?"}], new_tokens=200, dialect=WITH_TOOLS, context_length=4000
        )
    (trajectory,) = episode.trajectories(group=0)["agent"]
    heard = [text for who, _, text in spoken(trajectory) if who == "tool"]
    assert heard[0] == "42"
    assert heard[1].startswith("[birds.txt] ")
    assert "sleeps in the air" in heard[1]
    assert heard[2].startswith("error: "), "there is no network"
    assert (episode.finish, episode.counts["tool_failures"]) == (Finish.ENVIRONMENT, 1)


def test_the_best_passage_comes_first(folder):
    passages = toolbox._passages(str(folder))
    assert {name for name, *_ in passages} == {"birds.txt", "trees/oak.md"}
    words = [held for *_, held in passages]
    assert passages[ranked("an oak", words)[0]][1] == "An oak grows slowly."
    assert ranked("whale", words) == []


def test_a_program_that_fails_prints_much_or_does_not_end(monkeypatch):
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        toolbox.python("1 / 0")
    assert toolbox.python("print('ab' * 5000)").endswith("… (8001 bytes more)")
    assert toolbox.python("pass") == "(nothing was printed)"
    with pytest.raises(ValueError, match="File too large"):
        toolbox.python("open('f', 'w').write('x' * 9000000)")
    monkeypatch.setattr(toolbox, "_SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"no end within 0.5 s; it was stopped"):
        toolbox.python("import os, time\nos.fork()\ntime.sleep(60)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tools:hammer", "there is no tool 'hammer' here"),
        ("tools:", "name a tool"),
        ("tools:search=no/such/folder", "needs a folder of texts"),
        ("tools:python=3", "takes no value"),
    ],
)
def test_what_is_no_tool_is_said(name, words):
    with pytest.raises(EnvError, match=words):
        check_name(name)
