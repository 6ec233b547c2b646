"""What jobs do around their learners: names of runs, several processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from resume_driver import forked

import rolecall.jobs.sft  # noqa: F401  (here, or every child would import it)
from rolecall.cli import main
from rolecall.config.plan import TINY_VOCABULARY, logits_line, ranks_line, vocabulary_of
from rolecall.config.training import SFTOptions
from rolecall.jobs.running import Run, _open, next_free, unless_stopped
from rolecall.policy.tiny import tiny_config
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import Outcome


def test_two_jobs_without_a_name_never_share_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = next_free("sft")
    with _open(SFTOptions(), both) as first, _open(SFTOptions(), both) as second:
        assert [first.path.name, second.path.name] == ["sft-1", "sft-2"]


def test_jobs_started_at_once_each_get_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["sft", "--rows", "sorting:length=2", "--steps", "1", "--batch", "4", "--save.every", "0", "--quiet"]
    children = [forked(lambda: main(words)) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["sft-1", "sft-2"]


def test_two_processes_train_one_run(tmp_path):
    """torchrun, as people start it: one directory, one summary, metrics over both."""
    sys.path.append(str(Path(__file__).parents[1] / "train"))
    from test_ranks import free_port

    words = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    (tmp_path / "mine.py").write_text("def odd(completions, **k):\n    return [len(c) % 2 for c in completions]\n")
    command = ["rl", "--preset", "ppo", "--rows", "sorting:length=2", "--reward", "mine.py:odd", "--out", "runs/two"]
    command += ["--steps", "2", "--prompts", "6", "--sampling.max_new_tokens", "6", "--algorithm.minibatches", "2"]
    command += ["--eval.every", "2", "--eval.rows", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "-m", "rolecall", *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run: runs/two") == 1
    run = tmp_path / "runs" / "two"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["optimizer_steps"] == 4 for line in steps)
    assert (run / "model" / "model.safetensors").is_file()


def test_the_plan_knows_ranks_and_what_logits_take(tmp_path, monkeypatch):
    assert TINY_VOCABULARY == tiny_config().vocab_size == vocabulary_of("tiny")
    (tmp_path / "config.json").write_text('{"vocab_size": 49152}')
    assert vocabulary_of(str(tmp_path)) == 49152
    assert vocabulary_of("some/hub-id") is None
    line = logits_line(str(tmp_path), 8192)
    assert line.startswith("logits: 32 MB at a time")
    assert "1,536 MB" in line
    assert ranks_line(16, "prompts") == "ranks: 1"
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert ranks_line(16, "prompts") == "ranks: 3, each with 5 to 6 of the 16 prompts"


@pytest.mark.parametrize(
    ("code", "raised"), [(ExitCode.INTERRUPTED, KeyboardInterrupt), (ExitCode.TERMINATED, SystemExit)]
)
def test_a_script_does_not_go_on_after_a_run_that_was_stopped(code, raised):
    outcome = Outcome(step=3, exit_code=code, reason="stopped at step 3", best=None, best_step=None)
    with pytest.raises(raised):
        unless_stopped(Run(path=Path("runs/x"), outcome=outcome))
    done = Run(path=Path("runs/x"), outcome=replace(outcome, exit_code=ExitCode.DONE))
    assert unless_stopped(done) is done


def test_from_python_progress_is_seen_where_nobody_set_up_logging(tmp_path):
    code = "import rolecall; rolecall.sft(rows='sorting:length=2', steps=1, batch=2, out='x')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "done after 1 step" in done.stderr
