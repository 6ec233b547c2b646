"""One dry episode before training: an environment that cannot work is a sentence, and one that can is left as it was."""

from pathlib import Path

import letters_env
import pytest

import rolecall
from rolecall.errors import UserError
from rolecall.jobs import rl as training
from rolecall.jobs.agents import try_out
from rolecall.tasks.env import Step

FILE = Path(letters_env.__file__)
SHORT = {
    "steps": 1,
    "prompts": 2,
    "samples": 3,
    "sampling.max_new_tokens": 5,
    "agent.workers": 1,
    "quiet": True,
}


class Fails:
    """A reset or a step that does what a subclass says."""

    def reset(self, row, seed):
        return "go"

    def step(self, message):
        return Step(reward=1.0, done=True)


class FiveTuple(Fails):
    def step(self, message):
        return "seen", 1.0, True, False, {}


class NoText(Fails):
    def reset(self, row, seed):
        return "seen", {}


class Refuses(Fails):
    def reset(self, row, seed):
        raise KeyError("board")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (FiveTuple, r"FiveTuple cannot continue an episode: FiveTuple\.step returned a tuple of 5, as Gymnasium's"),
        (NoText, r"cannot begin an episode: NoText\.reset returned a pair \(observation, info\)"),
        (Refuses, "cannot begin an episode: KeyError: 'board'"),
    ],
)
def test_an_environment_that_cannot_work_is_found_by_a_dry_episode(env, said, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "open_policy", lambda *args: pytest.fail("the model was loaded first"))
    with pytest.raises(UserError, match=said):
        rolecall.rl(env=env, out=str(tmp_path / "run"), **SHORT)
    assert not (tmp_path / "run").exists()


def test_a_step_that_raises_in_the_dry_episode_is_a_warning(tmp_path, caplog):
    class Numbers(Fails):
        def step(self, message):
            if message["content"] == "0":
                raise ValueError("0 is no number here")
            return Step(reward=float(sum(message["content"].encode()) % 3), done=True)

    run = rolecall.rl(env=Numbers, out=str(tmp_path / "run"), **SHORT)
    assert "failed in a dry episode, when given '0': ValueError: 0 is no number here" in caplog.text
    assert run.outcome.exit_code == 0


def test_a_dry_episode_leaves_no_trace_in_the_run(tmp_path, monkeypatch):
    """The same answers, rewards and weights with and without it; built-in environments have none."""
    runs = [rolecall.rl(env=f"{FILE}:Letters", out=str(tmp_path / "with"), **SHORT)]
    tried = []
    monkeypatch.setattr(training, "try_out", lambda *args: tried.append(args))
    runs.append(rolecall.rl(env=f"{FILE}:Letters", out=str(tmp_path / "without"), **SHORT))
    assert len(tried) == 1
    for name in ("metrics.jsonl", "model/model.safetensors", "rollouts/step-000001.parquet"):
        assert (runs[0].path / name).read_bytes() == (runs[1].path / name).read_bytes(), name


def test_no_dry_episode_for_what_is_built_in():
    class Untouchable:
        def start(self, starts):
            raise AssertionError("a dry episode of a built-in task")

    for name in ("guessing", "addition", "rg:chain_sum"):
        try_out(name, Untouchable(), {})
