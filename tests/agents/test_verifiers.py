"""Environments of the real package verifiers, with their dataset and rubric, played through the gateway."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from talking import TOKENIZER, encode, spoken, talker
from test_gateway import play, samples

from rolecall.agents.programs import Programs
from rolecall.agents.verifiers_env import VerifiersProgram, verifiers_rows
from rolecall.cli import main
from rolecall.config.agents import AgentOptions
from rolecall.jobs.agents import open_envs
from rolecall.policy.tiny import TURN_END_ID
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.env import EnvError
from rolecall.types import Finish

FILE = Path(__file__).parents[2] / "examples" / "verifiers_environment.py"
NAME = f"verifiers:{FILE}:rows=10"


@pytest.mark.slow
def test_its_dataset_are_the_rows_and_its_rubric_is_the_reward():
    pytest.importorskip("verifiers")
    found = verifiers_rows(NAME, AgentOptions(), n=9, held_out=2)
    assert found.test is None
    rows = [found.train[i] for i in range(len(found.train))]
    assert len(rows) == 9
    assert (rows[8]["answer"], rows[8]["prompt"][-1]) == ("2", {"role": "user", "content": "1+1"})
    with Programs(NAME, AgentOptions(workers=1)) as programs:
        once, twice, never = play(programs, talker("2", "5"), [rows[2], rows[5], rows[6]], context=1000)
        (cut,) = play(programs, talker("2"), [rows[2]], context=20)
    assert [e.failure for e in (once, twice, never)] == [None] * 3
    assert [e.rewards["agent"] for e in (once, twice, never)] == [1.0, 1.0, 0.0]
    assert once.view == {
        "metrics": {"right": 1.0, "tries": 1.0, "num_turns": 1.0},
        "stop_condition": "is_right",
        "is_truncated": False,
    }
    (trajectory,) = samples(twice)
    assert [text for who, _, text in spoken(trajectory) if who == "user"] == ["more"]
    assert [text for _, roles, text in spoken(trajectory) if roles == "CS"] == ["2<|im_end|>", "5<|im_end|>"]
    assert (cut.finish, cut.counts["too_long"]) == (Finish.ABORT, 1), "no answer at all"


GROUPED = """

def better(completions, answers):
    scores = [right(c, a) for c, a in zip(completions, answers, strict=True)]
    return [score - sum(scores) / len(scores) for score in scores]


def turns(states):
    if len(states) == 1:
        raise RuntimeError("nobody to compare with")
    return [float(sum(len(state["trajectory"]) for state in states))] * len(states)


def load_environment(rows=20, hangs=False):
    sums = [(i % 7, i // 7 % 7) for i in range(rows)]
    data = Dataset.from_list([{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in sums])
    funcs = [right, better, turns] + [slow] * hangs
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, 1.0, 0.0] + [0.0] * hangs)
    return SecondTry(dataset=data, rubric=rubric, max_turns=2)


def slow(completions):
    import time

    time.sleep(600)
"""


def groups_of(programs, name):
    """Two episodes each of 2+0 and 5+0: the first says 2, then 5, the second 9, then 5."""
    rows = verifiers_rows(name, AgentOptions(), n=9, held_out=0).train

    def script(request, sample):
        first = "<|im_start|>user" in TOKENIZER.decode(request.prompt_ids).partition("assistant")[2]
        return [*encode("5" if first else "92"[sample % 2 == 0]), TURN_END_ID]

    return play(programs, ScriptedEngine(script, stop_ids=(TURN_END_ID,)), [rows[2], rows[5]], n=2)


@pytest.mark.slow
def test_a_rubric_that_compares_a_group_scores_it_when_all_have_ended(tmp_path):
    pytest.importorskip("verifiers")
    (tmp_path / "grouped.py").write_text(FILE.read_text() + GROUPED)
    name = f"verifiers:{tmp_path / 'grouped.py'}"
    with Programs(name, AgentOptions(workers=2)) as programs:
        played = groups_of(programs, name)
    assert [episode.failure for episode in played] == [None] * 4
    assert [episode.view["metrics"]["better"] for episode in played] == [0.5, -0.5, 0.0, 0.0]
    assert [episode.view["metrics"]["turns"] for episode in played] == [3.0, 3.0, 4.0, 4.0]
    assert [episode.rewards["agent"] for episode in played] == [1.5, -0.5, 1.0, 1.0]
    with Programs(f"{name}:hangs=true", AgentOptions(workers=1, deadline=6.0)) as programs:
        played = groups_of(programs, name)
    assert {episode.finish for episode in played} == {Finish.ABORT}
    assert all("its group could not be scored: no answer within 6 s" in episode.failure for episode in played)


@pytest.mark.slow
def test_the_command_line_trains_on_it(tmp_path):
    pytest.importorskip("verifiers")
    arguments = [
        "--steps",
        "1",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--sampling.max_new_tokens",
        "4",
        "--model",
        "tiny",
    ]
    arguments += ["--algorithm.entropy_coef", "0.01", "--out", str(tmp_path / "run")]
    assert main(["rl", "--env", NAME, *arguments]) == 0
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 0


def test_what_is_missing_or_no_environment_is_a_sentence(monkeypatch):
    with ExitStack() as stack:
        with pytest.raises(EnvError, match="there is no file"):
            open_envs("verifiers:no-such.py", AgentOptions(), stack)
        with pytest.raises(EnvError, match="names no environment"):
            open_envs("verifiers:", AgentOptions(), stack)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(EnvError, match=r"need the package verifiers: pip install 'rolecall\[verifiers\]'"):
        VerifiersProgram("verifiers:wordle")
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    with pytest.raises(EnvError, match=r"needs verifiers 0.1.10 to 0.3, this is 0.4.0"):
        VerifiersProgram("verifiers:wordle")
