"""Answers that are streamed while they are drawn: the same text and the same trajectories as without a stream."""

import json
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import gateway_agents
import pytest
from talking import DIALECT, encode, spoken, talker
from test_gateway import play, samples

from rolecall.agents.chat_api import ChatBody, Stream, call_marks, read_answer
from rolecall.agents.programs import Programs
from rolecall.config.agents import AgentOptions
from rolecall.policy.load import load
from rolecall.policy.tiny import TURN_END_ID
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.types import Completion, Finish, Request, Sampling

FILE = Path(gateway_agents.__file__)
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"expression": {}}}}}
REQUEST = Request(prompt_ids=(1,), sampling=Sampling(max_new_tokens=99), seed=0, step=0, prompt=0)


def streamed(ids: Sequence[int], *, stops: Sequence[str] = (), tools: Sequence[dict] = (), cut: str | None = None):
    """(the pieces of the text, the message as it is without a stream), of an answer that ends with a stop token or is cut."""
    body = ChatBody(messages=[{"role": "user", "content": "x"}], stream=True)
    stream = Stream(body, "id", tokenizer=DIALECT.tokenizer, marks=call_marks(tools), stops=stops)
    lines = [*stream.begin()]
    for token in ids[:-1]:
        lines += stream.add(token, -1.0)
    finish = Finish.STOP_STRING if cut is not None else Finish.STOP
    done = Completion(
        ids=tuple(ids),
        behaviour_logprobs=(-1.0,) * len(ids),
        finish=finish,
        policy_version=0,
        prompt=0,
        sample=0,
        seed=0,
    )
    text = DIALECT.text(done) if cut is None else cut
    answer = read_answer(text, done, pieces=["?"] * len(ids), tools=tools, request=REQUEST)
    lines += stream.end(answer)
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return [d["content"] for d in deltas if d.get("content")], answer.message


def test_a_character_of_several_tokens_is_sent_when_it_is_complete():
    euro = list("€".encode())  # ids of the built-in tokenizer are bytes
    pieces, message = streamed([*encode("a"), *euro, *encode("b"), TURN_END_ID])
    assert pieces == ["a", "€", "b"]
    pieces, message = streamed([*encode("a"), *euro[:2], TURN_END_ID])
    assert "".join(pieces) == message["content"]
    assert pieces[0] == "a"


def test_what_may_end_the_answer_or_be_a_call_is_held_back():
    pieces, _ = streamed([*encode("abEc ENx"), TURN_END_ID], stops=["END"])
    assert pieces == ["a", "b", "Ec", " ", "ENx"]
    pieces, _ = streamed(encode("abEND"), stops=["END"], cut="ab")
    assert "".join(pieces) == "ab"
    pieces, message = streamed([*encode("so <b> <calc>1+1</calc>"), TURN_END_ID], tools=[TOOL])
    assert pieces == ["s", "o", " <b", ">"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("so <b>", "calc")


def test_pieces_are_together_what_is_said_without_a_stream():
    random, tokens = Random(0), [[*"€".encode()][i] for i in range(3)]
    words = ["<calc>", "</calc>", "<tool_call>", "{", "<", "c", " ", "END", "EN", "x", "\n"]
    for _ in range(300):
        ids = [i for _ in range(random.randrange(8)) for i in random.choice([*map(encode, words), tokens, tokens[:1]])]
        for tools in ((), (TOOL,)):
            pieces, message = streamed([*ids, TURN_END_ID], stops=["STOP"], tools=tools)
            assert "".join(pieces) == (message["content"] or "")


class Waiting(ScriptedEngine):
    """Draws an answer's last token only when a file is there."""

    def __init__(self, ids, there):
        super().__init__(lambda request, sample: ids, stop_ids=(TURN_END_ID,))
        self.ids, self.there = ids, there

    def open(self):
        flight = super().open()
        step = flight.step

        def slow_step():
            for token in self.ids[:-1] if flight._waiting else ():
                flight._waiting[0].heard(token, -1.0)
            end = time.monotonic() + 60
            while flight._waiting and not self.there.exists() and time.monotonic() < end:
                time.sleep(0.01)
            return step()

        flight.step = slow_step
        return flight


@pytest.fixture(scope="module")
def programs():
    with Programs(f"{FILE}:run", AgentOptions(workers=1, deadline=60)) as running:
        yield running


def test_a_program_reads_the_first_token_before_the_last_is_drawn(programs, tmp_path):
    engine = Waiting([*encode("one"), TURN_END_ID], tmp_path / "read")
    (episode,) = play(programs, engine, [{"do": "streams", "read": str(tmp_path / "read")}])
    assert (episode.failure, episode.view) == (None, {"pieces": ["o", "n", "e"], "before": True})


def test_a_streamed_game_is_drawn_like_any_other(programs):
    policy, found = load("tiny"), []
    row = {"do": "guess", "prompt": [{"role": "user", "content": "1 to 7"}], "secret": 6}
    for stream in (False, True):
        engine = NativeEngine(policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=1000)
        found += play(programs, engine, [{**row, "stream": stream}])
    plain, streamed = found
    assert plain.failure is None
    assert repr(samples(plain)) == repr(samples(streamed)), (
        "ids, roles, log-probs (of which those before an answer are NaN)"
    )
    assert plain.counts == streamed.counts


def test_a_stream_that_is_not_read_to_its_end_is_drawn_and_kept(programs, tmp_path):
    engine = Waiting([*encode("one two three"), TURN_END_ID], tmp_path / "read")
    (episode,) = play(programs, engine, [{"do": "streams", "read": str(tmp_path / "read"), "most": 2}])
    assert episode.failure is None
    (trajectory,) = samples(episode)
    assert spoken(trajectory)[-1] == ("policy", "CS", "one two three<|im_end|>")
    assert episode.counts["turns"] == 1


NODE = """
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const row = JSON.parse(Buffer.concat(chunks));
const answer = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {Authorization: "Bearer " + process.env.OPENAI_API_KEY, "Content-Type": "application/json"},
  body: JSON.stringify({model: "any", stream: row.stream, messages: [{role: "user", content: "go"}]}),
});
let text = await answer.text();
if (row.stream) {
  const lines = text.split("\\n\\n").filter((l) => l.startsWith("data: {"));
  text = lines.map((l) => JSON.parse(l.slice(6)).choices[0].delta.content ?? "").join("");
} else text = JSON.parse(text).choices[0].message.content;
console.log(JSON.stringify({reward: Number(text === row.wanted), by: "node"}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_a_node_program_plays_with_fetch(tmp_path):
    script = tmp_path / "agent.mjs"
    script.write_text(NODE)
    rows = [{"wanted": "one", "stream": stream} for stream in (False, True)]
    with Programs(f"node {shlex.quote(str(script))}", AgentOptions(workers=1)) as programs:
        found = play(programs, talker("one"), rows)
    assert [(e.failure, e.rewards, e.view) for e in found] == [(None, {"agent": 1.0}, {"by": "node"})] * 2
