"""When the loop evaluates, saves and ends, with a learner that only counts."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from rolecall.files import DiskError
from rolecall.train.callbacks import Callbacks
from rolecall.train.checkpoint import latest
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import Loop, LoopOptions
from rolecall.train.peers import PeerLost, Peers
from rolecall.train.progress import Quiet
from rolecall.train.rundir import RunDir
from rolecall.train.state import NotFinite
from rolecall.train.timing import Timer


class Counting:
    """A learner that counts its steps; `bad` are the steps (from 1) whose gradient is not finite."""

    def __init__(self, bad=(), on_step=lambda step: None):
        self.bad, self.on_step, self.done = bad, on_step, 0

    def collect(self, step):
        return step

    def update(self, step):
        self.done = step + 1
        self.on_step(self.done)

    def metrics(self):
        return {"loss": 1.0 / self.done, "skipped": float(self.done in self.bad)}

    def explain(self):
        return "counted"

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Telling(Quiet):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def looped(tmp_path, learner=None, *, write=None, scores=None, start=0, state=None, callbacks=(), **options):
    """(outcome, what was said, lines of metrics.jsonl, names of checkpoints)."""
    parts = {name: options.pop(name) for name in ("agree", "grace", "updater", "peers") if name in options}
    learner, telling = learner or Counting(), Telling()
    settings = {"steps": 6, "save_every": 2, "keep": 2, "eval_every": 0, "main": "reward", **options}

    def plain(directory: Path, extra):
        (directory / "state.json").write_text(json.dumps([extra, learner.state_dict()]))

    with RunDir(tmp_path, "run", resume=(tmp_path / "run").exists()) as run:
        loop = Loop(
            learner,
            LoopOptions(**settings),
            run=run,
            config={"steps": settings["steps"]},
            write=write or plain,
            evaluate=None if scores is None else lambda step: {"reward": scores[step]},
            progress=telling,
            timer=Timer(),
            callbacks=Callbacks(callbacks, path=run.path, steps=settings["steps"]),
            **parts,
        )
        if state is not None:
            loop.load_state_dict(state)
        outcome = loop.go(start=start, title="test")
        lines = [json.loads(line) for line in run.metrics.path.read_text().splitlines()]
        saved = sorted(path.name for path in run.checkpoints.iterdir())
    return outcome, telling.said, lines, saved


def test_a_line_per_step_and_the_last_checkpoints_stay(tmp_path):
    outcome, _, lines, saved = looped(tmp_path)
    assert (outcome.exit_code, outcome.step) == (ExitCode.DONE, 6)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3] == {"step": 4, "loss": 0.25, "skipped": 0.0}
    assert saved == ["step-000004", "step-000006"]
    times = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in times] == [1, 2, 3, 4, 5, 6]
    assert all(line["step_time"] >= line["collect"] for line in times)


def test_save_every_0_saves_at_the_end_alone(tmp_path):
    assert looped(tmp_path, save_every=0, steps=5)[3] == ["step-000005"]


def test_evaluations_come_before_the_first_step_on_time_and_at_the_end(tmp_path):
    scores = {0: 0.1, 2: 0.2, 4: 0.1, 5: 0.1}
    outcome, said, lines, _ = looped(tmp_path, scores=scores, eval_every=2, steps=5)
    found = {line["step"]: line["eval_reward"] for line in lines if "eval_reward" in line}
    assert found == scores
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert (outcome.best, outcome.best_step) == (0.2, 2)
    assert len(said) == 4 + 1


def test_the_best_checkpoint_is_saved_at_once_and_never_removed(tmp_path):
    scores = {0: 0.9, 3: 0.8, 6: 0.1, 9: 0.3, 12: 0.7}
    outcome, _, _, saved = looped(tmp_path, scores=scores, eval_every=3, steps=12, save_every=2)
    assert saved == ["step-000003", "step-000010", "step-000012"]
    assert outcome.best_step == 3, "step 0 has no checkpoint and so is not the best"


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path):
    scores = {0: float("nan"), 2: float("nan"), 4: 0.5, 6: 0.4}
    assert looped(tmp_path, scores=scores, eval_every=2)[0].best_step == 4


@pytest.mark.parametrize(("lower", "best"), [(False, (0.5, 4)), (True, (0.1, 1))])
def test_of_equal_scores_the_first_is_the_best(tmp_path, lower, best):
    scores = dict(enumerate([0.9, 0.1, 0.2, 0.1, 0.5, 0.5, 0.4]))
    outcome, *_ = looped(tmp_path, scores=scores, eval_every=1, lower=lower)
    assert (outcome.best, outcome.best_step) == best


def test_reaching_the_goal_ends_the_run_with_a_checkpoint(tmp_path):
    scores = {0: 0.1, 2: 0.2, 4: 0.9, 6: 0.1}
    outcome, _, lines, saved = looped(tmp_path, scores=scores, eval_every=2, stop_at=0.85, save_every=0)
    assert (outcome.exit_code, outcome.step) == (ExitCode.DONE, 4)
    assert lines[-1]["step"] == 4
    assert saved[-1] == "step-000004"


def test_three_bad_steps_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(tmp_path):
    outcome, _, lines, saved = looped(tmp_path, Counting(bad=(5, 6, 7)), steps=10, save_every=4)
    assert (outcome.exit_code, outcome.step) == (ExitCode.DIVERGED, 7)
    assert "step 4" in outcome.reason
    assert saved == ["step-000004"]
    assert lines[-1]["skipped"] == 1.0


def test_bad_steps_with_good_ones_between_them_do_not_end_the_run(tmp_path):
    assert looped(tmp_path, Counting(bad=(1, 2, 4, 5)), steps=6)[0].exit_code == ExitCode.DONE


def test_the_count_of_bad_steps_survives_a_resume(tmp_path):
    loop = Loop(
        Counting(),
        LoopOptions(steps=1, save_every=1, keep=2, eval_every=0, main="reward"),
        run=None, config={}, write=lambda d, e: None, evaluate=None, progress=Quiet(), timer=Timer(),
    )  # fmt: skip
    loop.load_state_dict({"best": 0.5, "best_step": 3, "bad": 2, "idle": 7})
    assert loop.state_dict() == {"best": 0.5, "best_step": 3, "bad": 2, "idle": 7}


def test_weights_that_are_not_finite_are_not_saved_and_end_the_run_as_diverged(tmp_path):
    def write(directory, extra):
        if extra["step"] == 4:
            raise NotFinite("model.weight is not finite")
        (directory / "state.json").write_text("{}")

    outcome, _, _, saved = looped(tmp_path, write=write)
    assert (outcome.exit_code, outcome.step) == (ExitCode.DIVERGED, 4)
    assert "model.weight" in outcome.reason
    assert "step 2" in outcome.reason
    assert saved == ["step-000002"]


def full(steps):
    def write(directory, extra):
        if extra["step"] in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        (directory / "state.json").write_text("{}")

    return write


def test_a_full_disk_is_said_and_three_in_a_row_end_the_run_with_74(tmp_path):
    outcome, said, lines, saved = looped(tmp_path, write=full({4, 6, 8, 10}), steps=12)
    assert (outcome.exit_code, outcome.step) == (ExitCode.DISK, 8)
    assert sum("was not written" in text for text in said) == 3
    assert saved == ["step-000002"]
    assert lines[-1]["step"] == 8


def test_failures_with_a_save_between_them_do_not_end_the_run(tmp_path):
    outcome, said, _, saved = looped(tmp_path, write=full({2, 4, 8}), steps=10)
    assert outcome.exit_code == ExitCode.DONE
    assert sum("was not written" in text for text in said) == 3
    assert saved == ["step-000006", "step-000010"]


def test_a_run_whose_last_checkpoint_was_not_written_is_not_done(tmp_path):
    outcome, _, _, saved = looped(tmp_path, write=full({6}))
    assert outcome.exit_code == ExitCode.DISK
    assert saved == ["step-000002", "step-000004"]


@pytest.mark.parametrize(("number", "code"), [(2, ExitCode.INTERRUPTED), (15, ExitCode.TERMINATED)])
def test_a_signal_ends_the_run_after_the_step_with_everything_saved(tmp_path, number, code, capfd):
    learner = Counting(on_step=lambda step: os.kill(os.getpid(), number) if step == 3 else None)
    outcome, _, lines, saved = looped(tmp_path, learner, save_every=0)
    assert (outcome.exit_code, outcome.step) == (code, 3)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert saved == ["step-000003"]
    assert "saving" in capfd.readouterr().err
    assert latest(tmp_path / "run" / "checkpoints").step == 3


def test_a_signal_on_a_full_disk_does_not_claim_that_all_is_saved(tmp_path):
    learner = Counting(on_step=lambda step: os.kill(os.getpid(), 15) if step == 3 else None)
    outcome, *_ = looped(tmp_path, learner, write=full({3}))
    assert outcome.exit_code == ExitCode.DISK
    assert "everything is saved" not in outcome.reason


def test_a_disk_error_outside_saving_is_not_swallowed(tmp_path):
    def broken(step):
        raise DiskError("gone", path=tmp_path)

    with pytest.raises(DiskError):
        looped(tmp_path, Counting(on_step=broken))


class Hanging(Counting):
    """A learner that is sent a signal in one step, whose rollout then hangs; the position in the data moves in `collect`."""

    def __init__(self, at, which=signal.SIGTERM, where="collect"):
        super().__init__()
        self.at, self.which, self.where, self.taken = at, which, where, 0

    def collect(self, step):
        self.taken += 5
        if step + 1 == self.at:
            os.kill(os.getpid(), self.which)
            if self.where == "collect":
                time.sleep(60)
        return step

    def state_dict(self):
        return {"done": self.done, "taken": self.taken}

    def load_state_dict(self, state):
        self.done, self.taken = state["done"], state["taken"]


def state_of(tmp_path, name):
    (extra, learner) = json.loads((tmp_path / "run" / "checkpoints" / name / "state.json").read_text())
    return extra, learner


@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rollout_that_hangs_at_a_signal_is_dropped_and_the_step_before_it_saved(tmp_path, which, code):
    begun = time.monotonic()
    outcome, said, lines, saved = looped(tmp_path, Hanging(4, which), save_every=0, grace=0.3)
    assert time.monotonic() - begun < 20
    assert (outcome.exit_code, outcome.step, outcome.dropped) == (code, 3, True)
    assert said[-1] == "stopped after step 3, everything is saved; the rollout of step 4 was dropped"
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert saved == ["step-000003"]
    assert state_of(tmp_path, "step-000003")[1] == {"done": 3, "taken": 15}, "as it was before the rollout"


def test_a_first_rollout_that_hangs_leaves_nothing_to_save(tmp_path):
    outcome, said, lines, saved = looped(tmp_path, Hanging(1), grace=0.3)
    assert (outcome.exit_code, outcome.step, lines, saved) == (143, 0, [], [])
    assert said == ["stopped after step 0, there is no checkpoint yet; the rollout of step 1 was dropped"]


def test_an_update_is_never_dropped(tmp_path):
    learner = Hanging(2, where="update")
    learner.on_step = lambda step: time.sleep(0.6 if step == 2 else 0)
    outcome, _, _, saved = looped(tmp_path, learner, save_every=0, grace=0.3)
    assert (outcome.exit_code, outcome.step, outcome.dropped) == (143, 2, False)
    assert saved == ["step-000002"]


def test_a_step_that_has_moved_the_weights_cannot_be_taken_back(tmp_path):
    """A peer that is lost in an update breaks it off; the checkpoint before it stands."""

    class Updater:
        moves, not_finite = 0, None

    class Lost(Peers):
        def why(self, error):
            return "rank 1 is gone"

    def broken(updater, *, moves):
        learner = Hanging(99)

        def on_step(step):
            updater.moves += 1 if step < 4 else moves
            if step == 4:
                raise RuntimeError("the connection closed")

        learner.on_step = on_step
        return learner

    for moves, said in ((0, "stopped after step 3, everything is saved"), (1, "the last good checkpoint is of step 2")):
        updater = Updater()
        with pytest.raises(PeerLost, match=said):
            looped(tmp_path / said[:4], broken(updater, moves=moves), updater=updater, peers=Lost())
    assert sorted(path.name for path in (tmp_path / "stop" / "run" / "checkpoints").iterdir()) == [
        *("step-000002", "step-000003")
    ]
    assert state_of(tmp_path / "stop", "step-000003")[1] == {"done": 3, "taken": 15}
    assert [path.name for path in (tmp_path / "the " / "run" / "checkpoints").iterdir()] == ["step-000002"]


def test_an_evaluation_that_was_dropped_is_made_up_for_when_the_run_goes_on(tmp_path):
    class Scores(dict):
        def __getitem__(self, step):
            if step == 4 and step not in self.seen:
                self.seen.add(step)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return super().__getitem__(step)

    class Updater:
        moves, not_finite = 0, None

    scores, learner, updater = Scores({0: 0.1, 2: 0.2, 4: 0.5, 6: 0.3}), Counting(), Updater()
    scores.seen = set()
    learner.on_step = lambda step: setattr(updater, "moves", step)
    outcome, said, _, saved = looped(tmp_path, learner, scores=scores, eval_every=2, grace=0.3, updater=updater)
    assert (outcome.exit_code, outcome.step) == (143, 4)
    assert said[-1] == "stopped after step 4, everything is saved; the evaluation of step 4 was dropped"
    extra, learner = state_of(tmp_path, "step-000004")
    assert extra["loop"]["unevaluated"]
    again = Counting()
    again.load_state_dict(learner)
    outcome, _, lines, saved = looped(tmp_path, again, scores=scores, eval_every=2, start=4, state=extra["loop"])
    whole = looped(tmp_path / "whole", scores=dict(scores), eval_every=2)
    assert (lines, saved) == whole[2:]
    assert (outcome.best, outcome.best_step) == (0.5, 4)
    assert state_of(tmp_path, "step-000004") == state_of(tmp_path / "whole", "step-000004")


def test_the_first_thing_that_was_not_finite_is_named_when_the_run_diverges(tmp_path):
    class Blamed:
        moves, not_finite = 0, None

    blamed, learner = Blamed(), Counting(bad=(1, 3, 4, 5))
    learner.on_step = lambda step: setattr(blamed, "not_finite", f"the gradient of layer {step}")
    outcome, *_ = looped(tmp_path, learner, updater=blamed)
    assert outcome.exit_code == ExitCode.DIVERGED
    assert "not finite in 3 steps in a row, first the gradient of layer 3 at step 3; " in outcome.reason
