"""MCP servers as tools, with the real package: over stdio, in a worker."""

import shlex
import sys
from pathlib import Path

import pytest
from servers import serving
from talking import play, spoken, talker
from test_gateway import WITH_TOOLS

from rolecall.agents.environments import check_name
from rolecall.agents.pool import EnvPool
from rolecall.tasks.env import EnvError
from rolecall.types import Finish

pytest.importorskip("mcp")
FILE = Path(__file__).parents[2] / "examples" / "mcp_server.py"
SERVER = shlex.join(["mcp:" + sys.executable, str(FILE)])


@pytest.mark.parametrize("episodes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_policy_calls_the_tools_of_a_server_of_its_own(episodes):
    lines = [
        '<tool_call>{"name": "product", "arguments": {"a": 6, "b": 7}}</tool_call>',
        "<remember>one</remember><remember>no</remember>",
        '<tool_call>{"name": "product", "arguments": {"c": 6}}</tool_call>',
        "42",
    ]
    rows = [{"prompt": f"go {i}"} for i in range(episodes)]
    with EnvPool(SERVER, workers=1) as envs:
        assert [tool["function"]["name"] for tool in envs.tools] == ["product", "remember"]
        assert envs.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
        found = play(envs, talker(*lines), rows, new_tokens=99, dialect=WITH_TOOLS, context_length=4000)
    for episode in found:
        (trajectory,) = episode.trajectories(group=0)["agent"]
        heard = [text for who, _, text in spoken(trajectory) if who == "tool"]
        assert heard[:2] == ["42", "one"], "what another episode keeps is not seen"
        assert heard[2] == "error: Error executing tool remember"
        assert heard[3] == "error: missing a required argument: 'a'"
        assert (episode.finish, episode.rewards) == (Finish.ENVIRONMENT, {})
        assert (episode.counts["tool_calls"], episode.counts["tool_failures"]) == (4, 2)


def test_a_server_with_an_address_is_shared_and_needs_a_network():
    lines = ['<tool_call>{"name": "product", "arguments": {"a": 6, "b": 7}}</tool_call><remember>one</remember>', "42"]
    with serving(str(FILE)) as port:
        name = f"mcp:http://127.0.0.1:{port}/mcp"
        check_name(name)
        with EnvPool(name, workers=1, network=True) as envs:
            rows = [{"prompt": "go"}] * 2
            found = play(envs, talker(*lines), rows, new_tokens=99, dialect=WITH_TOOLS, context_length=4000)
        with pytest.raises(EnvError, match=r"cannot be used: .*it has no network: set agent.network"):
            EnvPool(name, workers=1)
    heard = [[text for who, _, text in spoken(e.trajectories(group=0)["agent"][0]) if who == "tool"] for e in found]
    assert sorted(heard) == [["42", "one"], ["42", "one one"]], "what one episode keeps, the next one sees"


def test_what_is_no_server_is_said_at_the_start(tmp_path):
    with pytest.raises(EnvError, match="there is no program 'no-such-program' to start"):
        check_name("mcp:no-such-program")
    (tmp_path / "mute.py").write_text("")
    with pytest.raises(EnvError, match=r"the MCP server .* cannot be used"):
        EnvPool(f"mcp:{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'mute.py'))}", workers=1)
