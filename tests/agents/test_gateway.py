"""Programs that play episodes through the gateway: what they said is what is held, and what they do wrong stays theirs."""

import http.client
import shlex
import socket
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import gateway_agents
import pytest
from talking import DIALECT, encode, spoken, talker

from rolecall.agents.played import Wanted
from rolecall.agents.programs import ProgramPlayer, Programs
from rolecall.config.agents import AgentOptions
from rolecall.maths.roles import Role
from rolecall.policy.tiny import TURN_END_ID
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.env import EnvError
from rolecall.types import Finish, Sampling

FILE = Path(gateway_agents.__file__)


def play(programs, engine, rows, **more):
    sampling = Sampling(max_new_tokens=more.pop("new_tokens", 16), temperature=more.pop("temperature", 1.0))
    options, dialect = more.pop("options", programs.options), more.pop("dialect", DIALECT)
    if programs.gateway is not None:
        programs.gateway.close()
    programs.socket.unlink(missing_ok=True)
    player = ProgramPlayer(
        engine=engine,
        programs=programs,
        dialect=dialect,
        options=options,
        context_length=more.pop("context", 1000),
        model="tiny",
    )
    n = more.pop("n", 1)
    wanted = [Wanted(prompt=i, sample=k, row=row, seed=i) for i, row in enumerate(rows) for k in range(n)]
    return player.play(wanted, sampling, seed=0, step=0)


@pytest.fixture(scope="module")
def programs():
    with Programs(f"{FILE}:run", AgentOptions(workers=1, deadline=1.5)) as running:
        yield running


def does(programs, *what, engine=None, **more):
    rows = [{"do": one} if isinstance(one, str) else one for one in what]
    return play(programs, engine or talker("one", "two", "three"), rows, **more)


def samples(episode):
    return episode.trajectories(group=0)["agent"]


def test_a_function_plays_sync_or_async_and_returns_what_the_episode_is_worth(programs):
    one, two = does(programs, "well", "later")
    assert (one.finish, one.rewards, one.view) == (Finish.ENVIRONMENT, {"agent": 1.0}, {"said": "one", "seen": "well"})
    assert two.rewards == {"agent": 2.0}
    assert [who for who, *_ in spoken(samples(one)[0])] == ["prompt", "policy"]


def test_what_programs_do_wrong_ends_their_own_episode(programs):
    found = does(programs, "well", "never_calls", "raises", "exits", "crashes", "hangs", "words")
    outcome = [(e.finish, e.failure) for e in found]
    assert outcome[0] == (Finish.ENVIRONMENT, None)
    assert {finish for finish, _ in outcome[1:]} == {Finish.ABORT}
    said = [
        "its program ended without an answer of the policy",
        "RuntimeError: the sky fell (line",
        "its process ended with exit code 7",
        "its process ended with signal 11 (SIGSEGV)",
        "no call of the policy and no end within 1.5 s; it was killed",
        "it returned a str ('much'); return a number",
    ]
    for (_, failure), words in zip(outcome[1:], said, strict=True):
        assert words in failure
    assert len(samples(found[2])) == 1, "what was said until then is kept"


def test_one_without_memory_or_that_writes_nonsense_is_alone_with_it(programs):
    written = [{"memory": True}, {"fatal": "x"}, {"done": True}, {"reward": "much", "result": {}}, {"error": "so"}, 3]
    pids = programs.pids
    found = does(
        programs, "runs_out_of_memory", *[{"do": "writes_its_own_result", "writes": w} for w in written], "well"
    )
    assert [e.finish for e in found] == [*[Finish.ABORT] * 7, Finish.ENVIRONMENT]
    assert "MemoryError" in found[0].failure
    assert found[5].failure == "so"
    assert programs.pids == pids, "the worker lives on"


def test_a_limit_is_no_failure_of_the_program_that_ends_with_its_error(programs):
    long, turns, tokens = (
        does(programs, "goes_on_for_ever", options=AgentOptions(workers=1, **limit), **more)[0]
        for limit, more in (({}, {"context": 200}), ({"max_turns": 2}, {}), ({"max_tokens": 8}, {}))
    )
    assert [e.finish for e in (long, turns, tokens)] == [Finish.LENGTH, Finish.MAX_TURNS, Finish.LENGTH]
    assert [e.failure for e in (long, turns, tokens)] == [None] * 3
    assert turns.counts["turns"] == 2
    assert not turns.rewards, "what it is worth is for reward functions to say"
    assert samples(turns)


def test_what_a_program_starts_ends_with_it(programs):
    (episode,) = does(programs, "leaves_processes")
    assert episode.rewards == {"agent": 1.0}
    (worker,) = programs.workers

    def below():
        found = [worker.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split()]
        return found

    until = time.monotonic() + 10
    while len(below()) > 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(below()) <= 4, "its keeper, the first of its namespace, the worker and the relay"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n is 2, and a call has one answer here"),
        ({"n": 2, "stream": True}, "n is 2, and a call has one answer here"),
        ({"temperature": 0.3}, "temperature is 0.3, but this run samples with 1: leave it out"),
        ({"top_p": 0.5}, "top_p is 0.5, but this run samples with 1"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"stop": ["so", ""]}, "stop has an empty text, which would end every answer"),
        ({"colour": "red"}, "colour is not a field of this request: leave it out"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages.0.content has a part of type 'image_url'; the policy reads text only"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "the messages have 20"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role is 'wizard'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": "x"},
                       {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                       {"role": "tool", "content": "y"}]}, "messages.1.tool_calls.0.function.arguments are not JSON"),
        ({"tools": [{"name": "calc"}]}, "tools.0 needs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_a_sentence(programs, fields, words):
    (episode,) = does(programs, {"do": "sends", "fields": fields})
    assert episode.view["status"] == 400
    assert words in episode.view["message"]
    assert (episode.finish, episode.counts["refused_calls"], len(samples(episode))) == (Finish.ENVIRONMENT, 1, 1)


def test_what_changes_nothing_or_says_what_holds_is_taken(programs):
    fields = {"temperature": 1.0, "top_p": 1, "n": 1, "user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True}
    (episode,) = does(programs, {"do": "sends", "fields": fields})
    assert (episode.view["status"], episode.counts) == (200, {"turns": 2, "repeats": 1})


def test_nonsense_and_a_missing_key_are_refused(programs):
    (episode,) = does(programs, "sends_nonsense")
    assert (episode.view["statuses"], episode.counts["refused_calls"]) == ([400, 400, 401], 3)
    assert len(samples(episode)) == 1


def test_a_huge_body_is_not_read(programs):
    (episode,) = does(programs, "sends_much")
    assert episode.view["status"] == 413
    assert len(samples(episode)) == 1


def test_the_key_of_another_episode_is_refused(programs, tmp_path):
    found = does(programs, *[{"do": "borrows_a_key", "place": str(tmp_path)}] * 2)
    assert [e.view["status"] for e in found] == [403, 403]
    assert "the key of another episode" in found[0].view["message"]
    assert [len(samples(e)) for e in found] == [1, 1]


def test_after_the_end_of_an_episode_its_key_opens_nothing(programs):
    does(programs, "well")
    session = programs.gateway.sessions[0]
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(programs.socket))
    connection.request("POST", "/0/v1/chat/completions", "{}", {"Authorization": f"Bearer {session.key}"})
    answer = connection.getresponse()
    assert answer.status == 410
    assert b"the episode is over" in answer.read()


def test_other_histories_are_other_samples_and_every_answer_trains_once(programs):
    (episode,) = does(programs, "another_way")
    counts = {"turns": 7, "forks": 1, "repeats": 1, "openings": 1, "rewrites": 1}
    assert (episode.failure, episode.counts) == (None, counts)
    found = samples(episode)
    assert episode.began == [None, "forks", "repeats", "openings", "rewrites"]
    assert len(found) == 5
    assert {(t.group, t.agent, t.episode) for t in found} == {(0, "agent", 0)}, "one sequence, with one weight"
    assert sum(role == Role.STOP for t in found for role in t.roles) == 7
    runs = [[(who, roles) for who, roles, _ in spoken(t)] for t in found]
    turn = [("template", "P"), ("user", "O"), ("template", "P"), ("policy", "CS")]
    assert runs[0] == [("prompt", "P"), ("policy", "CS"), *turn, *turn], "the first goes on to the end"
    assert runs[1] == [("prompt", "P"), ("history", "O"), *turn], "what was written before is only read"
    assert runs[2] == runs[3] == [("prompt", "P"), ("policy", "CS")]
    assert runs[4] == [("prompt", "P"), ("history", "O"), *turn]
    assert found[1].ids[: found[1].turns[0][0]][:20] == found[0].ids[:20], "its ids are those that were sampled"


def test_calls_at_the_same_time_are_samples_of_their_own(programs):
    (episode,) = does(programs, "at_the_same_time")
    assert episode.counts == {"turns": 4, "forks": 2}
    assert [len(t.turns) for t in samples(episode)] == [2, 1, 1]


def test_a_call_that_is_hung_up_on_is_given_up_and_the_conversation_goes_on(programs):
    engine = talker("one", "two")
    answers = engine.answers

    def slow(request):
        if "wait" in DIALECT.tokenizer.decode(request.prompt_ids):
            time.sleep(0.8)
        return answers(request)

    engine.answers = slow
    (episode,) = does(programs, "hangs_up", engine=engine)
    assert episode.counts == {"turns": 2, "aborted_calls": 1}
    (trajectory,) = samples(episode)
    assert ("user", "O", "on") in spoken(trajectory)
    assert not any("wait" in text for *_, text in spoken(trajectory))


WITH_TOOLS = replace(
    DIALECT,
    template_kwargs={
        "chat_template": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    },
)


def test_tool_calls_are_text_to_the_policy_and_objects_to_the_program(programs):
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call>'
    for first in (call, "<calc>6*7</calc>"):
        (episode,) = does(programs, "uses_tools", engine=talker(first, "42"), new_tokens=99, dialect=WITH_TOOLS)
        assert episode.failure is None
        assert (episode.rewards, episode.view["given"]) == ({"agent": 1.0}, {"expression": "6*7"})
        assert episode.view["content"] is None
        (trajectory,) = samples(episode)
        heard = [run for run in spoken(trajectory) if run[0] != "template"]
        assert heard[1:] == [
            ("policy", "CS", f"{first}<|im_end|>"),
            ("tool", "O", "42"),
            ("policy", "CS", "42<|im_end|>"),
        ]


def test_a_tool_call_that_cannot_be_read_stays_text(programs):
    engine = talker("<tool_call>{calc</tool_call>")
    (episode,) = does(programs, "uses_tools", engine=engine, new_tokens=99, dialect=WITH_TOOLS)
    assert episode.counts["bad_tool_calls"] == 1
    assert "KeyError: 'tool_calls'" in episode.failure


def test_turns_are_limited(programs):
    options = AgentOptions(workers=1, max_turns=1)
    (episode,) = does(programs, {"do": "sends", "fields": {}}, options=options)
    assert (episode.finish, episode.view["status"]) == (Finish.MAX_TURNS, 400)
    assert "has had its 1 turns (agent.max_turns)" in episode.view["message"]
    options = AgentOptions(workers=1, max_tokens=3)
    (episode,) = does(programs, {"do": "sends", "fields": {}}, options=options)
    assert (episode.finish, [len(t.ids[a:b]) for t in samples(episode) for a, b in t.turns]) == (Finish.LENGTH, [3])


def test_sampled_ids_are_never_encoded_again(programs):
    odd = [104, 195]  # 'h' and half a character: decoding and encoding gives other ids
    engine = ScriptedEngine(lambda request, sample: [*odd, TURN_END_ID], stop_ids=(TURN_END_ID,))
    (episode,) = does(programs, {"do": "guess", "prompt": gateway_agents.GO, "secret": 5}, engine=engine)
    (trajectory,) = samples(episode)
    assert [trajectory.ids[s:e] for s, e in trajectory.turns] == [(*odd, TURN_END_ID)] * 3
    assert encode(DIALECT.tokenizer.decode(odd)) != odd


CURL = """
row=$(cat)
answer=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d '{"model": "any", "messages": [{"role": "user", "content": "go"}]}')
case "$answer$row" in *one*seven*) echo '{"reward": 1, "by": "curl"}';; *) echo "$answer"; exit 3;; esac
"""


def test_any_program_plays_with_the_row_on_stdin_and_the_address_in_the_environment(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(CURL)
    with Programs(f"sh {shlex.quote(str(script))}", AgentOptions(workers=1)) as programs:
        good, bad = play(programs, talker("one"), [{"n": "seven"}, {"n": "eight"}])
    assert (good.rewards, good.view) == ({"agent": 1.0}, {"by": "curl"})
    assert (bad.finish, bad.failure) == (Finish.ABORT, "sh ended with exit code 3")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{FILE}:runs", "has no `runs`; did you mean `run`?"),
        (f"{FILE}:GO", "is a list, not a function"),
        (f"{FILE}:alone", "cannot be called with (base_url, key, row): too many positional arguments"),
        ("no-such-program --fast", "there is no program 'no-such-program' to start"),
        ("nowhere.py:run", "there is no file"),
    ],
)
def test_what_is_no_program_is_said_at_the_start(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EnvError) as caught:
        Programs(name, AgentOptions(workers=1))
    assert words in str(caught.value)
    assert not list(tmp_path.glob("rolecall-gateway-*"))


def listening(port):
    """The addresses, in the kernel's notation, at which something listens on a port of this machine."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [words[1].split(":")[0] for words in lines if words[3] == "0A" and int(words[1].split(":")[1], 16) == port]


def test_the_endpoint_is_on_loopback_only_and_gone_with_the_run():
    before = threading.active_count()
    with Programs(f"{FILE}:run", AgentOptions(workers=1, network=True)) as programs:
        does(programs, "well")
        port = programs.ready["port"]
        assert listening(port) == ["0100007F"], "127.0.0.1"
        place, pids = programs.socket, [w.process for w in programs.workers]
        assert place.exists()
        assert place.parent.stat().st_mode & 0o077 == 0, "nobody else may connect"
    assert not place.parent.exists()
    assert all(process.poll() is not None for process in pids)
    assert threading.active_count() == before
    assert not listening(port)
