"""The demo: its four runs, its tables, and the commands it proposes. (`make demo` shows what it learns.)"""

import shlex
from functools import partial

import pytest

from rolecall.cli import main
from rolecall.cli.demo import run
from rolecall.config.use import DemoOptions
from rolecall.errors import UserError
from rolecall.jobs import demo as module

SMALL = {
    "sft": {"steps": 4, "batch": 8},
    "rm": {"steps": 2, "batch": 4},
    "rl": {"steps": 2, "prompts": 4, "algorithm.entropy_coef": 0.01},
    "evaluate": {"n": 12},
}


@pytest.fixture
def small(monkeypatch):
    """The demo with a few steps of everything."""
    for name, settings in SMALL.items():
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, partial(lambda f, less, **kw: f(**kw | less), whole, settings))
    monkeypatch.setattr(module, "_DEMONSTRATIONS", 40)
    monkeypatch.setattr(module, "_ASKED", 30)


def test_the_demo_shows_its_runs_and_proposes_commands_that_work(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(DemoOptions(quiet=True)) == 0
    shown = capsys.readouterr().out
    made = tmp_path / "runs" / "demo-1"
    assert sorted(p.name for p in made.iterdir() if p.is_dir()) == ["grpo", "ppo", "reward-model", "sft"]
    assert "12 held-out sorting problems" in shown
    assert "answers before and after" in shown
    assert "runs/demo-1/report.html" in shown
    page = (made / "report.html").read_text(encoding="utf-8")
    assert page.count("They agree") == 2, "PPO's and GRPO's contributions add up to their losses"
    proposed = [line.strip() for line in shown.splitlines() if line.strip().startswith("rolecall ")]
    assert len(proposed) == 3
    for line in proposed:
        assert main([*shlex.split(line)[1:], "--dry-run"]) == 0, line


def test_half_of_the_demonstrations_are_the_wrong_way_round():
    rows = module.mixed_demonstrations()
    rising = [list(row["completion"]) == sorted(row["completion"]) for row in rows]
    assert 0.45 < sum(rising) / len(rising) < 0.55


@pytest.mark.parametrize(("words", "steps"), [([], 150), (["--quick"], 100)])
def test_the_quick_demo_takes_fewer_steps(words, steps, tmp_path, monkeypatch, capsys):
    def stop(**settings):
        raise UserError(f"{settings['steps']} steps")

    monkeypatch.setattr(module, "sft", stop)
    assert main(["demo", "--out", str(tmp_path / "demo"), *words]) == 2
    assert f"rolecall demo: {steps} steps" in capsys.readouterr().err


def test_an_existing_run_or_file_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "other" / "ppo").mkdir(parents=True)
    for name, sentence in (("run", "is a run"), ("file", "is a file"), ("other", "ppo is there already")):
        with pytest.raises(UserError, match=sentence):
            module.demo(out=str(tmp_path / name), quiet=True)
