"""A path that is not there is said at once, before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import rolecall
from rolecall.errors import UserError

CALLS = [
    (["eval", "--model", "runs/nope"], "model 'runs/nope': no such directory"),
    (["eval", "--model", "runs/furst"], "did you mean runs/first?"),
    (["eval", "--model", "mine/nope"], "model 'mine/nope': no such directory"),
    (["generate", "--model", "./nope", "--prompt", "x"], "model './nope': no such directory"),
    (["generate", "--model", "nope.gguf", "--prompt", "x"], "model 'nope.gguf': no such directory"),
    (["generate", "--model", "tiny", "--prompts_file", "nope.txt"], "prompts file 'nope.txt' cannot be read"),
    (["play", "--model", "runs/nope", "--env", "guessing"], "model 'runs/nope': no such directory"),
    (["play", "--model", "tiny", "--env", "nope.py:Env"], "environment 'nope.py:Env': there is no file"),
    (["play", "--model", "tiny", "--env", "trl:nope.py:Env"], "there is no file"),
    (["sft", "--rows", "nope.jsonl"], "there is no file or folder nope.jsonl"),
    (["sft", "--rows", "mine/nope"], "there is no file or folder mine/nope"),
    (["rm", "--rows", "./nope"], "there is no file or folder ./nope"),
    (["rl", "--rows", "nope.parquet"], "there is no file or folder nope.parquet"),
    (["rl", "--config", "nope.yaml"], "nope.yaml"),
    (["rl", "--reward", "nope.py:f"], "reward 'nope.py:f': there is no file"),
    (["rl", "--reward", "runs/nope"], "reward 'runs/nope': there is no such run"),
    (["rl", "--eval.every", "1", "--eval.reward", "nope.py:f"], "there is no file"),
    (["rl", "--env", "nope.py:Env"], "environment 'nope.py:Env': there is no file"),
    (["rl", "--from", "runs/nope"], "there is no run runs/nope"),
    (["rl", "--out", "runs/nope", "--resume"], "there is no run to resume in runs/nope"),
    (
        ["rl", "--preset", "ppo", "--algorithm.critic", "separate", "--algorithm.critic_from", "runs/nope"],
        "reward model 'runs/nope': no such directory",
    ),
    (["eval", "--model", "tiny", "--samples", "2", "--against", "runs/nope"], "model 'runs/nope': no such directory"),
    (["best-of-n", "--judge", "nope.py:f"], "judge 'nope.py:f': there is no file"),
    (["dpo", "--rows", "a/b/c"], "there is no file or folder a/b/c"),
    (["rescore", "nope"], "there is no run nope"),
    (["report", "nope"], "there is no run nope"),
    (["marl", "--env", "nope.py:make"], "environment 'nope.py:make': there is no file"),
]

DRIVER = """
import sys
from rolecall.cli import main

for line in sys.stdin.read().splitlines():
    code = main(line.split())
    loaded = [name for name in ("torch", "numpy", "transformers", "rich") if name in sys.modules]
    print(f"exit {code}, loaded {loaded}", file=sys.stderr, flush=True)
"""


def test_a_missing_path_is_one_sentence_without_torch(tmp_path):
    Path(tmp_path / "runs/first").mkdir(parents=True)
    Path(tmp_path / "mine").mkdir()
    lines = "\n".join(" ".join(words) for words, _ in CALLS)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=lines,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = done.stderr.splitlines()
    assert done.stdout == ""
    assert len(said) == 2 * len(CALLS), done.stderr
    for (words, sentence), line, end in zip(CALLS, said[::2], said[1::2], strict=True):
        assert line.startswith(f"rolecall {words[0]}: "), line
        assert sentence in line
        assert end == "exit 2, loaded []", (words, end)


def test_from_python_a_run_that_is_not_there_is_said_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="model 'runs/nope': no such directory"):
        rolecall.eval(model="runs/nope")


def test_names_that_are_no_paths_pass(tmp_path, monkeypatch):
    from rolecall.config.preflight import check_paths
    from rolecall.config.rl import RLOptions

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/rows.jsonl").write_text("{}\n")
    for rows in (
        "sorting:length=3",
        "rg:chain_sum",
        "openai/gsm8k",
        "openai/gsm8k:main@train",
        "data/rows.jsonl",
        "data",
    ):
        check_paths(RLOptions(rows=rows))
    for model in ("tiny", "gpt2", "HuggingFaceTB/SmolLM2-135M", "data", "(given in Python) a/b/c"):
        check_paths(RLOptions(model=model))
    for reward in ("exact", "task", "package.module:function"):
        check_paths(RLOptions(reward=(reward,)))
    check_paths(RLOptions(env="gym:CartPole-v1"))
