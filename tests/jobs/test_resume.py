"""A run that is interrupted and resumed is, byte for byte, the run that was not."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from resume_driver import ROWS, STEPS, Letters, differing, interrupt, options, promised

import rolecall
from rolecall.config.resume import saved_settings
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.jobs import data, resuming, running
from rolecall.jobs.models import model_directory
from rolecall.train.exit_codes import ExitCode
from rolecall.train.manifest import seal


def check(result: dict, *, saves: int) -> None:
    assert result["differing"], "at least the last one ran to its end"
    assert all(files == [] for files in result["differing"]), result
    inside = [how for how in result["ended"] if how.startswith("save:-9")]
    assert len(inside) >= saves, result
    assert sum("unfinished" in how for how in inside) >= saves // 2, "kills left unfinished checkpoints"
    assert not any(how.split(":")[1] not in ("0", "-9", "143", "-15") for how in result["ended"]), result


def test_grpo_killed_in_saves_and_between_them_ends_with_the_same_bytes(tmp_path):
    result = interrupt("grpo", tmp_path, seed=3, saves=9, terms=8)
    check(result, saves=7)
    assert any(how.startswith("TERM:143") for how in result["ended"])


def test_ppo_with_its_own_critic_killed_in_saves_ends_with_the_same_bytes(tmp_path):
    check(interrupt("ppo", tmp_path, seed=5, saves=5, terms=2), saves=3)


def test_episodes_in_worker_processes_killed_in_saves_end_with_the_same_bytes(tmp_path):
    """With contexts that are cut, so that an episode has several samples."""
    check(interrupt("agents", tmp_path, seed=5, saves=3, terms=2), saves=2)


@pytest.mark.slow
def test_lessons_killed_in_saves_and_between_them_are_the_same_lessons(tmp_path):
    """Also those of steps after the checkpoint, which are cut and learned again."""
    check(interrupt("lessons", tmp_path, seed=2, saves=3, terms=2), saves=2)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "lessons.jsonl").read_text().splitlines()]
    assert any("lesson" in line for line in lines)
    assert any("retired" in line for line in lines)


def test_replay_killed_in_saves_and_between_them_ends_with_the_same_bytes(tmp_path):
    check(interrupt("replay", tmp_path, seed=1, saves=5, terms=4), saves=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["grpo", "ppo", "replay", "agents", "lessons", "summary"])
def test_many_interruptions(tmp_path, kind, seed):
    check(interrupt(kind, tmp_path, seed=seed, saves=40, terms=20), saves=30)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    """The reward in this process."""
    monkeypatch.setattr(data, "open_reward", lambda *args, **kwargs: Letters())


def run(kind, out, **more):
    return running.run(options(kind, out, **more))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A GRPO run of two steps, to copy."""
    place = tmp_path_factory.mktemp("finished") / "run"
    before, data.open_reward = data.open_reward, lambda *args, **kwargs: Letters()
    try:
        assert run("grpo", place, steps=2).outcome.exit_code == 0
    finally:
        data.open_reward = before
    return place


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_same_command_twice_writes_the_same_bytes_and_another_seed_does_not(finished, tmp_path):
    run("grpo", tmp_path / "again", steps=2)
    assert differing(finished, tmp_path / "again") == []
    run("grpo", tmp_path / "other", steps=2, seed=1)
    found = differing(finished, tmp_path / "other")
    assert {"model/model.safetensors", "metrics.jsonl"} <= set(found)
    assert any(name.endswith("trainer.safetensors") for name in found)


def test_the_runs_learn_something(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["grad_norm"] > 1e-3 and line["optimizer_steps"] == 4 for line in lines)
    moments = [name for name in promised(finished) if name.endswith("trainer.safetensors")]
    assert moments


def test_steps_can_be_added_to_a_finished_run(copied, tmp_path):
    more = run("grpo", copied, steps=2, extend=2, resume=True)
    assert [line["step"] for line in more.metrics] == [1, 2, 3, 4]
    run("grpo", tmp_path / "whole", steps=4)
    assert [n for n in differing(copied, tmp_path / "whole") if not n.endswith("manifest.json")] == []
    about = json.loads((copied / "run.json").read_text())
    assert about["resumed"] == [{"step": 2, "changed": [["steps", 2, 4]], "bit_exact": True}]
    assert json.loads((copied / "config.json").read_text())["steps"] == 4


def test_steps_can_be_added_on_the_command_line(copied):
    from rolecall.config.resume import rewritten

    assert rewritten(["--resume", "--steps", "+2"]) == ["--resume", "--extend", "2"]
    assert rewritten(["--steps=+2"]) == ["--extend", "2"]


def test_more_steps_under_a_falling_learning_rate_are_not_bit_exact(copied):
    run("grpo", copied, steps=3, resume=True, **{"optim.schedule": "linear"})
    (about,) = json.loads((copied / "run.json").read_text())["resumed"]
    assert not about["bit_exact"]


def test_changed_settings_are_named_used_and_recorded(copied, caplog):
    run("grpo", copied, steps=3, resume=True, **{"optim.lr": 5e-4, "optim.beta1": 0.5, "save.every": 2})
    assert "optim.lr changed from 0.001 to 0.0005" in caplog.text
    assert "save.every" not in caplog.text
    (about,) = json.loads((copied / "run.json").read_text())["resumed"]
    assert not about["bit_exact"]
    assert ["optim.lr", 0.001, 0.0005] in about["changed"]
    last = json.loads((copied / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["learning_rate"]) == (3, 5e-4)
    state = json.loads((copied / "checkpoints" / "step-000003" / "trainer.json").read_text())["state"]
    assert state["optimizer"]["param_groups"][0]["betas"] == {"$tuple": [0.5, 0.999]}


def test_the_checkpoint_of_another_model_is_refused_with_the_field_that_differs(copied):
    with pytest.raises(UserError, match=r"is of another model: value_head.weight is absent there and \(1, 128\) here"):
        run("ppo", copied, steps=3, resume=True, **{"algorithm.critic": "shared"})


def test_a_critic_that_the_run_no_longer_has_is_refused(tmp_path):
    run("ppo", tmp_path / "run", steps=1)
    with pytest.raises(UserError, match=r"critic\.\S+ is \(.*\) there and absent here"):
        run("grpo", tmp_path / "run", steps=2, resume=True)


def test_a_damaged_last_checkpoint_is_named_and_the_one_before_it_used(copied, finished, caplog):
    weights = copied / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    run("grpo", copied, steps=2, resume=True)
    assert "step-000002" in caplog.text
    assert (copied / "checkpoints" / "step-000002.corrupt").is_dir()
    assert json.loads((copied / "run.json").read_text())["resumed"][0]["step"] == 1
    assert differing(copied, finished) == []


def test_a_run_without_a_checkpoint_begins_again(copied, finished, caplog):
    shutil.rmtree(copied / "checkpoints")
    run("grpo", copied, steps=2, resume=True)
    assert "has no checkpoint to resume from: it begins at its first step" in caplog.text
    assert differing(copied, finished) == []


@pytest.mark.parametrize(
    "left", [(), (".lock",), (".lock", "rollouts/", "checkpoints/", "metrics.jsonl", "config.json.tmp-1")]
)
def test_a_run_killed_before_it_had_a_config_begins_when_it_is_resumed(tmp_path, finished, left):
    place = tmp_path / "run"
    place.mkdir()
    for name in left:
        (place / name).mkdir() if name.endswith("/") else (place / name).touch()
    assert saved_settings(str(place)) == {}
    run("grpo", place, steps=2, resume=True)
    assert differing(place, finished) == []


@pytest.mark.parametrize("name", ["run.json", "thesis.tex", "model/"])
def test_a_directory_without_config_that_is_no_beginning_is_not_resumed(tmp_path, name):
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"it has no config\.json"):
        saved_settings(str(tmp_path))


def test_a_preset_holds_for_a_run_that_begins_by_being_resumed(tmp_path, monkeypatch):
    def stop(options, **_):
        raise InterruptedError(options.algorithm)

    monkeypatch.setattr(running, "run", stop)
    (tmp_path / ".lock").touch()
    found = []
    for how in ({"out": str(tmp_path), "resume": True}, {}):
        with pytest.raises(InterruptedError) as stopped:
            rolecall.rl(preset="ppo", rows="addition", **how)
        found.append(stopped.value.args[0])
    assert found[0] == found[1]
    assert found[0].critic != "none"


def test_strict_makes_a_damaged_checkpoint_an_error_and_touches_nothing(copied):
    weights = copied / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"step-000002 is damaged: the bytes of model.safetensors changed") as error:
        run("grpo", copied, steps=2, resume=True, strict=True)
    assert error.value.exit_code == ExitCode.ERROR
    assert weights.is_file()
    with pytest.raises(UserError, match="strict is about the checkpoints of a run to resume"):
        options("grpo", copied, strict=True)


def test_a_resume_with_another_number_of_processes_is_called_not_bit_exact(copied, caplog):
    """As if two had begun it: the number is in the checkpoint, so an attempt that saved nothing does not hide it."""
    path = copied / "checkpoints" / "step-000002"
    state = path / "trainer.json"
    held = json.loads(state.read_text())
    assert held["state"]["extra"]["processes"] == 1
    held["state"]["extra"]["processes"] = 2
    state.write_text(json.dumps(held))
    (path / "manifest.json").unlink()
    seal(path, 2, json.loads((copied / "config.json").read_text()))
    run("grpo", copied, steps=3, resume=True)
    (about,) = json.loads((copied / "run.json").read_text())["resumed"]
    assert about == {"step": 2, "changed": [["steps", 2, 3], ["processes", 2, 1]], "bit_exact": False}
    assert caplog.text.count("processes changed from 2 to 1: not bit-exact") == 1


def test_a_resumed_run_with_an_adapter_checks_the_engine_at_the_same_steps(tmp_path):
    how = {
        "policy.lora_rank": 2,
        "algorithm.kl_coef": 0.0,
        "algorithm.reference_every": None,
        "algorithm.kl_target": None,
    }
    run("grpo", tmp_path / "whole", steps=2, **how)
    run("grpo", tmp_path / "halves", steps=1, **how)
    run("grpo", tmp_path / "halves", steps=1, extend=1, resume=True, **how)
    whole, halves = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "halves"))
    assert whole == halves
    assert [b"engine_in_sync" in line for line in whole.splitlines()] == [True, False]


def test_the_final_model_has_a_manifest_and_is_refused_when_its_bytes_changed(copied):
    assert model_directory(str(copied)) == str(copied / "model")
    manifest = json.loads((copied / "model" / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], "config" in manifest) == ("rolecall model", 2, False)
    (copied / "model" / "README.md").write_text("mine")
    assert model_directory(str(copied / "model")) == str(copied / "model"), "files may be added"
    weights = copied / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for name in (copied, copied / "model"):
        with pytest.raises(
            UserError, match=r"model is damaged: the bytes of model.safetensors changed.*delete its manifest"
        ):
            model_directory(str(name))
    weights.unlink()
    with pytest.raises(UserError, match=r"model is damaged: model\.safetensors is missing"):
        model_directory(str(copied))
    (copied / "model" / "manifest.json").write_text("[1]")
    with pytest.raises(UserError, match=r"its manifest.json cannot be read"):
        model_directory(str(copied))


def test_a_rollout_dropped_at_sigterm_is_drawn_again_to_the_same_bytes(tmp_path, finished, monkeypatch):
    class Hanging(Letters):
        calls = 0

        def score(self, samples, *, state=None):
            self.calls += 1
            if self.calls == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return super().score(samples, state=state)

    with monkeypatch.context() as patch:
        patch.setattr(data, "open_reward", lambda *args, **kwargs: Hanging())
        stopped = run("grpo", tmp_path / "run", steps=2, grace=0.3, **{"save.every": 0}).outcome
    assert (stopped.exit_code, stopped.step, stopped.dropped) == (ExitCode.TERMINATED, 1, True)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    assert run("grpo", tmp_path / "run", steps=2, resume=True).outcome.exit_code == 0
    assert differing(tmp_path / "run", finished) == []


def test_a_finished_run_stays_what_it_is_when_resumed(copied, finished):
    assert run("grpo", copied, steps=2, resume=True).outcome.step == 2
    assert differing(copied, finished) == []


def test_a_run_that_is_there_is_not_written_over(copied):
    with pytest.raises(UserError, match="not empty"):
        run("grpo", copied, steps=2)


def test_a_start_that_failed_does_not_block_the_next(tmp_path):
    with pytest.raises(UserError):
        rolecall.rl(rows="no-such-task", out=str(tmp_path / "run"), quiet=True)
    assert run("grpo", tmp_path / "run", steps=1).outcome.exit_code == 0


def test_rows_from_python_are_asked_for_again(copied):
    with pytest.raises(UserError, match="came from Python"):
        rolecall.rl(out=str(copied), resume=True, quiet=True)


def test_other_rows_are_named(copied, caplog):
    run("grpo", copied, steps=3, resume=True, rows=ROWS[:4])
    assert "rows changed from" in caplog.text
    assert "5 rows" in caplog.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_how_to_go_on_and_has_its_exit_code(tmp_path, number, code, capfd, monkeypatch):
    from rolecall.cli.train import finish

    class Stopping(Letters):
        calls = 0

        def score(self, samples, *, state=None):
            self.calls += 1
            if self.calls == 2:
                os.kill(os.getpid(), number)
            return super().score(samples, state=state)

    stopping = Stopping()
    monkeypatch.setattr(data, "open_reward", lambda *args, **kwargs: stopping)
    stopped = run("grpo", tmp_path / "run", steps=STEPS)
    assert stopped.outcome.exit_code == ExitCode(code)
    assert stopped.outcome.step == 2
    assert not (tmp_path / "run" / "model").exists()
    assert finish(stopped, RLOptions(quiet=True)) == code
    assert f"resume with: rolecall rl --out {tmp_path / 'run'} --resume" in capfd.readouterr().err
    monkeypatch.setattr(data, "open_reward", lambda *args, **kwargs: Letters())
    run("grpo", tmp_path / "run", steps=3, resume=True)
    run("grpo", tmp_path / "whole", steps=3)
    assert [n for n in differing(tmp_path / "run", tmp_path / "whole") if not n.endswith("manifest.json")] == []


def test_weights_in_a_checkpoint_are_those_of_the_model(finished):
    from safetensors.torch import load_file

    last = load_file(finished / "checkpoints" / "step-000002" / "model.safetensors")
    final = load_file(finished / "model" / "model.safetensors")
    assert last.keys() == final.keys()
    assert all(torch.equal(last[name], final[name]) for name in last)


@pytest.mark.parametrize(
    ("old", "new", "matters"), [("(absent)", False, False), ("(absent)", True, True), (True, False, True)]
)
def test_an_option_that_came_later_changes_nothing_until_it_is_used(old, new, matters):
    assert resuming._matters("reward_network", old, new, {}) is matters
