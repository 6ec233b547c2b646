"""A dictionary of environments, as TRL's `environment_factory` takes it."""

import pytest
from talking import play, spoken, talker
from test_envs import Counter
from test_gateway import WITH_TOOLS

from rolecall.agents.adapters import SeveralEnvs
from rolecall.errors import UserError
from rolecall.tasks.env import Step


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Speller:
    """Of TRL's kind, with a tool of its own."""

    def reset(self, **row) -> str:
        assert "environment" not in row
        return f" Spell {row['word']}."

    def spell(self, letter: str) -> str:
        """Say a letter.

        Args:
            letter: The letter.
        """
        return letter

    def get_reward(self) -> float:
        return 0.5


class Ours:
    """Not of TRL's kind."""

    def reset(self, row, seed):
        return f"{sorted(row)}"

    def step(self, message):
        return Step(reward=2.0, done=True)


def three():
    return SeveralEnvs({"count": Counter, "spell": lambda: Speller(), "ours": Ours}, {"add": add})


CALL = '<tool_call>{"name": "increment", "arguments": {"step": 3}}</tool_call>'


def test_a_row_names_the_one_it_plays_and_reads_the_tools_of_that_one():
    rows = [
        {"environment": "count", "prompt": "Go.", "goal": 3},
        {"environment": "spell", "prompt": "Go.", "word": "a"},
        {"environment": "ours"},
    ]
    played = play(three, talker(CALL, "done"), rows, new_tokens=99, dialect=WITH_TOOLS, context_length=4000)
    assert [episode.rewards["agent"] for episode in played] == [1.0, 0.5, 2.0]
    assert [episode.counts.get("tool_failures") for episode in played] == [0, 1, None]
    assert played[0].view == {"value": 3, "goal": 3, "reward": 1.0}
    read = [spoken(episode.trajectories(group=0)["agent"][0]) for episode in played]
    prompts = ["".join(text for who, _, text in said if who == "prompt") for said in read]
    shown = [[f'"{tool}"' in prompt for tool in ("add", "increment", "spell")] for prompt in prompts]
    assert shown == [[True, True, False], [True, False, True], [False, False, False]]
    assert "Go. Spell a." in prompts[1]
    assert "[]" in prompts[2], "the name of the environment is no part of the row that it begins with"


def test_one_that_a_limit_cuts_off_still_says_what_it_is_worth():
    rows = [{"environment": "count", "prompt": "", "goal": 3}, {"environment": "ours"}]
    counted, ours = play(three, talker(CALL), rows, new_tokens=99, max_turns=1, dialect=WITH_TOOLS, context_length=4000)
    assert (counted.rewards, counted.finish.truncated, ours.finish.truncated) == ({"agent": 1.0}, True, False)


def test_a_row_that_names_none_of_them_ends_the_run():
    with pytest.raises(UserError, match="a row's `environment` is None, and there are count, spell, ours: name one"):
        play(three, talker("done"), [{"prompt": "Go."}])
