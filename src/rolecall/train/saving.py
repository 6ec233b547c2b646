"""Saving beside training: a checkpoint is written at once, and completed (hashed, put on the disk, named) while the next steps go on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rolecall.files import DiskError
from rolecall.train import checkpoint
from rolecall.train.parts import Parts
from rolecall.train.progress import Progress
from rolecall.train.rundir import RunDir
from rolecall.train.timing import Timer


class Saver:
    """Saves a run's checkpoints, one at a time: each waits for the one before it, and so does the end of the interpreter."""

    def __init__(
        self,
        run: RunDir | None,
        write: Callable[[Path, dict[str, Any]], None],
        *,
        config: object,
        keep: int,
        parts: Parts | None,
        progress: Progress,
        timer: Timer,
        told: Callable[[int, Path], None] | None,
    ) -> None:
        """`run` is None on all ranks but the first. `told` hears of every checkpoint at its own step, so that with it saves are
        waited for."""
        self.run, self.write, self.config, self.keep = run, write, config, keep
        self.parts, self.progress, self.timer, self.told = parts, progress, timer, told
        self.saved: int | None = None
        """The step of the last checkpoint that is complete."""
        self.failures = 0
        """Saves in a row for which the disk had no room."""
        self.why_not = ""
        """Why the last of them failed."""
        self._thread: ThreadPoolExecutor | None = None
        self._completing: tuple[int, Future[Path]] | None = None

    def save(self, step: int, extra: dict[str, Any], *, protect: set[int], wait: bool) -> None:
        """Write a checkpoint; if the disk is full the run continues and tries again at the next one."""
        if self.run is None:
            if self.parts is not None:
                self.parts.assist()
            return
        self.complete()
        try:
            with self.timer.phase("save"), self.parts.saving() if self.parts else nullcontext():
                self.run.sync()
                completed = checkpoint.begin(
                    self.run.checkpoints,
                    step,
                    lambda directory: self.write(directory, extra),
                    config=self.config,
                    keep=self.keep,
                    protect=protect,
                )
        except DiskError as error:
            self._failed(step, error)
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "rolecall-checkpoint")
        self._completing = step, self._thread.submit(completed)
        if wait or self.told is not None:
            self.complete()

    def complete(self) -> None:
        """Wait for the checkpoint that is being completed, if there is one."""
        if self._completing is None:
            return
        (step, path), self._completing = self._completing, None
        try:
            with self.timer.phase("save"):
                directory = path.result()
        except DiskError as error:
            self._failed(step, error)
            return
        self.failures, self.saved = 0, step
        if self.told is not None:
            self.told(step, directory)

    def kept(self) -> str:
        """What is left to go on from, in words."""
        self.complete()
        return "there is no checkpoint yet" if not self.saved else f"the last good checkpoint is of step {self.saved}"

    def _failed(self, step: int, error: DiskError) -> None:
        self.failures += 1
        self.why_not = f" ({error})"
        self.progress.say(f"checkpoint of step {step} was not written, the run continues: {error}")
