"""Credit by turns, from an environment's rewards to the advantages of tokens."""

import json

import pyarrow.parquet as pq
import pytest
import torch

import rolecall
from rolecall.agents.judging import marks_of, question
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.experience.batches import Joined
from rolecall.recipes.prepare import turn_fields
from rolecall.tasks.env import Step
from rolecall.types import Trajectory


class Letters:
    """Two turns: each is given its number of characters; the first answer is repeated to the policy."""

    def reset(self, row, seed):
        self.turn = 0
        return "say something"

    def step(self, message):
        self.turn += 1
        text = message["content"]
        return Step(messages=f"you said {text}", reward=float(len(text)), done=self.turn == 2)


SMALL = {"steps": 1, "prompts": 2, "samples": 4, "sampling": {"max_new_tokens": 3}, "env": Letters, "quiet": True}


def rows_of(run):
    table = pq.read_table(run.path / "rollouts" / "step-000001.parquet").to_pylist()
    return [row | {"extras": json.loads(row["extras"])} for row in table]


def by_turn(row):
    """The advantages of each turn, of which all tokens have the same."""
    found = []
    for span in row["turns"]:
        (value,) = {round(a, 6) for a in row["advantages"][span["start"] : span["end"]]} or {0.0}
        found.append(value)
    return found


@pytest.fixture(scope="module")
def turns_run(tmp_path_factory):
    algorithm = {"credit": "turns", "scale": "none", "turn_gamma": 0.5}
    return rolecall.rl(algorithm=algorithm, out=tmp_path_factory.mktemp("credit") / "run", **SMALL)


def test_what_follows_a_turn_is_compared_within_its_group(turns_run):
    rows = rows_of(turns_run)
    for group in {row["group"] for row in rows}:
        own = [row for row in rows if row["group"] == group]
        returns = []
        for row in own:
            first, second = row["extras"]["turn_rewards"]
            assert first + second == row["total"]
            returns.append((first + 0.5 * second, second))
        mean = sum(sum(pair) / 2 for pair in returns) / len(own)
        for row, pair in zip(own, returns, strict=True):
            assert by_turn(row) == pytest.approx([value - mean for value in pair], abs=1e-5)


def test_states_are_equal_where_the_policy_read_the_same(turns_run):
    for row in rows_of(turns_run):
        first, second = row["extras"]["turn_states"]
        assert first != second
    assert len({row["extras"]["turn_states"][0] for row in rows_of(turns_run)}) == 1
    said = {(row["messages"][1]["content"], row["extras"]["turn_states"][1]) for row in rows_of(turns_run)}
    assert len(said) == len({text for text, _ in said}) == len({state for _, state in said})


def marked(completions, log_extra, **kwargs):
    log_extra("turn_marks", [[1.0, None] for _ in completions])
    return [None] * len(completions)


@pytest.mark.parametrize(
    "algorithm",
    [{"credit": "adca"}, {"credit": "adca", "credit_judge": "policy"}, {"credit": "gigpo", "credit_weight": 1.0}],
)
def test_the_other_kinds_run_and_record_what_they_used(tmp_path, algorithm):
    reward = {"reward": marked} if algorithm == {"credit": "adca"} else {}
    run = rolecall.rl(algorithm=algorithm, out=tmp_path / "run", **SMALL, **reward)
    extras = [row["extras"] for row in rows_of(run)]
    assert all(len(e["turn_rewards"]) == 2 for e in extras)
    if reward:
        assert [e["turn_marks"] for e in extras] == [[1.0, None]] * 8
    elif "credit_judge" in algorithm:
        assert all(len(e["turn_marks"]) == 2 for e in extras)


def wrong(completions, log_extra, **kwargs):
    log_extra("turn_marks", [[1.0] for _ in completions])
    return [None] * len(completions)


def test_marks_that_do_not_fit_the_turns_are_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"2 turns of the policy, but its turn_marks are 1 of them"):
        rolecall.rl(algorithm={"credit": "adca"}, reward=wrong, out=tmp_path / "run", **SMALL)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"algorithm": {"credit": "turns"}}, "give env too"),
        ({"algorithm": {"credit_weight": 1.0}}, "credit_weight has no effect with credit episode"),
        ({"algorithm": {"credit": "turns", "credit_judge": "policy"}}, "credit_judge has no effect with credit turns"),
        ({"algorithm": {"credit": "adca", "credit_judge": "me"}, "env": "guessing"}, "credit_judge is `policy` or an"),
        ({"algorithm": {"credit": "turns", "name": "rloo"}, "env": "guessing"}, "use name grpo"),
        ({"algorithm": {"credit": "turns", "scale": "batch"}, "env": "guessing"}, "use scale group"),
        ({"algorithm": {"credit": "turns", "turn_gamma": 0.0}, "env": "guessing"}, "turn_gamma is a discount"),
        ({"algorithm": {"credit": "turns", "loss": "gspo"}, "env": "guessing"}, "set algorithm.loss to clip"),
        (
            {"algorithm": {"credit": "turns", "kl_coef": 0.1, "kl_in": "reward"}, "env": "guessing"},
            "set algorithm.kl_in to loss",
        ),
        ({"algorithm": {"credit": "turns"}, "env": "guessing", "replay": {"share": 0.5}}, "which replay does not keep"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        rolecall.rl(out=tmp_path / "run", **settings)


def test_turns_are_counted_on_through_the_samples_of_an_episode_and_empty_ones_lose_nothing():
    def sample(spans, **more):
        return Trajectory(ids=(1,) * 6, roles=(1,) * 6, turns=spans, **more)

    rows = [sample(((1, 1), (2, 4))), sample(((0, 1), (3, 3), (4, 6))), sample(((0, 2),), episode=1)]
    extras = {"turn_rewards": [1.0, 2.0, 3.0, 4.0, 5.0], "turn_states": [10, 20, 30, 40, 50]}
    found = turn_fields(rows, [extras, extras, {}], Joined(rows), width=7)
    assert found["turns"].tolist() == [
        [-1, -1, 0, 0, -1, -1, -1],
        [1, -1, -1, -1, 2, 2, -1],
        [0, 0, -1, -1, -1, -1, -1],
    ]
    assert found["turn_rewards"].tolist() == [
        [0, 0, 3, 3, 0, 0, 0],  # 1 of the empty turn before it
        [7, 0, 0, 0, 5, 5, 0],  # and 4 of the one after it
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert found["turn_states"][1, [0, 4]].tolist() == [30, 50]
    assert found["turn_marks"][1, 4] == 5
    assert torch.isnan(found["turn_marks"][0, 0])


def test_a_judge_is_asked_about_turns_by_number_and_read_line_by_line():
    messages = [
        {"role": "user", "content": "open the door"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "a key"},
        {"role": "assistant", "content": "take key"},
    ]
    asked = question(messages, 0.5)
    assert "scored 0.5" in asked
    assert "turn 1: look\ntool: a key\nturn 2: take key" in asked
    assert marks_of("1: GOOD\n- 2: bad, because\n2: GOOD\n7: GOOD", 3) == [1.0, -1.0, None]
    assert marks_of("I cannot say", 2) == [None, None]


def test_credit_is_that_of_the_episode_unless_asked_for():
    assert RLOptions().algorithm.credit == "episode"
