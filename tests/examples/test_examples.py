"""Every example runs, and says what it promises to say."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "own_reward": "reward by step: [",
    "rule_reward_reinforce": "share right, greedy: ",
    "trl_reward": "answers/characters",
    "verl_reward": "mean score: ",
    "own_algorithm": "loss terms: ['loss/grad_norm', 'loss/policy', 'loss/total']",
    "sft_then_grpo": "step 2: ",
    "reward_model_ppo": "critic/explained_variance",
    "conversation_rows": "length",
    "generate_with_roles": "CONTENT",
    "own_environment": "step 2: reward",
    "own_agent": "step 2: reward",
    "stream_experience": "1 files; best answer, step ",
    "kuhn_self_play": "exploitability 0.",
}


def test_no_example_is_forgotten():
    elsewhere = {
        "openenv_server",
        "verifiers_environment",
        "mcp_server",
        "langgraph_agent",
    }  # made by and for other packages: tests/agents
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, *elsewhere, "steps"}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    """In this process, which has torch loaded."""
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_an_example_is_a_script(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "generate_with_roles.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS["generate_with_roles"] in done.stdout
