"""Gymnasium environments as text: the prompt, actions by number and name, observations, and where an episode ends."""

import pytest

from rolecall.agents.environments import open_env
from rolecall.agents.gym_text import GymTextEnv, plain_ansi, sections, short_names
from rolecall.agents.replies import first_reply, next_reply
from rolecall.config.flags import parse
from rolecall.config.merge import make
from rolecall.config.parts import HeldOutOptions
from rolecall.config.rl import RLOptions
from rolecall.config.schema import schema
from rolecall.errors import UserError
from rolecall.jobs.agents import episode_rows
from rolecall.tasks.env import EnvError, own_limit

gymnasium = pytest.importorskip("gymnasium")


def said(text):
    return {"role": "assistant", "content": text}


def heard(reply):
    return reply.messages["agent"][-1]["content"]


def test_the_prompt_says_what_the_docstring_says_and_how_to_answer():
    text = heard(first_reply(open_env("gym:FrozenLake-v1:is_slippery=false")(), {}, 0))
    assert text.startswith("Frozen lake involves crossing a frozen lake from start to goal")
    assert "- Reach goal: +1" in text
    assert "Actions: 0 Move left, 1 Move down, 2 Move right, 3 Move up." in text
    assert "Answer with a number from 0 to 3, or left, down, right, up, and nothing else." in text
    assert text.endswith("\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert "\x1b" not in text


def test_a_module_that_registers_an_environment_may_stand_before_its_id():
    named = "gym:gymnasium.envs.toy_text:FrozenLake-v1:is_slippery=false"
    assert heard(first_reply(open_env(named)(), {}, 0)) == heard(
        first_reply(open_env("gym:FrozenLake-v1:is_slippery=false")(), {}, 0)
    )
    with pytest.raises(EnvError, match=r"gym:nowhere\.here:Some-v1 cannot be made: No module named 'nowhere'"):
        open_env("gym:nowhere.here:Some-v1")()


@pytest.mark.parametrize(
    "prompt", ["Go to G.", [{"role": "system", "content": "x"}, {"role": "user", "content": "Go to G."}]]
)
def test_a_rows_prompt_takes_the_place_of_the_description(prompt):
    first = first_reply(GymTextEnv("FrozenLake-v1"), {"prompt": prompt}, 7)
    assert heard(first) == "Go to G.\n[S]FFF\nFHFH\nFFFH\nHFFG"


def test_env_prompt_is_put_before_the_first_observation_of_every_row():
    how = {"evaluation": HeldOutOptions(every=1, rows=2), "seed": 0, "n": 3, "prompt": "Go."}
    for rows in episode_rows("gym:FrozenLake-v1", None, **how):
        assert heard(first_reply(GymTextEnv("FrozenLake-v1"), rows[0], 0)) == "Go.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    with pytest.raises(UserError, match=r"env\.prompt is for environments named gym:…; guessing says itself"):
        episode_rows("guessing", None, **how)
    with pytest.raises(UserError, match="the rows have prompts of their own"):
        episode_rows("gym:FrozenLake-v1", [{"prompt": str(i)} for i in range(30)], **how)


def test_env_prompt_is_a_flag_and_a_setting():
    assert parse(["--env.prompt", "Go."], schema(RLOptions)).given == {"agent.prompt": "Go."}
    assert make(RLOptions, {"agent.prompt": "Go."}).agent.prompt == "Go."


def test_an_episode_by_names_ends_at_the_goal():
    env = GymTextEnv("FrozenLake-v1", is_slippery=False)
    first_reply(env, {}, 0)
    for action in ("down", "Move down", "2", "Down.", "RIGHT", "right"):
        reply = next_reply(env, said(action))
        assert not reply.counts
    assert (reply.done, reply.truncated, reply.rewards) == (True, False, {"agent": 1.0})


@pytest.mark.parametrize("wrong", ["move", "4", "-1", "leftright", "left down", ""])
def test_another_answer_is_counted_and_told_what_is_wanted(wrong):
    env = GymTextEnv("FrozenLake-v1", is_slippery=False)
    first_reply(env, {}, 0)
    reply = next_reply(env, said(wrong))
    assert (heard(reply), reply.counts) == (
        "answer with a number from 0 to 3, or left, down, right, up",
        {"bad_actions": 1},
    )


@pytest.mark.parametrize(
    ("name", "answer", "action", "shown"),
    [
        ("Taxi-v4", "drop off", 5, "Actions: 0 Move south (down)"),
        ("Taxi-v4", "down", 0, "[R](blue)"),
        ("Taxi-v4", "Pickup passenger", 4, "or south, north, east, west, pickup, drop off"),
        ("Blackjack-v1", "hit", 1, "Observation space: The observation consists of a 3-tuple"),
        ("CliffWalking-v1", "up", 0, "which incurs -100 reward."),
        ("CartPole-v1", "left", 0, "\n\nCart Position -0.04"),
        ("Acrobot-v1", "1", 1, "Cosine of theta1 "),
    ],
)  # fmt: skip
def test_the_usual_environments_are_described_and_played(name, answer, action, shown):
    env, same = GymTextEnv(name), gymnasium.make(name)
    text = heard(first_reply(env, {}, 3))
    assert shown in text
    assert len(text) < 1000, "it fits the built-in model's context"
    reply = next_reply(env, said(answer))
    same.reset(seed=3)
    _, reward, terminated, *_ = same.step(action)
    assert (reply.rewards["agent"], reply.done, reply.counts) == (reward, terminated, {})


def test_without_a_docstring_the_spaces_say_what_can_be_said():
    class Bare(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(3, start=2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.low / 3, {}

        def step(self, action):
            assert action == 4
            return self.observation_space.low, 0.0, False, False, {}

    gymnasium.register("Bare-v0", entry_point=Bare, disable_env_checker=True)
    env = GymTextEnv("Bare-v0")
    assert heard(first_reply(env, {}, 0)) == "Answer with a number from 2 to 4, and nothing else.\n\n[-0.3333, -0.3333]"
    assert not next_reply(env, said("4")).counts
    assert next_reply(env, said("1")).counts


def test_arrays_that_are_no_few_numbers_are_refused():
    class Picture(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, (8, 8))
        action_space = gymnasium.spaces.Discrete(2)

    gymnasium.register("Picture-v0", entry_point=Picture)
    with pytest.raises(EnvError, match=r"gym:Picture-v0 shows arrays of shape \[8, 8\], which are not text"):
        GymTextEnv("Picture-v0")


def test_gymnasiums_time_limit_is_a_truncation():
    env = GymTextEnv("FrozenLake-v1", is_slippery=False, max_episode_steps=2)
    first_reply(env, {}, 0)
    next_reply(env, said("0"))
    reply = next_reply(env, said("0"))
    assert (reply.done, reply.truncated) == (True, True)


class OwnLimit(gymnasium.Env):
    """Reports its own limit as an end, as rware does; action 1 really ends it."""

    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)
    max_steps = 3

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, 1.0, action == 1 or self.t == self.max_steps, False, {}


gymnasium.register("OwnLimit-v0", entry_point=OwnLimit)


@pytest.mark.parametrize(("actions", "truncated"), [("000", True), ("01", False), ("1", False)])
def test_an_environments_own_limit_is_a_truncation_and_an_end_before_it_is_none(actions, truncated):
    env = GymTextEnv("OwnLimit-v0")
    assert own_limit(env._env) == 3
    for _ in range(2):  # the count begins again
        first_reply(env, {}, 0)
        replies = [next_reply(env, said(action)) for action in actions]
        assert [r.done for r in replies] == [False] * (len(actions) - 1) + [True]
        assert replies[-1].truncated == truncated


def test_docstrings_are_read_by_section_without_links_and_code():
    doc = """Opening line
    goes on.

    ## Rewards
    - win: +1 ([see](https://x.y/z))
    ```python
    hidden
    ```
    """
    assert sections(doc) == {"": "Opening line goes on.", "rewards": "- win: +1 (see)"}
    assert sections("") == {"": ""}


def test_short_names_are_words_that_no_other_action_has():
    assert short_names({0: "Move south (down)", 1: "Move north", 2: "Drop off"}) == {
        0: ["south", "down"], 1: ["north"], 2: ["drop off", "drop", "off"]}  # fmt: skip


def test_colours_are_named_only_where_there_are_several():
    assert plain_ansi("\x1b[41mS\x1b[0mF\n") == "[S]F"
    assert plain_ansi("\x1b[34;1mR\x1b[0m\x1b[43m \x1b[0m") == "[R](blue)[ ](yellow)"
