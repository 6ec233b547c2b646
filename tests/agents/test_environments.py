"""Environments as they are made, asked and answered: by name, from Python, in a worker, and of Gymnasium as text."""

import pickle

import gymnasium
import pytest
from talking import player, talker

from rolecall.agents import gym_text
from rolecall.agents.conversation import Conversation
from rolecall.agents.environments import as_factory
from rolecall.agents.gym_text import GymTextEnv, numbered
from rolecall.agents.played import Wanted
from rolecall.agents.pool import Failure, LocalEnvs
from rolecall.agents.replies import BadReply, first_reply, next_reply
from rolecall.agents.worker import open_worker
from rolecall.tasks.env import EnvError, Step
from rolecall.types import Completion, Finish, Sampling

SAID = {"role": "assistant", "content": "a"}


class Sums:
    """Adds up what it hears, and says the sum."""

    def reset(self, row, seed):
        self.sum = seed
        return f"{self.sum}"

    def step(self, message):
        self.sum += len(message["content"])
        return Step(messages=f"{self.sum}", done=self.sum > 5)


class Wrong(Sums):
    def step(self, message):
        return 3


class Documented(gymnasium.Env):
    """Opening words.

    ## Description
    What it is about.

    ## Action Space
    - 0: Go to X.
    - 1: Stay here.

    ## Rewards
    One at the end.
    """

    action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return (options or {}).get("start", 0), {}

    def step(self, action):
        return 0, 0.0, True, False, {}


@pytest.fixture(scope="module")
def documented():
    gymnasium.register(id="Documented-v0", entry_point=Documented)
    yield "Documented-v0"
    del gymnasium.registry["Documented-v0"]


def heard(reply):
    return reply.messages["agent"][-1]["content"]


def test_the_prompt_of_a_documented_environment(documented):
    text = heard(first_reply(GymTextEnv(documented), {}, 0))
    assert text == (
        "Opening words.\n\nRewards: One at the end.\n\nWhat it is about.\n\nActions: 0 Go to X, 1 Stay here.\n\n"
        "Answer with a number from 0 to 1, or go to x, stay here, and nothing else.\n\n0"
    )
    assert numbered("- 0: Go to X.") == {0: "Go to X"}


@pytest.mark.parametrize(("more", "kept"), [(0, True), (-1, False)])
def test_a_part_of_the_prompt_is_kept_if_it_just_fits(documented, monkeypatch, more, kept):
    monkeypatch.setattr(gym_text, "_ROOM", len("Opening words.") + len("One at the end.") + more)
    text = heard(first_reply(GymTextEnv(documented), {}, 0))
    assert ("One at the end." in text) == kept
    assert "What it is about." not in text


def test_a_row_may_hold_options_of_the_reset(documented):
    assert heard(first_reply(GymTextEnv(documented), {"options": {"start": 7}}, 0)).endswith("\n\n7")


def test_a_render_mode_that_is_given_is_used():
    assert heard(first_reply(GymTextEnv("FrozenLake-v1", render_mode=None), {}, 0)).endswith("\n\n0")


def test_what_cannot_make_environments_is_named():
    with pytest.raises(EnvError, match="environment 3: a int is not a class or function that makes environments"):
        as_factory(3)


@pytest.mark.parametrize("count", [4, 5])
def test_a_tuple_of_gymnasiums_kind_is_answered_with_what_to_return(count):
    class Tuples(Sums):
        def step(self, message):
            return ("text", 0.0, True, False, {})[:count]

    env = Tuples()
    first_reply(env, {}, 0)
    with pytest.raises(BadReply, match=f"a tuple of {count}, as Gymnasium's environments do"):
        next_reply(env, SAID)


def test_an_episode_that_goes_on_is_neither_done_nor_cut_off():
    first = first_reply(Sums(), {}, 0)
    assert (first.done, first.truncated) == (False, False)


def test_a_failure_says_whether_the_environment_returned_nonsense_or_raised():
    class Raises(Sums):
        def step(self, message):
            raise ValueError("no")

    found = []
    for env in (Wrong, Raises):
        envs = LocalEnvs(env)
        envs.ask("start", {0: ({}, 0)})
        (failure,) = envs.ask("step", {0: SAID}).values()
        assert isinstance(failure, Failure)
        found.append(failure.wrong)
    assert found == [True, False]


def worker(env):
    """What a worker's `answer` sends for a job."""
    _, answer = open_worker({"source": pickle.dumps(env), "name": "it"})

    def ask(key, call, given, rebuild=None):
        sent = []
        answer({"batch": 1, "key": key, "call": call, "given": given, "rebuild": rebuild}, sent.append)
        return sent[0]

    return ask


def test_a_worker_plays_an_episode_again_to_where_another_was():
    ask = worker(Sums)
    calls = [("start", ({}, 3)), ("step", SAID)]
    digests = [ask(0, *call)["digest"] for call in calls]
    on = ask(0, "step", SAID)
    again = worker(Sums)(7, "step", SAID, rebuild=(calls, digests))
    assert again == on
    assert on["reply"]["messages"]["agent"][0]["content"] == "5"
    other = worker(Sums)(7, "step", SAID, rebuild=(calls, digests[::-1]))
    assert other["wrong"]
    assert "went another way" in other["error"]


def test_a_worker_says_when_an_environment_returned_nonsense():
    ask = worker(Wrong)
    ask(0, "start", ({}, 0))
    found = ask(0, "step", SAID)
    assert found["wrong"]
    assert found["done"]
    assert "a int, not a Step" in found["error"]


def test_progress_counts_the_episodes_that_are_over():
    told = []
    made = player(Sums, talker("aaa"))
    made.advance = lambda *how: told.append(how)
    wanted = [Wanted(prompt=i, sample=0, row={}, seed=seed) for i, seed in enumerate((0, 5))]
    made.play(wanted, Sampling(max_new_tokens=8), seed=0, step=0)
    assert told[0] == (1, 2, "episodes"), "the one that began near its end"
    assert told[-1] == (2, 2, "episodes")


def test_a_cut_context_goes_on_with_a_turn_of_the_policy():
    turns = 6
    conversation = Conversation(player(Sums, talker("a")).dialect)
    conversation.give([{"role": "user", "content": "begin"}])
    for turn in range(turns):
        ids = (*conversation.dialect.tokenizer("word", add_special_tokens=False)["input_ids"], 258)
        conversation.prompt()
        conversation.say(
            Completion(
                ids=ids,
                behaviour_logprobs=(0.0,) * len(ids),
                finish=Finish.STOP,
                policy_version=0,
                prompt=0,
                sample=0,
                seed=0,
            )
        )
        conversation.hear([{"role": "user", "content": f"observation {turn}"}])
    whole = len(conversation.prompt())
    assert conversation.shorten(limit=whole, room=20)
    text = conversation.dialect.tokenizer.decode(conversation.prompt())
    assert text.index("<|im_start|>assistant") < text.index("<|im_start|>user", text.index("begin"))
    assert f"observation {turns - 1}" in text
    assert "observation 0" not in text
