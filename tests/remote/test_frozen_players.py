"""Players who do not learn: what they say is observed by the others, and nothing of them trains."""

import json
from contextlib import ExitStack

import pytest
from pyarrow.parquet import read_table
from served import app_of, serving

import rolecall
from rolecall.agents.frozen import FrozenEnvs, Voice
from rolecall.agents.pool import Failure, LocalEnvs
from rolecall.config.agents import AgentOptions
from rolecall.errors import UserError
from rolecall.jobs.agents import _voice
from rolecall.maths.roles import Role
from rolecall.serving.app import App
from rolecall.serving.http import HttpError
from rolecall.tasks.env import Move
from rolecall.types import Sampling


class Passes(App):
    """Says pass, whatever it reads."""

    fails = False

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self.read = []

    async def _chat(self, request):
        if self.fails:
            raise HttpError(400, "no more")
        self.read.append(json.loads(request.body))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "pass"}}
        return {"choices": [choice], "usage": {"completion_tokens": 1}}


@pytest.fixture(scope="module")
def app():
    return app_of(kind=Passes)


@pytest.fixture(scope="module")
def url(app):
    with serving(app) as address:
        yield f"{address}/v1"


class Talk:
    """Everybody speaks in turn, so many times, and hears what the others said."""

    players = ("ann", "bob", "cid")
    rounds = 2

    def reset(self, row, seed):
        self.said = []
        return Move(speaker="ann", messages={p: [{"role": "user", "content": f"you are {p}"}] for p in self.players})

    def step(self, message):
        speaker = self.players[len(self.said) % 3]
        self.said.append(f"{speaker}:{message['content']}")
        done = len(self.said) == 3 * self.rounds
        heard = {"role": "user", "content": message["content"], "author": speaker}
        return Move(
            speaker=self.players[len(self.said) % 3],
            messages={p: [heard] for p in self.players if p != speaker},
            rewards={speaker: 1.0},
            counts={"words": 1.0},
            done=done,
        )


class Echo(Voice):
    """Says its name and how many messages it has read."""

    def __init__(self, name):
        self.name, self.waiting, self.seeds = name, [], []

    def begin(self, key, messages, *, seed):
        self.waiting.append((key, f"{self.name}{len(messages)}"))
        self.seeds.append((key, seed))

    def ended(self, *, wait):
        found, self.waiting = self.waiting[-1:], self.waiting[:-1]  # the last one first
        return found

    def forget(self):
        self.waiting = []

    def __len__(self):
        return len(self.waiting)


def test_the_others_are_told_all_that_happened_since_they_spoke():
    bob, cid = Echo("bob"), Echo("cid")
    envs = FrozenEnvs(LocalEnvs(Talk), {"bob": bob, "cid": cid}, max_turns=9)
    assert envs.players == ("ann",)
    first = envs.ask("start", {0: ({}, 7), 1: ({}, 7)})
    assert [m["content"] for m in first[0].messages["ann"]] == ["you are ann"]
    assert set(first[0].messages) == {"ann"}
    then = envs.ask("step", {key: {"role": "assistant", "content": "hello"} for key in (0, 1)})
    for reply in then.values():
        assert [(m["author"], m["content"]) for m in reply.messages["ann"]] == [("bob", "bob2"), ("cid", "cid3")]
        assert (reply.rewards, reply.counts, reply.speaker, reply.done) == ({"ann": 1.0}, {"words": 3.0}, "ann", False)
    last = envs.ask("step", {0: {"role": "assistant", "content": "bye"}})[0]
    assert last.done
    assert [m["content"] for m in last.messages["ann"]] == ["bob5", "cid6"]
    seeds = [[seed for k, seed in bob.seeds if k == key] for key in (0, 1)]
    assert (
        seeds[0][0] == seeds[1][0] != seeds[0][1]
    )  # episodes of a row have equal luck; turns have numbers of their own


def test_one_who_is_silent_ends_its_episode_and_endless_talk_is_cut_off():
    class Mute(Echo):
        def ended(self, *, wait):
            return [(key, Failure(reason="silent")) for key, _ in super().ended(wait=wait)]

    envs = FrozenEnvs(LocalEnvs(Talk), {"bob": Mute("bob"), "cid": Echo("cid")}, max_turns=9)
    envs.ask("start", {0: ({}, 7)})
    assert envs.ask("step", {0: {"role": "assistant", "content": "a"}}) == {0: Failure(reason="silent")}
    envs = FrozenEnvs(LocalEnvs(Talk), {"bob": Echo("bob"), "ann": Echo("ann")}, max_turns=2)
    envs.ask("start", {0: ({}, 7)})
    cut = envs.ask("step", {0: {"role": "assistant", "content": "a"}})[0]
    assert (cut.done, cut.truncated) == (True, True)


HOW = {"model": "tiny", "env": "kuhn", "sampling": {"max_new_tokens": 4}}


def test_a_served_player_is_heard_and_not_recorded(app, url):
    app.read.clear()
    sides = rolecall.play(**HOW, n=2, agent={"frozen": [f"first={url}"]})
    assert {side.player for side in sides} == {"second"}
    for side in sides:
        (sampled,) = side.trajectories
        start, end, _ = next(run for run in sampled.authors if run[2] == "first")
        assert set(sampled.roles[start:end]) == {int(Role.OBSERVATION)}
        assert bytes(sampled.ids[start:end]).decode() == "pass"
    assert [set(body["messages"][0]) for body in app.read] == [{"role", "content"}] * 2
    assert all(body["messages"][0]["content"].startswith("first ") for body in app.read)


def test_a_run_against_a_frozen_player_trains_the_other_side_only(url, tmp_path):
    how = HOW | {"steps": 1, "prompts": 2, "samples": 2, "algorithm": {"entropy_coef": 0.1}, "quiet": True}
    run = rolecall.rl(**how, agent={"frozen": [f"first={url}"]}, out=str(tmp_path / "run"))
    rows = read_table(run.path / "rollouts/step-000001.parquet").to_pylist()
    assert [row["agent"] for row in rows] == ["second"] * 4
    assert all("first" in [run["author"] for run in row["authors"]] for row in rows)
    assert json.loads((run.path / "config.json").read_text())["agent"]["frozen"] == [f"first={url}"]


def test_a_model_here_plays_as_it_would_answer():
    """With random numbers of its own, whatever the others do at the same time."""
    with ExitStack() as stack:
        voice = _voice("tiny", stack, sampling=Sampling(max_new_tokens=3), seconds=9.0)
        envs = FrozenEnvs(LocalEnvs(Talk), {"bob": voice, "cid": Echo("cid")}, max_turns=9)
        hello = {"role": "assistant", "content": "hello"}

        def said(count):
            envs.ask("start", {key: ({}, key % 2) for key in range(count)})
            found = envs.ask("step", dict.fromkeys(range(count), hello))
            return [found[key].messages["ann"][0]["content"] for key in range(count)]

        both = said(4)
        assert both[0] == both[2] != both[1]
        assert said(2) == both[:2]
        voice.limit = 4
        assert envs.ask("start", {0: ({}, 1)})[0].speaker == "ann"
        assert "no room left in its context" in envs.ask("step", {0: hello})[0].reason


def test_a_server_that_refuses_ends_a_run_whose_every_episode_needs_it(app, url, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "fails", True)
    how = HOW | {"steps": 1, "prompts": 1, "samples": 2, "quiet": True, "out": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"all 2 episodes of step 1 .* a frozen player is silent: .* no more"):
        rolecall.rl(**how, agent={"frozen": [f"first={url}"]})


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ({"frozen": ["third=tiny"]}, "the players of kuhn are first, second; 'third' is none of them"),
        ({"frozen": ["first=tiny", "second=tiny"]}, "the players of kuhn are first, second; leave one that learns"),
        ({"frozen": ["first=http://127.0.0.1:9/v1"]}, "http://127.0.0.1:9/v1: nothing answers there"),
        ({"frozen": ["first=runs/nowhere"]}, "runs/nowhere"),
    ],
)
def test_what_cannot_be_frozen_is_said_before_any_work(agent, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        rolecall.rl(**HOW, agent=agent, out=str(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [("first",), ("=x",), ("a=1", "a=2")])
def test_how_players_are_named(given):
    with pytest.raises(ValueError, match=r"agent.frozen wants each player once, as PLAYER=MODEL"):
        AgentOptions(frozen=given)
