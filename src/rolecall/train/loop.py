"""The loop: collect, update, log, evaluate, save. It knows one protocol and nothing of what is learned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from math import inf, isnan
from pathlib import Path
from typing import Any

from rolecall.train.callbacks import Callbacks
from rolecall.train.exit_codes import ExitCode
from rolecall.train.learner import Learner
from rolecall.train.parts import Parts
from rolecall.train.peers import PeerLost, Peers
from rolecall.train.progress import Progress
from rolecall.train.rundir import RunDir
from rolecall.train.saving import Saver
from rolecall.train.signals import Dropped, StopSignals
from rolecall.train.state import NotFinite
from rolecall.train.step import Updater
from rolecall.train.timing import Timer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOptions:
    """When to do what."""

    steps: int
    """The last step."""
    save_every: int
    """Steps between checkpoints; 0: only at the end."""
    keep: int
    """Checkpoints that stay beside the best."""
    eval_every: int
    """Steps between evaluations; 0: never."""
    main: str
    """The evaluation's number that says which checkpoint is best; larger is better."""
    lower: bool = False
    """Smaller is better."""
    stop_at: float | None = None
    """End when it reaches this."""
    bad_steps: int = 3
    """So many steps in a row without a finite gradient end the run as diverged."""
    disk_failures: int = 3
    """So many saves in a row that find no room end the run."""
    idle_steps: int = 50
    """So many steps from the first on in which nothing trains end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps done."""
    exit_code: ExitCode
    """0 done, 1 nothing could be scored or nothing trained, or a callback failed, 3 diverged, 74 disk, 130 and 143
    stopped by a signal with everything saved."""
    reason: str
    """In words."""
    best: float | None
    """The best evaluation, if there was one."""
    best_step: int | None
    """The step it was taken at."""
    dropped: bool = False
    """True if a step or an evaluation was broken off: other ranks may be anywhere, and are not waited for."""


class StopRequest(IntEnum):
    """Why a run should end after this step, as one number that ranks can agree on."""

    NOTHING = 0
    CALLBACK_STOPPED = 1
    CALLBACK_FAILED = 2
    SIGNAL = 3


class Loop:
    """One run. `run` is None on all ranks but the first, which alone writes."""

    def __init__(
        self,
        learner: Learner,
        options: LoopOptions,
        *,
        run: RunDir | None,
        config: object,
        write: Callable[[Path, dict[str, Any]], None],
        evaluate: Callable[[int], dict[str, float]] | None,
        progress: Progress,
        timer: Timer,
        agree: Callable[[float], float] = lambda flag: flag,
        log: Callable[[Mapping[str, float], int], None] = lambda metrics, step: None,
        callbacks: Callbacks | None = None,
        updater: Updater | None = None,
        peers: Peers | None = None,
        parts: Parts | None = None,
        grace: float = 30.0,
    ) -> None:
        """`write` puts all state into a checkpoint directory; `agree` is the maximum of a number over ranks. `updater` is what
        moves the weights, if anything does; `parts` those of a sharded run, which all ranks save; `grace` is for `StopSignals`."""
        self.learner, self.options, self.run = learner, options, run
        self.evaluate, self.progress, self.timer = evaluate, progress, timer
        self.agree, self.log = agree, log
        self.callbacks = callbacks or Callbacks((), path=Path(), steps=options.steps)
        self.updater, self.peers, self.parts, self.grace = updater, peers or Peers(), parts, grace
        self.saver = Saver(
            run, write, config=config, keep=options.keep, parts=parts, progress=progress, timer=timer,
            told=partial(self._tell, "on_save") if self.callbacks.listen("on_save") else None,
        )  # fmt: skip
        self.best: float | None = None
        self.best_step: int | None = None
        self._bad = 0
        self._idle: int | None = 0  # steps so far; None once something has trained
        self._remarks: set[str] = set()
        self._done = 0  # steps that are complete
        self._undo: tuple[Callable[[], None], int] | None = None
        """Takes back what the step in flight has changed so far, and the moves of the weights when it began."""
        self._unevaluated = False  # the evaluation of the last complete step was dropped
        self._blame: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself remembers."""
        state = {"best": self.best, "best_step": self.best_step, "bad": self._bad, "idle": self._idle}
        return state | ({"unevaluated": True} if self._unevaluated else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._unevaluated = state.get("unevaluated", False)
        self.best, self.best_step, self._bad = state["best"], state["best_step"], state["bad"]
        self._idle = state.get("idle")

    def go(self, *, start: int, title: str) -> Outcome:
        """Steps start + 1 to the last, unless something ends the run before. Steps count from 0 inside learners and from 1
        in files."""
        self.saver.saved, self._done = start or None, start
        with StopSignals(grace=self.grace) as stop:
            self.peers.on_loss = stop.drop
            if start >= self.options.steps and not self._unevaluated:
                return self._end_before(start)
            self.progress.begin(title, start=start, steps=self.options.steps)
            try:
                outcome, step = self._begin(start, stop), start
                for step in range(start + 1 - self._unevaluated, self.options.steps + 1):
                    if outcome is not None:
                        return outcome
                    metrics: dict[str, float] = {}
                    again, self._unevaluated = step == self._done, False
                    if not again:  # else only the evaluation of the first step is missing
                        self._undo = self._way_back(), self._moved()
                        with self.timer.phase("step_time"):
                            with self.timer.phase("collect"), stop.droppable():
                                experience = self.learner.collect(step - 1)
                            with self.timer.phase("update"):
                                self.learner.update(experience)
                        del experience
                        metrics = self._log_step(step)
                    outcome = self._after(step, metrics, stop, again=again)
                return outcome or self._end(step, ExitCode.DONE, f"done after {_counted(step)}")
            except (Dropped, Exception) as error:
                return self._end_interrupted(error, stop)
            finally:
                self.saver.complete()
                self.progress.end()

    def _end_before(self, start: int) -> Outcome:
        """Nothing is left to do."""
        if self._idle:
            return self._end(start, ExitCode.ERROR, f"nothing has trained in the {_counted(start)} of this run")
        return self._end(start, ExitCode.DONE, f"all {start} steps are done already; `--steps +N` adds more")

    def _begin(self, start: int, stop: StopSignals) -> Outcome | None:
        """The evaluation before the first step; the outcome if a callback wants no step at all."""
        self._tell("on_begin", start)
        asked = self._stop_request(stop)
        if asked in (StopRequest.CALLBACK_STOPPED, StopRequest.CALLBACK_FAILED):
            return self._end_as_requested(asked, start, stop)
        if start == 0 and self.evaluate is not None and self.options.eval_every:
            self._evaluate(0, stop)
        return None

    def notify_end(self, outcome: Outcome) -> Outcome:
        """Call the callbacks when the model is written; one that fails now turns the outcome into an error."""
        before = self.callbacks.failed
        self._tell("on_end", outcome.step, outcome)
        if self.callbacks.failed == before:
            return outcome
        self.progress.say(str(self.callbacks.failed))
        return replace(outcome, exit_code=ExitCode.ERROR, reason=str(self.callbacks.failed))

    def _after(self, step: int, metrics: Mapping[str, float], stop: StopSignals, *, again: bool) -> Outcome | None:
        """Evaluate and save when it is time, and the outcome if the run ends with this step."""
        o = self.options
        if metrics.get("skipped"):
            self._bad += 1
            self._blame = self._blame or self._bad_tensor(step)
        elif metrics:
            self._bad, self._blame = 0, None
        if self._bad >= o.bad_steps:
            what = f"loss or gradient was not finite in {self._bad} steps in a row"
            return self._diverged(step, what + (f", first {self._blame}" if self._blame else ""))
        error = self._unscored(step, metrics)
        reached = improved = False
        due = self.evaluate is not None and o.eval_every and (step % o.eval_every == 0 or step == o.steps)
        if error is None and due:
            score = self._evaluate(step, stop)
            improved = self.best_step == step
            if o.stop_at is not None and score is not None:
                reached = score == o.stop_at or self._beats(score, o.stop_at)
        if error is None and not reached:
            error = self._untrained(over=step == o.steps)
        asked = self._stop_request(stop)
        last = bool(asked) or error is not None or reached or step == o.steps
        not_finite = None
        if last or improved or again or (o.save_every and step % o.save_every == 0):
            try:
                self._save(step, stop, wait=last)
            except NotFinite as found:
                not_finite = str(found)
            asked = self._stop_request(stop)  # a callback may stop the run when it is told of the checkpoint
        failures = self.agree(inf if not_finite else float(self.saver.failures))
        if failures == inf:
            return self._diverged(step, not_finite or "a weight is not finite")
        if failures >= o.disk_failures or (last and failures):
            tries = f"{failures:.0f} tries" if failures > 1 else "the last try"
            why = f"no checkpoint could be written in {tries}{self.saver.why_not}: {self.saver.kept()}"
            return self._end(step, ExitCode.DISK, why)
        if asked > StopRequest.CALLBACK_STOPPED:
            return self._end_as_requested(asked, step, stop)
        if error is not None:
            return self._end(step, ExitCode.ERROR, error)
        if asked:
            return self._end_as_requested(asked, step, stop)
        if reached:
            return self._end(step, ExitCode.DONE, f"{o.main} reached {o.stop_at} at step {step}")
        return None

    def _end_interrupted(self, error: BaseException, stop: StopSignals) -> Outcome:
        """A signal's grace is over, or a peer is lost: go back to the last complete step, save it, and end.

        Once the weights have moved there is no way back, and the last checkpoint stands. Any other error goes on its way.
        """
        lost = self.peers.why(error)
        if lost is None and not isinstance(error, Dropped):
            raise error
        self.saver.complete()
        back, moves = self._undo or (lambda: None, self._moved())
        whole = moves == self._moved()
        if whole:
            back()
        if whole and self.parts is not None:  # a save needs all ranks
            whole = lost is None and self.peers.all_stopped_at(self._done)
        if whole and self._done and (self.saver.saved != self._done or self._unevaluated):
            try:
                self._save(self._done, stop, wait=True)
            except NotFinite as found:
                return replace(self._diverged(self._done, str(found)), dropped=True)
        saved = f"stopped after step {self._done}"
        if self.run is not None:
            saved += (
                ", everything is saved" if self._done and self.saver.saved == self._done else f", {self.saver.kept()}"
            )
        if lost is not None and self.peers.lost_code not in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            raise PeerLost(f"{lost}: {saved}; the same command with --resume continues") from error
        code = stop.exit_code if stop.stop_requested else ExitCode.TERMINATED
        what = f"the evaluation of step {self._done}" if self._unevaluated else f"the rollout of step {self._done + 1}"
        reason = f"{saved}; {what} was dropped"
        if self.saver.failures:
            code, reason = ExitCode.DISK, f"no checkpoint could be written{self.saver.why_not}: {reason}"
        return replace(self._end(self._done, code, reason), dropped=True)

    def _moved(self) -> int:
        return 0 if self.updater is None else self.updater.moves

    def _bad_tensor(self, step: int) -> str | None:
        found = None if self.updater is None else self.updater.not_finite
        return f"{found} at step {step}" if found else None

    def _way_back(self) -> Callable[[], None]:
        """Takes back what collecting changes."""
        mark = getattr(self.learner, "mark", None)
        return mark() if mark is not None else partial(self.learner.load_state_dict, self.learner.state_dict())

    def _log_step(self, step: int) -> dict[str, float]:
        """Write and show the numbers of a step that is complete."""
        self._done, self._undo = step, None
        metrics = self.learner.metrics()
        metrics = metrics | self.callbacks.call("on_step", step, metrics)
        if self.run is not None:
            self.run.metrics.append({"step": step, **metrics})
            self.run.timing.append({"step": step, **self.timer.take()})
        self.log(metrics, step)
        line, *remarks = self.learner.explain().splitlines()
        if metrics.get("skipped"):
            line += ", NOT FINITE"
            remarks.append("loss or gradient was not finite: the step was skipped and the weights are untouched")
        self.progress.step(step, metrics, line)
        for remark in remarks:
            if remark not in self._remarks:
                self._remarks.add(remark)
                self.progress.say(remark)
        if self._idle is not None:
            self._idle = None if _trained(metrics) else self._idle + 1
        return metrics

    def _evaluate(self, step: int, stop: StopSignals) -> float | None:
        assert self.evaluate is not None
        self._unevaluated = step > 0
        with self.timer.phase("evaluate"), stop.droppable():
            found = self.evaluate(step)
        self._unevaluated = False
        named = {f"eval_{name}": value for name, value in found.items()}
        named |= self.callbacks.call("on_evaluate", step, named)
        if self.run is not None:
            self.run.metrics.append({"step": step, **named})
        self.log(named, step)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        self.progress.say(f"evaluation at step {step}: {shown}")
        score = found.get(self.options.main)
        if score is not None and not isnan(score) and step and (self.best is None or self._beats(score, self.best)):
            self.best, self.best_step = score, step
        return score

    def _tell(self, moment: str, step: int, *told: Any) -> None:
        """Call the callbacks at a moment that has no line of its own in the metrics."""
        logged = self.callbacks.call(moment, step, *told)
        if logged and self.run is not None:
            self.run.metrics.append({"step": step, **logged})
            self.log(logged, step)

    def _unscored(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The error if no answer of the step has a score, on any rank."""
        if "reward" in metrics or "rewards/failed" not in metrics:
            return None
        why = getattr(self.learner, "unscored", None) or "every reward failed"
        return f"no answer of step {step} could be scored: {why}"

    def _untrained(self, *, over: bool) -> str | None:
        """The error if nothing has ever trained, once the run has gone on like that for long or is over."""
        idle = self._idle or 0
        if not idle or not (over or idle >= self.options.idle_steps):
            return None
        why = "; ".join(self.learner.explain().splitlines()[1:]) or "every gradient was 0 or not finite"
        return f"nothing has trained in {_counted(idle)}: {why}"

    def _stop_request(self, stop: StopSignals) -> StopRequest:
        own = StopRequest.NOTHING
        if stop.stop_requested:
            own = StopRequest.SIGNAL
        elif self.callbacks.failed is not None:
            own = StopRequest.CALLBACK_FAILED
        elif self.callbacks.stopped is not None:
            own = StopRequest.CALLBACK_STOPPED
        return StopRequest(int(self.agree(float(own))))

    def _end_as_requested(self, asked: StopRequest, step: int, stop: StopSignals) -> Outcome:
        saved = f"stopped at step {step}" + (", everything is saved" if self.saver.saved == step else "")
        if asked is StopRequest.SIGNAL:
            code = stop.exit_code if stop.stop_requested else ExitCode.TERMINATED  # the signal came to another rank
            return self._end(step, code, saved)
        if asked is StopRequest.CALLBACK_FAILED:
            return self._end(step, ExitCode.ERROR, f"{self.callbacks.failed or 'a callback failed'}; {saved}")
        reason, untrained = (
            f"stopped at step {step} by {self.callbacks.stopped or 'a callback'}",
            self._untrained(over=True),
        )
        if untrained is not None:
            return self._end(step, ExitCode.ERROR, f"{reason}; {untrained}")
        return self._end(step, ExitCode.DONE, reason)

    def _beats(self, score: float, other: float) -> bool:
        return score < other if self.options.lower else score > other

    def _save(self, step: int, stop: StopSignals, *, wait: bool) -> None:
        protect = {self.best_step} if self.best_step is not None else set()
        with stop.saving():
            self.saver.save(step, {"step": step, "loop": self.state_dict()}, protect=protect, wait=wait)

    def _diverged(self, step: int, why: str) -> Outcome:
        return self._end(step, ExitCode.DIVERGED, f"diverged: {why}; {self.saver.kept()}")

    def _end(self, step: int, code: ExitCode, reason: str) -> Outcome:
        self.progress.say(reason)
        return Outcome(step=step, exit_code=code, reason=reason, best=self.best, best_step=self.best_step)


def _trained(metrics: Mapping[str, float]) -> bool:
    """Whether an optimiser step was taken with a gradient that is not 0. A learner that logs neither has no optimiser."""
    return metrics.get("optimizer_steps", 1.0) > 0 and 0 < metrics.get("grad_norm", 1.0) < inf


def _counted(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"
