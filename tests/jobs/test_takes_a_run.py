"""Every option that takes a model takes a run: a finished one, and one that is still training."""

import shutil
from pathlib import Path

import pytest

import rolecall
from rolecall.cli import main
from rolecall.cli.commands import COMMANDS, imported
from rolecall.config.schema import schema

TAKES_A_MODEL = ("model", "against", "algorithm.critic_from", "from_run", "reward", "judge", "eval.reward", "run")
TASK, SHORT = "sorting:length=2", ["--sampling.max_new_tokens", "2"]
SPREAD = ["--algorithm.entropy_coef", "0.01"]  # trains although an untrained model's answers all score 0
RL = ["rl", "--rows", TASK, "--steps", "1", "--prompts", "2", "--samples", "2", *SPREAD, *SHORT]
STEP = ["--rows", TASK, "--steps", "1", "--batch", "2"]
BEST = ["best-of-n", "--rows", TASK, "--count", "2", "--n", "2", *SHORT]
EXPERT = [
    "expert-iteration",
    "--rows",
    TASK,
    "--steps",
    "1",
    "--prompts",
    "2",
    "--samples",
    "2",
    "--keep",
    "best",
    *SHORT,
]
EVAL = ["eval", "--rows", TASK, "--n", "2", *SHORT]
AUDIT = ["audit", "--rows", TASK, "--prompts", "2", "--samples", "2", "--groups", "2", "--no-page", *SHORT]
HELD_OUT = ["--eval.every", "1", "--eval.rows", "2"]
PPO = ["--preset", "ppo", "--algorithm.critic", "separate"]

CALLS = {  # {} is a run of a policy, [] one of a reward model, <> one with rollouts
    ("generate", "model"): ["generate", "--model", "{}", "--prompt", "sort 12=", *SHORT],
    ("eval", "model"): [*EVAL, "--model", "{}"],
    ("eval", "against"): [*EVAL, "--model", "tiny", "--against", "{}", "--samples", "2"],
    ("eval", "reward"): [*EVAL, "--model", "tiny", "--reward", "[]"],
    ("play", "model"): ["play", "--model", "{}", "--env", "guessing", "--agent.max_turns", "1", *SHORT],
    ("propose", "model"): None,  # needs an environment and a proposer, opens it as play does: test_propose.py
    ("sft", "model"): ["sft", *STEP, "--model", "{}"],
    ("sft", "eval.reward"): ["sft", *STEP, *HELD_OUT, "--eval.reward", "[]"],
    ("rm", "model"): ["rm", *STEP, "--model", "{}"],
    ("dpo", "model"): ["dpo", *STEP, "--model", "{}"],
    ("dpo", "eval.reward"): ["dpo", *STEP, *HELD_OUT, "--eval.reward", "[]"],
    ("rl", "model"): [*RL, "--model", "{}"],
    ("rl", "reward"): [*RL, "--reward", "[]"],
    ("rl", "eval.reward"): [*RL, *HELD_OUT, "--eval.reward", "[]"],
    ("rl", "algorithm.critic_from"): [*RL, *PPO, "--algorithm.critic_from", "[]"],
    ("rl", "from_run"): ["rl", "--from", "<>", "--steps", "1", *SPREAD, *SHORT],
    ("best-of-n", "model"): [*BEST, "--model", "{}"],
    ("best-of-n", "reward"): [*BEST, "--reward", "[]"],
    ("best-of-n", "judge"): [*BEST, "--judge", "[]"],
    ("expert-iteration", "model"): [*EXPERT, "--model", "{}"],
    ("expert-iteration", "reward"): [*EXPERT, "--reward", "[]"],
    ("expert-iteration", "eval.reward"): [*EXPERT, *HELD_OUT, "--eval.reward", "[]"],
    ("audit", "model"): [*AUDIT, "--model", "{}"],
    ("audit", "reward"): [*AUDIT, "--reward", "[]"],
    ("audit", "eval.reward"): None,  # settings of rl that audit does not look at
    ("audit", "algorithm.critic_from"): None,
    ("audit", "from_run"): None,
    ("rescore", "run"): ["rescore", "<>"],
    ("rescore", "reward"): ["rescore", "<>", "--reward", "[]"],
    ("report", "run"): ["report", "<>"],
    ("doctor", "run"): ["doctor", "<>"],
    ("diff", "against"): None,  # runs to compare, never models: tests/look/test_diff.py
    ("plan", "model"): ["plan", "{}", "--gpus", "1"],
    ("serve", "model"): None,  # serves until it is ended: tests/serving
    ("push", "run"): ["push", "<>", "me/mine", "--dry-run"],
    ("rm", "eval.reward"): None,  # refused
    ("marl", "eval.reward"): None,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of each kind, finished and without a final model."""
    place = tmp_path_factory.mktemp("takes")
    how = {"steps": 1, "quiet": True, "rows": TASK}
    rolecall.sft(out=place / "policy", batch=2, **how)
    rolecall.rm(out=place / "judge", batch=2, **how)
    spread = {"sampling": {"max_new_tokens": 2}, "algorithm": {"entropy_coef": 0.01}}
    rolecall.rl(out=place / "rollouts", prompts=2, samples=2, **spread, **how)
    for name in ("policy", "judge"):
        shutil.copytree(place / name, place / f"{name}-training")
        shutil.rmtree(place / f"{name}-training" / "model")
    return place


def test_no_option_is_forgotten():
    there = {
        (command.name, option.key)
        for command in COMMANDS
        for option in schema(imported(command.options)).options()
        if option.key in TAKES_A_MODEL
    }
    assert there - CALLS.keys() == set()


def run_call(key, stand):
    words = CALLS[key]
    out = ["--out", "scored"] if words[0] == "rescore" else []
    code = main([str(stand.get(word, word)) for word in words] + out)
    return 0 if words[0] in ("audit", "doctor") and code == 1 else code  # it has found something to say


@pytest.mark.parametrize("key", [key for key, words in CALLS.items() if words is not None], ids=" ".join)
def test_an_option_that_takes_a_model_takes_a_run(key, place, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    stand = {"{}": place / "policy", "[]": place / "judge", "<>": place / "rollouts"}
    assert run_call(key, stand) == 0, capfd.readouterr().err


@pytest.mark.parametrize("key", [("generate", "model"), ("eval", "reward")], ids=" ".join)
def test_a_run_that_is_still_training_gives_its_latest_checkpoint(key, place, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    stand = {"{}": place / "policy-training", "[]": place / "judge-training"}
    assert run_call(key, stand) == 0, capfd.readouterr().err


def test_no_other_place_opens_models():
    """One place decides what a name stands for."""
    for path in (Path(rolecall.__file__).parent / "jobs").glob("*.py"):
        text = path.read_text()
        if path.name != "models.py":
            assert "RewardModel.load(" not in text, path
            assert "RewardModelReward" not in text, path
            assert not any(
                "policy.load import" in line and " load" in line.partition("import")[2] for line in text.splitlines()
            ), path


def test_a_run_without_any_weights_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("runs/empty").mkdir(parents=True)
    Path("runs/empty/run.json").write_text("{}")
    assert main(["generate", "--model", "runs/empty", "--prompt", "x"]) == 2
    assert "the run runs/empty has no model and no checkpoint of one" in capfd.readouterr().err
