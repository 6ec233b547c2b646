"""Runs that end because nothing can be learned, and runs that callbacks watch, stop or break."""

from functools import partial

import pytest
import test_loop
from test_loop import Counting

from rolecall.errors import UserError
from rolecall.train.callbacks import Callback, check_callbacks
from rolecall.train.exit_codes import ExitCode


class Told(Counting):
    """A learner whose numbers are given; the last ones hold for all later steps."""

    def __init__(self, *numbers, said="counted", unscored=None):
        super().__init__()
        self.numbers, self.said, self.unscored = numbers, said, unscored

    def metrics(self):
        return dict(self.numbers[min(self.done, len(self.numbers)) - 1])

    def explain(self):
        return self.said


looped = partial(test_loop.looped, steps=3, save_every=0)

GOOD = {"reward": 0.5, "rewards/failed": 0.0, "optimizer_steps": 1.0, "grad_norm": 0.1}
FAILED = {"rewards/failed": 1.0, "optimizer_steps": 0.0, "grad_norm": 0.0}
FLAT = GOOD | {"grad_norm": 0.0}


def test_a_step_in_which_nothing_could_be_scored_ends_the_run_with_its_line_and_a_checkpoint(tmp_path):
    learner = Told(GOOD, FAILED, unscored="reward `r` failed on rows.jsonl, line 3: KeyError: 'x'")
    outcome, said, lines, saved = looped(tmp_path, learner, steps=9)
    assert (outcome.exit_code, outcome.step) == (ExitCode.ERROR, 2)
    assert outcome.reason == (
        "no answer of step 2 could be scored: reward `r` failed on rows.jsonl, line 3: KeyError: 'x'"
    )
    assert said[-1] == outcome.reason
    assert lines[-1] == {"step": 2, **FAILED}
    assert saved == ["step-000002"]


def test_a_step_in_which_some_rewards_failed_goes_on(tmp_path):
    assert looped(tmp_path, Told(GOOD | {"rewards/failed": 0.9}))[0].exit_code == ExitCode.DONE


@pytest.mark.parametrize("idle", [FLAT, GOOD | {"optimizer_steps": 0.0}, GOOD | {"grad_norm": float("inf")}])
def test_a_run_in_which_nothing_ever_trained_ends_with_an_error(tmp_path, idle):
    outcome, _, lines, _ = looped(tmp_path, Told(idle, said="reward 0\nevery group is flat"), steps=3)
    assert (outcome.exit_code, outcome.step, len(lines)) == (ExitCode.ERROR, 3, 3)
    assert outcome.reason == "nothing has trained in 3 steps: every group is flat"


def test_a_run_of_one_step_that_trains_nothing_is_an_error_too(tmp_path):
    outcome, said, _, saved = looped(tmp_path, Told(FLAT), steps=1)
    assert (outcome.exit_code, saved) == (ExitCode.ERROR, ["step-000001"])
    assert said[-1] == outcome.reason == "nothing has trained in 1 step: every gradient was 0 or not finite"


def test_a_callback_that_stops_a_run_in_which_nothing_trained_makes_no_success_of_it(tmp_path):
    def two(control, metrics):
        return "stop" if control.step == 2 else None

    outcome = looped(tmp_path / "a", Told(FLAT), callbacks=[two], steps=9)[0]
    assert outcome.exit_code == ExitCode.ERROR
    assert outcome.reason.startswith("stopped at step 2 by the callback `two`; nothing has trained in 2 steps: ")
    assert looped(tmp_path / "b", Told(GOOD, FLAT), callbacks=[two], steps=9)[0].exit_code == ExitCode.DONE


def test_one_step_that_trains_is_enough(tmp_path):
    assert looped(tmp_path, Told(FLAT, GOOD, FLAT))[0].exit_code == ExitCode.DONE


def test_a_long_run_in_which_nothing_trains_ends_early(tmp_path):
    outcome = looped(tmp_path, Told(FLAT), steps=1000)[0]
    assert (outcome.exit_code, outcome.step) == (ExitCode.ERROR, 50)
    assert outcome.reason == "nothing has trained in 50 steps: every gradient was 0 or not finite"


def test_steps_in_vain_count_on_after_a_resume_and_what_trained_before_it_counts(tmp_path):
    state = {"best": None, "best_step": None, "bad": 0}
    assert looped(tmp_path / "a", Told(FLAT), start=48, steps=100, state=state | {"idle": 48})[0].step == 50
    assert looped(tmp_path / "b", Told(FLAT), start=48, steps=60, state=state | {"idle": None})[0].exit_code == 0
    outcome = looped(tmp_path / "c", start=3, state=state | {"idle": 3})[0]
    assert (outcome.exit_code, outcome.reason) == (1, "nothing has trained in the 3 steps of this run")
    assert looped(tmp_path / "d", start=3, state=state | {"idle": None})[0].exit_code == 0


def test_a_model_that_needs_no_training_reaches_its_goal(tmp_path):
    outcome = looped(tmp_path, Told(FLAT), scores={0: 1.0, 3: 1.0}, eval_every=3, stop_at=0.9)[0]
    assert outcome.exit_code == ExitCode.DONE


def test_remarks_are_said_once_and_again_only_when_they_change(tmp_path):
    learner = Told(GOOD, said="reward 1\nthe loss is policy")
    learner.on_step = lambda step: setattr(
        learner, "said", f"reward {step}\nthe loss is {'policy' if step < 3 else 'KL'}"
    )
    said = looped(tmp_path, learner, steps=4)[1]
    assert said == ["the loss is policy", "the loss is KL", "done after 4 steps"]


# -- callbacks ---------------------------------------------------------------------------------------------------


class Notes(Callback):
    def __init__(self):
        self.heard = []

    def on_begin(self, control):
        self.heard.append(("begin", control.step, control.steps, control.path.name))

    def on_step(self, control, metrics):
        self.heard.append(("step", control.step, metrics["loss"]))
        metrics["loss"] = -1.0  # a copy

    def on_evaluate(self, control, metrics):
        self.heard.append(("evaluate", control.step, metrics))

    def on_save(self, control, path):
        self.heard.append(("save", control.step, path.name, (path / "state.json").is_file()))


def test_callbacks_hear_of_every_moment_in_order(tmp_path):
    notes = Notes()
    _, _, lines, _ = looped(tmp_path, callbacks=[notes], steps=2, scores={0: 0.1, 2: 0.3}, eval_every=2)
    assert notes.heard == [
        ("begin", 0, 2, "run"),
        ("evaluate", 0, {"eval_reward": 0.1}),
        ("step", 1, 1.0),
        ("step", 2, 0.5),
        ("evaluate", 2, {"eval_reward": 0.3}),
        ("save", 2, "step-000002", True),
    ]
    assert [line["loss"] for line in lines if "loss" in line] == [1.0, 0.5]


@pytest.mark.parametrize("how", ["return", "call"])
def test_a_function_is_a_callback_of_steps_and_can_stop_the_run(tmp_path, how):
    def patience(control, metrics):
        if metrics["loss"] <= 0.5:
            return "stop" if how == "return" else control.stop("low enough")
        return None

    outcome, _, lines, saved = looped(tmp_path, callbacks=[patience], steps=9)
    why = "" if how == "return" else ": low enough"
    assert outcome.reason == f"stopped at step 2 by the callback `patience`{why}"
    assert (outcome.exit_code, outcome.step, len(lines), saved) == (ExitCode.DONE, 2, 2, ["step-000002"])


@pytest.mark.parametrize(("moment", "step"), [("on_begin", 0), ("on_evaluate", 2), ("on_save", 3)])
def test_every_moment_can_stop_the_run(tmp_path, moment, step):
    stopping = type("Stopping", (), {moment: lambda self, control, *told: "stop" if control.step else None})()
    if moment == "on_begin":
        stopping = type("Stopping", (), {moment: lambda self, control: "stop"})()
    scores = {0: 0.9, 2: 0.1, 4: 0.1} if moment == "on_evaluate" else None
    outcome = looped(tmp_path, callbacks=[stopping], steps=4, scores=scores, eval_every=2, save_every=3)[0]
    assert (outcome.exit_code, outcome.step) == (ExitCode.DONE, step)


def test_what_callbacks_log_stands_in_the_line_of_the_moment(tmp_path):
    class Logs(Callback):
        def on_step(self, control, metrics):
            control.log({"twice": 2 * metrics["loss"]})

        def on_save(self, control, path):
            control.log({"saved": control.step})

    assert looped(tmp_path, callbacks=[Logs()], steps=2)[2] == [
        {"step": 1, "loss": 1.0, "skipped": 0.0, "callback/twice": 2.0},
        {"step": 2, "loss": 0.5, "skipped": 0.0, "callback/twice": 1.0},
        {"step": 2, "callback/saved": 2.0},
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda control, metrics: metrics["nope"], "KeyError: 'nope'"),
        (lambda control, metrics: "halt", "ValueError: it returned 'halt'; return \"stop\" to end the run, or nothing"),
        (lambda control, metrics: control.log({"x": float("nan")}), "only finite numbers can be logged"),
    ],
)
def test_a_callback_that_fails_ends_the_run_after_saving(tmp_path, wrong, said):
    wrong.__name__ = "wrong"
    outcome, _, lines, saved = looped(tmp_path, callbacks=[wrong])
    assert (outcome.exit_code, outcome.step, len(lines), saved) == (ExitCode.ERROR, 1, 1, ["step-000001"])
    assert outcome.reason.startswith("the callback `wrong` failed in on_step at step 1: ")
    assert said in outcome.reason
    assert outcome.reason.endswith("stopped at step 1, everything is saved")


def test_ranks_without_callbacks_end_with_the_first_one(tmp_path):
    """What another rank asks for comes through `agree`."""
    outcome = looped(tmp_path, agree=lambda flag: max(flag, 1.0))[0]
    assert (outcome.exit_code, outcome.reason) == (ExitCode.DONE, "stopped at step 0 by a callback")
    outcome = looped(tmp_path / "b", agree=lambda flag: max(flag, 2.0))[0]
    assert (outcome.exit_code, outcome.reason) == (ExitCode.ERROR, "a callback failed; stopped at step 0")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (print, "must be a list"),
        ([Notes], "give Notes()"),
        ([type("Hugging", (), {"on_step_end": print})()], "has on_step_end, which is not a moment"),
        ([3], "3 cannot be a callback"),
    ],
)
def test_what_would_never_be_called_is_refused(given, said):
    with pytest.raises(UserError) as raised:
        check_callbacks(given)
    assert said in str(raised.value)
