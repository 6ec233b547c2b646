"""The gateway with the clients that people use: `openai`, and LangGraph on top of it."""

from pathlib import Path

import pytest
from talking import spoken, talker
from test_gateway import WITH_TOOLS, play, samples

from rolecall.agents.programs import Programs
from rolecall.config.agents import AgentOptions
from rolecall.tasks.agent_tasks import Guessing
from rolecall.types import Finish

HERE = Path(__file__).parent
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Work out.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def programs():
    pytest.importorskip("openai")
    with Programs(f"{HERE / 'openai_agents.py'}:run", AgentOptions(workers=1)) as running:
        yield running


def test_openais_clients_play_what_an_environment_would(programs):
    from talking import play as play_in

    row = {"prompt": [{"role": "user", "content": "1 to 7"}], "secret": 6}
    ways = ("sync", "asynchronous", "stream")
    found = play(programs, talker("4", "x", "6"), [{**row, "do": way} for way in ways])
    assert [(e.finish, e.failure, e.rewards) for e in found] == [(Finish.ENVIRONMENT, None, {"agent": 1.0})] * 3
    (same,) = play_in(Guessing().env, talker("4", "x", "6"), [row])
    (expected,) = same.trajectories(group=0)["agent"]
    for episode in found:
        (trajectory,) = samples(episode)
        assert (trajectory.ids, trajectory.roles, trajectory.authors) == (
            expected.ids,
            expected.roles,
            expected.authors,
        )
    assert found[0].view == {"finish": "stop"}
    assert found[2].view == {"chunks": 4, "finish": "stop"}, "role, a piece, the end, the usage"


def test_streams_have_tool_calls_and_texts_are_completed(programs):
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call>'
    rows = [{"do": "streamed_tools", "tools": TOOLS}]
    (tools,) = play(programs, talker(call), rows, new_tokens=99, dialect=WITH_TOOLS)
    assert (tools.failure, tools.rewards, tools.view) == (None, {"agent": 1.0}, {"name": "calc"})
    text, refused = play(programs, talker("abcdef"), [{"do": "text"}, {"do": "refused"}])
    assert text.view == {"whole": "abcd", "parts": "abcdef"}
    assert [run[:2] for t in samples(text) for run in spoken(t)] == [
        ("prompt", "P"), ("policy", "C"), ("prompt", "P"), ("policy", "CS")]  # fmt: skip
    assert refused.finish is Finish.ABORT
    assert "the last call was refused, temperature is 0.2, but this run samples with 1" in refused.failure


@pytest.mark.slow
def test_a_langgraph_agent_plays_unchanged():
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call>'
    with Programs(f"{HERE.parents[1] / 'examples' / 'langgraph_agent.py'}:run", AgentOptions(workers=1)) as programs:
        rows = [{"prompt": "6*7?", "answer": "42"}]
        (episode,) = play(programs, talker(call, "42"), rows, new_tokens=99, dialect=WITH_TOOLS, context=4000)
    assert (episode.failure, episode.rewards, episode.counts) == (None, {"agent": 1.0}, {"turns": 2})
    (trajectory,) = samples(episode)
    heard = [run for run in spoken(trajectory) if run[0] != "template"]
    assert heard[1:] == [("policy", "CS", f"{call}<|im_end|>"), ("tool", "O", "42"), ("policy", "CS", "42<|im_end|>")]
