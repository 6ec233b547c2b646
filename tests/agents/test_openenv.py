"""Environments behind a real OpenEnv server, which the test starts."""

from pathlib import Path

import gateway_agents
import pytest
from servers import serving
from talking import play, spoken, talker

from rolecall.agents.environments import check_name
from rolecall.agents.pool import EnvPool
from rolecall.cli import main
from rolecall.tasks.env import EnvError
from rolecall.types import Finish

SERVER = str(Path(__file__).parents[2] / "examples" / "openenv_server.py")


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv")
    with serving(SERVER) as port:
        yield f"openenv:http://127.0.0.1:{port}"


@pytest.mark.slow
def test_episodes_are_sessions_of_the_server(url):
    with EnvPool(url, workers=1, network=True) as envs:
        found = play(envs, talker("x", "9", "4", "2", "6", "1"), [{"highest": 1}, {}], new_tokens=8)
        cut, again = play(envs, talker("7"), [{}, {}], new_tokens=8, max_turns=1), play(envs, talker("4"), [{}])
    first, second = found
    assert (first.finish, first.rewards) == (Finish.ENVIRONMENT, {"agent": 1.0}), (
        "the row goes to reset: the number is 1"
    )
    (trajectory,) = first.trajectories(group=0)["agent"]
    heard = [text for who, _, text in spoken(trajectory) if who in ("user", "prompt")]
    wanted = "Answer with number (integer): your guess, from 1 to 7"
    assert "Guess a number from 1 to 1." in heard[0]
    assert wanted in heard[0]
    assert heard[1:] == [wanted, wanted, "lower", "lower", "lower"], "what is no action is no step"
    assert (first.counts["bad_actions"], first.counts["turns"]) == (2, 6)
    assert (second.finish, set(second.rewards)) == (Finish.ENVIRONMENT, {"agent"})
    assert [e.failure for e in (*cut, *again)] == [None] * 3, "and the sessions of what was cut off are closed"


@pytest.mark.slow
def test_the_command_line_trains_on_a_server(url, tmp_path):
    arguments = ["--steps", "1", "--prompts", "2", "--samples", "2", "--sampling.max_new_tokens", "4"]
    arguments += ["--model", "tiny", "--agent.max_turns", "2", "--reward", f"{gateway_agents.__file__}:even"]
    assert main(["rl", "--env", url, "--agent.network", *arguments, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_without_a_network_or_a_server_a_sentence_says_so(url):
    with pytest.raises(EnvError, match=r"cannot be reached: .*it has no network: set agent.network"):
        EnvPool(url, workers=1)
    with pytest.raises(EnvError, match=r"cannot be reached: .*is it running"):
        EnvPool("openenv:http://127.0.0.1:9", workers=1, network=True)


def test_what_is_no_address_is_said_at_the_start(monkeypatch):
    with pytest.raises(EnvError, match="needs the address of a server: openenv:http://HOST:PORT"):
        check_name("openenv:echo")
    monkeypatch.setitem(__import__("sys").modules, "openenv.core", None)
    with pytest.raises(EnvError, match=r"pip install 'rolecall\[openenv\]'"):
        check_name("openenv:http://127.0.0.1:8000")
