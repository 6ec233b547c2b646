"""Tasks that a model makes: proposals are read, solved, compared and tried before they become rows."""

import json

import pytest
import torch

import rolecall
from rolecall.agents.proposing import Novelty, alike, proposals_in, question
from rolecall.cli import main
from rolecall.errors import UserError

ENV = """
from rolecall.tasks.env import Step

class Sums:
    def reset(self, row, seed):
        self.right, self.left = str(row["a"] + row["b"]), 2
        return f"{row['a']}+{row['b']}"

    def step(self, message):
        self.left -= 1
        if message["content"] == self.right:
            return Step(reward=1.0, done=True)
        return Step(messages="no", reward=0.0, done=self.left == 0)
"""

PROPOSER = """
import json

def propose(questions):
    made = [
        {"row": {"a": 5, "b": 6}, "solution": ["11"]},
        {"row": {"a": 7, "b": 8}, "solution": ["1", "15"]},
        {"row": {"a": 9, "b": 9}, "solution": ["19"]},
        {"row": {"a": 1, "b": 2}, "solution": ["3"]},
        {"row": {"a": 5, "b": 6}, "solution": ["11"]},
        {"row": {"a": 5}, "solution": ["5"]},
    ]
    texts = [f"Here is one: {json.dumps(one)}" for one in made] + ["I have no idea"]
    return [texts[i % len(texts)] for i in range(len(questions))]
"""

SMALL = {"n": 7, "explore": 1, "tries": 2, "hardest": 0.0, "meaning": 1.1, "sampling": {"max_new_tokens": 2}}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "sums.py").write_text(ENV)
    (tmp_path / "proposer.py").write_text(PROPOSER)
    (tmp_path / "given.jsonl").write_text('{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n')
    return tmp_path


def how(place, **more):
    return SMALL | {
        "model": "tiny",
        "env": f"{place}/sums.py:Sums",
        "proposer": f"{place}/proposer.py:propose",
        "rows": str(place / "given.jsonl"),
        "out": str(place / "more.jsonl"),
        **more,
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_kept_is_solvable_and_new_and_says_where_it_comes_from(place):
    made = rolecall.propose(**how(place))
    rows = lines(made.path)
    assert [(row["a"], row["b"]) for row in rows] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert [row["made_by"] for row in rows[:2]] == [None, None]
    assert rows[3]["made_by"] == {
        "proposer": f"{place}/proposer.py:propose",
        "model": "tiny",
        "env": f"{place}/sums.py:Sums",
        "seed": 0,
        "solution": ["1", "15"],
        "solved_share": 0.0,
    }
    assert (made.given, made.made) == (2, 2)
    assert made.dropped == {
        "not a row of these fields with a solution": 2,
        "its solution does not solve it": 1,
        "too much like another row": 2,
    }
    # the rows train as they are
    run = rolecall.rl(
        env=f"{place}/sums.py:Sums", rows=str(made.path), steps=1, prompts=2, samples=2, quiet=True,
        sampling={"max_new_tokens": 2}, algorithm={"entropy_coef": 0.01}, out=place / "run",
    )  # fmt: skip
    assert run.outcome.exit_code == 0


def test_the_share_is_kept_to_and_new_rows_may_stand_alone(place):
    made = rolecall.propose(**how(place, share=0.34))
    assert (made.given, made.made) == (2, 1)
    assert made.dropped["beyond a share of 0.34"] == 1
    alone = rolecall.propose(**how(place, share=1.0, overwrite=True))
    assert (alone.given, alone.made) == (0, 2)
    assert all(row["made_by"] for row in lines(alone.path))


def test_rows_that_the_policy_never_solves_are_too_hard(place, capsys):
    words = [f"--{name}={value}" for name, value in how(place, hardest=0.5).items() if name != "sampling"]
    assert main(["propose", *words, "--sampling.max_new_tokens", "2"]) == 1
    assert "2 too hard" in capsys.readouterr().err
    assert not (place / "more.jsonl").exists()


def test_the_command_says_what_came_of_it(place, capsys):
    words = [f"--{name}={value}" for name, value in how(place).items() if name != "sampling"]
    assert main(["propose", *words, "--sampling.max_new_tokens", "2"]) == 0
    assert "2 new rows, plus 2 given ones" in capsys.readouterr().out
    assert main(["propose", *words]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"env": "kuhn"}, "an environment of one player"),
        ({"proposer": "nobody.py:f"}, "there is no file"),
        ({"proposer": "policy", "proposal_tokens": 4000}, "do not fit the context of tiny"),
        ({"share": 0.0}, "share is a part of the rows"),
        ({"hardest": 0.9, "easiest": 0.1}, "in this order"),
        ({"tries": 0}, "tries must be at least 1"),
    ],
)
def test_what_cannot_work_is_a_sentence(place, more, sentence):
    if more.get("env") == "kuhn":
        more = more | {"rows": None}
    with pytest.raises(UserError, match=sentence):
        rolecall.propose(**how(place, **more))


def test_the_policy_may_propose_and_nothing_of_it_is_kept_unseen(place):
    with pytest.raises(UserError, match="none of 3 proposals was kept: 3 not a row"):
        rolecall.propose(**how(place, proposer="policy", n=3, proposal_tokens=8))


def test_what_is_alike_in_words_or_meaning_is_not_new():
    assert alike("open the door", "The door, open!") == 1.0
    assert alike("a b", "c d") == 0.0
    places = {"north": [1.0, 0.0], "up": [0.96, 0.28], "east": [0.0, 1.0], "east again": [0.0, 1.0]}
    novel = Novelty(["north"], lambda text: torch.tensor(places[text]), words=0.4, meaning=0.9)
    assert [novel.takes(text) for text in ("up", "east", "east again")] == [False, True, False]


def test_questions_show_rows_and_how_they_were_played():
    asked = question([{"a": 1}], [[{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]])
    assert '{"a": 1}\nuser: 1?\nassistant: 2' in asked
    (found,) = proposals_in('x {"row": {"a": 2}, "solution": ["3"]} y', ["a"])
    assert (found.row, found.solution) == ({"a": 2}, ("3",))
    assert list(proposals_in("{" * 5000, ["a"])) == [None]
