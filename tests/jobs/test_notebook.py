"""In a notebook: a bar while a run goes on, and the run itself as a picture; nothing in red."""

import json
import subprocess
import sys
from pathlib import Path

from rolecall.jobs.generate import Answer
from rolecall.jobs.running import Run
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import Outcome
from rolecall.types import Finish, Trajectory

CELL = """
import rolecall
rolecall.rl(rows="sorting:length=2", reward=lambda completions, **k: [float(len(set(c))) for c in completions],
            steps=2, prompts=2, samples=4, **{"sampling.max_new_tokens": 4, "eval.every": 1, "eval.rows": 2})
"""
EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
NotebookClient(book, timeout=200, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
json.dump([dict(output) for output in book.cells[0].outputs], open("outputs.json", "w"))
"""


def test_a_cell_shows_a_bar_and_the_run_and_nothing_red(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, CELL], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads((tmp_path / "outputs.json").read_text())
    assert [o for o in outputs if o.get("name") == "stderr"] == []
    (bar,) = [o["data"]["text/html"] for o in outputs if o["output_type"] == "display_data"]
    assert '<progress style="width: 20em" max="2" value="2">' in bar
    assert "done after 2 steps" in bar
    assert "step 2: reward" in bar
    (shown,) = [o["data"] for o in outputs if o["output_type"] == "execute_result"]
    assert shown["text/plain"].startswith("Run('runs/rl-1': done after 2 steps, reward ")
    assert "<svg" in shown["text/html"]
    assert "eval_reward" in shown["text/html"]


def run_of(lines, reason="done after 9 steps", path="runs/x"):
    outcome = Outcome(step=9, exit_code=ExitCode.DONE, reason=reason, best=None, best_step=None)
    return Run(path=Path(path), outcome=outcome, metrics=lines)


def test_a_run_prints_short():
    lines = [{"step": i, "reward": i / 10, "loss": 0.0} for i in range(1, 10)]
    assert repr(run_of(lines)) == "Run('runs/x': done after 9 steps, reward 0.900)"
    assert repr(run_of([{"step": 1, "loss": 0.5}])) == "Run('runs/x': done after 9 steps)"


def test_the_picture_of_a_run_escapes_what_others_wrote():
    lines = [{"step": i, "reward": i / 10, "<b>name": 1.0} for i in (1, 2)] + [{"step": 2, "eval_<i>": 0.5}]
    shown = run_of(lines, reason="<script>alert(1)</script>", path="<img src=x>")._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert "<i>" not in shown
    assert "eval_&lt;i&gt;" in shown
    assert 'aria-label="Reward: total goes from 0.1 at step 1 to 0.2 at step 2' in shown
    assert "<svg" not in run_of([])._repr_html_()


def test_an_answer_prints_short():
    trajectory = Trajectory(ids=(1, 2), roles=(1, 2), turns=((1, 2),), finish=Finish.STOP)
    answer = Answer(prompt="12+34=", text="46", trajectory=trajectory, tokens=("a", "b"))
    assert repr(answer) == "Answer('12+34=' -> '46', stop)"
    long = Answer(prompt=[{"role": "user", "content": "x" * 500}], text="y" * 500, trajectory=trajectory, tokens=())
    assert len(repr(long)) < 150
    assert repr(long).startswith("Answer('xxx")
