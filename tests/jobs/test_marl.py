"""`rolecall marl`: runs, what they leave, resuming, wrong calls."""

import json
import shutil
from pathlib import Path

import marl_driver
import pyarrow.parquet as pq
import pytest
import torch
from resume_driver import differing

import rolecall
from rolecall.cli import main
from rolecall.config.marl import MARLOptions
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts
from rolecall.marl.nets import load_agents
from rolecall.maths.roles import Role, Verdict


@pytest.mark.parametrize("algo", ["qmix", "mappo"])
def test_a_run_that_is_killed_ends_with_the_same_bytes(algo, tmp_path):
    """SIGKILL three times; buffer, priorities, epsilon, target networks and moments go on exactly."""
    result = marl_driver.interrupt(algo, tmp_path, 1, 3)
    assert -9 in result["ended"]
    assert result["last"] == 0
    assert result["differing"] == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of each kind."""
    place = tmp_path_factory.mktemp("marl")
    for algo in ("qmix", "mappo"):
        assert marl_driver.train(algo, place / algo) == 0
    return place


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_same_command_twice_writes_the_same_bytes_and_another_seed_does_not(finished, tmp_path):
    marl_driver.train("mappo", tmp_path / "again")
    assert differing(finished / "mappo", tmp_path / "again") == []
    marl_driver.train("mappo", tmp_path / "other", seed=1)
    assert "model/agents.safetensors" in differing(finished / "mappo", tmp_path / "other")


@pytest.mark.parametrize("algo", ["qmix", "mappo"])
def test_a_run_leaves_metrics_evaluations_and_agents(finished, algo):
    run = finished / algo
    steps = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, marl_driver.STEPS + 1))
    assert all(line["grad_norm"] > 0 and line["skipped"] == 0 for line in steps)
    optimizer_steps = {"qmix": 2, "mappo": MARLOptions().ppo.epochs * 2}  # updates; epochs of two mini-batches
    assert steps[-1]["optimizer_steps"] == optimizer_steps[algo]
    assert [line["step"] for line in lines(run) if "eval_return" in line] == [0, 3, 6, 8]
    if algo == "qmix":
        epsilon = [line["epsilon"] for line in steps]
        assert epsilon[0] == 1.0
        assert epsilon == sorted(epsilon, reverse=True)
        assert epsilon[-1] < 0.9
    agents, about = load_agents(run / "model")
    assert about["env"] == "lbf:5x5-2p-1f"
    assert agents.shape.recurrent == (algo == "qmix")


def test_the_entropy_bonus_fades(finished):
    """From 0.02 to 0 over eight steps, read back from the loss and its terms."""
    steps = [line for line in lines(finished / "mappo") if "loss" in line]
    weights = [(line["loss/policy"] + 0.5 * line["loss/value"] - line["loss"]) / line["loss/entropy"] for line in steps]
    assert weights == pytest.approx([0.02 * (1 - i / 7) for i in range(8)], abs=1e-6)


def test_every_number_of_a_run_is_documented(finished):
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = page.split("## Multi-agent")[1].split("\n## ")[0]
    for algo in ("qmix", "mappo"):
        names = {name for line in lines(finished / algo) for name in line} - {"step"}
        assert {name for name in names if f"`{name}`" not in section} == set()


def test_recorded_episodes_are_read_like_any_other_record(finished):
    path = finished / "mappo" / "rollouts" / "step-000004.parquet"
    rollouts = read_rollouts(path)
    assert rollouts.step == 4
    assert {t.policy_version for t in rollouts.trajectories} == {3}, "of the weights before the step's update"
    assert len(rollouts.trajectories) == 4 * 2, "a row for each episode and agent"
    assert {t.agent for t in rollouts.trajectories} == {"player_0", "player_1"}
    for row in pq.read_table(path).to_pylist():
        length = len(row["ids"])
        assert len(row["roles"]) == len(row["verdicts"]) == len(row["rewards"]) == length
        assert set(row["roles"]) == {Role.CONTENT}
        assert set(row["verdicts"]) == {Verdict.TRAINED}
        assert sum(row["rewards"]) == pytest.approx(row["score"])
        assert row["finish"] == ("environment" if json.loads(row["extras"])["ended"] else "max_turns")
        assert row["finish"] == "environment" or length == 50


def test_steps_can_be_added_and_settings_changed(finished, tmp_path, caplog):
    run = rolecall.marl(env="climbing", algo="iql", steps=2, episodes=2, out=str(tmp_path / "run"), quiet=True)
    assert run.outcome.step == 2
    more = rolecall.marl(out=str(tmp_path / "run"), resume=True, extend=2, **{"optim.lr": 1e-3}, quiet=True)
    assert [line["step"] for line in more.metrics if "loss" in line] == [1, 2, 3, 4]
    assert "optim.lr changed" in caplog.text
    assert [line["learning_rate"] for line in more.metrics if "loss" in line][-1] == 1e-3


@pytest.mark.parametrize("given", [{"network": True}, {"variables": ("KEY",)}])
def test_what_only_workers_have_needs_workers(given):
    with pytest.raises(UserError, match="give workers too"):
        rolecall.marl(env="climbing", **given)


def test_other_networks_are_refused_by_name(finished, tmp_path):
    shutil.copytree(finished / "mappo", tmp_path / "run")
    with pytest.raises(UserError, match=r"is of other networks: agents\.\S+ is \(8, \d+\) there and \(16, \d+\) here"):
        marl_driver.train("mappo", tmp_path / "run", resume=True, **{"agent.hidden": 16}, steps=9)


def test_a_buffer_that_is_too_small_for_the_saved_one_is_refused(finished, tmp_path):
    shutil.copytree(finished / "qmix", tmp_path / "run")
    with pytest.raises(UserError, match="holds 10 episodes and this one has room for 5"):
        marl_driver.train("qmix", tmp_path / "run", resume=True, steps=9, **{"q.buffer": 5})


@pytest.mark.parametrize("algo", ["vdn", "ippo"])
def test_agents_learn_a_matrix_game(algo, tmp_path):
    """At random a round of penalty:-25 pays -3.1 a step; the safe agreement pays 2, the best 10."""
    quick = {"optim.lr": 5e-3, "q.epsilon_steps": 4000, "q.buffer": 200, "agent.hidden": 16, "record.every": 0}
    run = rolecall.marl(
        env="penalty:-25", algo=algo, steps=50, episodes=8, quiet=True, out=str(tmp_path / "run"), **quick
    )
    assert run.metrics[1]["return"] < 20, "at random, or nearly so"
    assert run.evaluations[-1]["eval_return"] >= 45


def test_q_learners_are_evaluated_by_their_best_action_or_by_drawing(tmp_path):
    """The episodes of a matrix game are all alike if agents do what they think best."""
    small = {"env": "climbing", "algo": "iql", "steps": 1, "episodes": 2, "quiet": True}
    best = rolecall.marl(**small, out=str(tmp_path / "best"))
    drawn = rolecall.marl(**small, out=str(tmp_path / "drawn"), **{"eval.temperature": 10.0})
    assert best.evaluations[-1]["eval_return_std"] == 0
    assert drawn.evaluations[-1]["eval_return_std"] > 10


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env", "climbin"], "did you mean 'climbing'"),
        (["--algo", "qmx"], "did you mean qmix"),
        (["--algo", "vdn", "--rewards", "individual"], "vdn learns what the team gets"),
        (["--q.buffer", "3"], "q.buffer at least q.batch"),
        (["--q.epsilon-end", "2"], "epsilon"),
        (["--q.epsilon-spread", "2"], "q.epsilon_spread lies between 0 and 1"),
        (["--eval.temperature", "-1"], "eval.temperature is 0 or more"),
        (["--q.lamda", "1"], "did you mean --q.lam?"),
        (["--episodes", "0"], "at least 1"),
        (["--env", "gym:Pendulum-v1"], "Discrete"),
        (["--device", "cuda"], "leave out device"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["marl", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_what_a_step_is_made_of(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["marl", "--algo", "qmix", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "one step: 32 whole episodes of lbf:8x8-2p-2f-coop" in said
    assert "random choices: 1 falling to 0.05" in said
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_breaks_in_the_middle_ends_the_run_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}\n"
        "    def step(self, action): raise ValueError('no such door')\n"
    )
    words = ["--env", "mine.py:Env", "--episodes", "2", "--steps", "2", "--eval.every", "0", "--quiet"]
    assert main(["marl", *words]) == 1
    assert "2 of them because it raised ValueError: no such door" in capsys.readouterr().err


def test_the_number_of_workers_changes_nothing(tmp_path):
    """The environments' process is not part of what is learned."""
    for workers in (0, 2):
        marl_driver.train("mappo", tmp_path / str(workers), workers=workers, steps=2)
    a, b = (load_agents(tmp_path / str(workers) / "model")[0] for workers in (0, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
