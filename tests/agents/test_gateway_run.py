"""Whole runs with `--agent`: the same as with an environment, and what goes wrong on the way."""

from pathlib import Path

import gateway_agents
import pyarrow.parquet as pq
import pytest

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError

FILE = Path(gateway_agents.__file__)
RUN = {
    "model": "tiny",
    "rows": "guessing",
    "prompts": 2,
    "samples": 3,
    "sampling.max_new_tokens": 4,
    "reward": f"{FILE}:even",
    "seed": 3,
}


def rollouts(out):
    tables = [pq.read_table(path).to_pylist() for path in sorted((out / "rollouts").glob("*.parquet"))]
    return [{name: value for name, value in row.items() if name != "details"} for table in tables for row in table]


@pytest.mark.parametrize(
    ("agent", "ahead"),
    [
        (gateway_agents.guess, 0),
        pytest.param(gateway_agents.guess, 1, marks=pytest.mark.slow),
        pytest.param(f"{FILE.with_name('openai_agents.py')}:sync", 0, marks=pytest.mark.slow),
    ],
    ids=["urllib", "urllib-ahead", "openai"],
)
def test_an_agent_through_the_gateway_trains_what_it_trains_as_an_environment(tmp_path, agent, ahead):
    """Also with OpenAI's client, and one that plays ahead of training, with evaluations in between."""
    more = {"ahead": ahead, "eval.every": ahead, "eval.rows": 2, "steps": 3}
    rolecall.rl(**RUN, **more, env="guessing", out=str(tmp_path / "env"))
    rolecall.rl(**RUN, **more, agent=agent, out=str(tmp_path / "agent"))
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("env", "agent")]
    assert weights[0] == weights[1]
    ours, theirs = rollouts(tmp_path / "env"), rollouts(tmp_path / "agent")
    assert len(ours) == 18
    assert len({str(row["scores"]) for row in ours}) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert {k: str(v) for k, v in one.items()} == {k: str(v) for k, v in other.items()}


def test_the_command_line_takes_a_function_and_evaluates_with_it(tmp_path, capsys):
    """The rollouts say why each sample began."""
    out = tmp_path / "run"
    arguments = ["--model", "tiny", "--rows", "guessing", "--steps", "1", "--prompts", "2", "--samples", "2"]
    arguments += ["--sampling.max_new_tokens", "4", "--algorithm.entropy_coef", "0.01", "--out", str(out)]
    assert main(["rl", "--agent", f"{FILE}:guess_with_help", *arguments]) == 0
    assert {row["extras"] for row in rollouts(out)} == {'{"began": [null, "openings"]}'}
    assert main(["eval", "--model", str(out), "--n", "2", "--sampling.max_new_tokens", "4"]) == 0
    assert "mean_turns" in capsys.readouterr().out


def test_a_run_whose_programs_all_fail_says_why(tmp_path):
    with pytest.raises(
        UserError, match=r"all 6 episodes of step 1 were broken off .*: its program ended without an answer"
    ):
        rolecall.rl(**RUN, agent=gateway_agents.never_calls, steps=1, out=str(tmp_path / "run"))


def test_what_is_not_for_programs_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"agent.when_full cut is for environments"):
        rolecall.rl(**RUN, env=f"agent:{FILE}:guess", out=str(tmp_path / "a"), **{"agent.when_full": "cut"})
    with pytest.raises(UserError, match="give one of them"):
        rolecall.rl(**RUN, env="guessing", agent=gateway_agents.guess, out=str(tmp_path / "b"))
