"""docs/metrics.md has a line for every number that a run logs."""

import json
import re
from pathlib import Path

import pytest
from accelerate import Accelerator
from short_runs import GRPO, GRPO_KL, PPO, REINFORCE, Evenness, guard_of, learner_of, policy_of, run

from rolecall.config.parts import OptimOptions
from rolecall.config.training import SFTOptions
from rolecall.policy.model import PolicyModel
from rolecall.recipes.collect import trajectory_of
from rolecall.recipes.records import Records
from rolecall.recipes.sft import SFTLearner
from rolecall.train.loop import Loop, LoopOptions
from rolecall.train.optim import make_optimizer
from rolecall.train.progress import Quiet
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.types import Completion, Finish, Request, Sampling

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def documented(title: str) -> list[re.Pattern[str]]:
    """The names in the tables of a section; {name} stands for anything without a slash."""
    section = PAGE.split(f"\n## {title}")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\|([^|]+)\|", section, re.MULTILINE)
    names = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name))) for name in names]


def unknown(names: set[str], title: str) -> set[str]:
    patterns = documented(title)
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


@pytest.mark.parametrize("algorithm", [GRPO, GRPO_KL, PPO, REINFORCE], ids=["grpo", "grpo-kl", "ppo", "reinforce"])
def test_every_number_of_an_rl_run_is_documented(algorithm, tmp_path):
    """With everything on that logs, through the loop, read from the files."""
    learner = learner_of(algorithm, dtype="bfloat16", reward=Evenness(failing=frozenset({(0, 1)})))
    with RunDir(tmp_path, "run") as opened:
        learner.watches = [Records(opened, learner.options, model=learner.engine.hash, tokenizer="bytes")]
        guard_of(learner)
        Loop(
            learner,
            LoopOptions(steps=2, save_every=0, keep=2, eval_every=1, main="reward"),
            run=opened,
            config={},
            write=lambda directory, extra: (directory / "state.json").write_text("{}"),
            evaluate=lambda step: {"reward": 1.0, "pass@8": 0.5},
            progress=Quiet(),
            timer=learner.timer,
        ).go(start=0, title="short")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step"}
    evaluations = {name for name in names if name.startswith("eval_")}
    assert unknown(names - evaluations, "Reinforcement learning") == set()
    assert unknown(evaluations, "Evaluations") == set()
    assert {"weights_moved", "engine_in_sync", "rounded_away", "records_lost", "rewards/even/std"} <= names
    times = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert unknown({name for line in times for name in line} - {"step"}, "`timing.jsonl`") == set()


def test_every_number_of_supervised_fine_tuning_is_documented():
    policy = policy_of()
    module = PolicyModel(policy.model)
    updater = Updater(
        Accelerator(cpu=True), module, make_optimizer(module, OptimOptions()), token_budget=256, max_grad_norm=1.0
    )
    answer = Completion(
        ids=(50, 258),
        behaviour_logprobs=(0.0, 0.0),
        finish=Finish.STOP,
        policy_version=0,
        prompt=0,
        sample=0,
        seed=0,
    )
    row = trajectory_of(Request(prompt_ids=(49,), sampling=Sampling()), answer, group=0)
    learner = SFTLearner(SFTOptions(batch=1), updater=updater, demonstrations=[row])
    learner.update(learner.collect(0))
    assert unknown(set(learner.metrics()), "Supervised fine-tuning") == set()


def test_a_reward_cannot_take_or_lose_a_name():
    """Its own numbers arrive whatever they are called, and leave the learner's alone."""

    class Talkative(Evenness):
        def take_metrics(self):
            return {"error_squared": 4.0, "loss": 99.0}

    learner = learner_of(reward=Talkative())
    run(learner, 1)
    assert learner.metrics()["error_squared"] == 4.0
    assert abs(learner.metrics()["loss"]) < 1
