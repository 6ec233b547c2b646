"""A copy of a run's rollouts at an address, which a thread keeps up to date beside training.

Nothing waits for it but the end of the run. A file that cannot be copied stays in the run's directory and is tried again; what a
run that was killed had not copied yet, it copies when it is resumed.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic

from rolecall.config.experience import StoreOptions
from rolecall.errors import UserError
from rolecall.experience.parquet import StoreError, merged
from rolecall.experience.places import Place
from rolecall.experience.rollout_schema import ROLLOUTS, UNCUT
from rolecall.experience.stored import StepFile, step_files, steps_in

_log = logging.getLogger(__name__)

_END_S = 60.0
"""How long the end of a run waits for what was not copied yet; one that is stopped, a tenth of it."""
_ABOUT = ("config.json", "run.json")


class Mirror:
    """Copies a run's rollouts to `options.url`."""

    def __init__(self, options: StoreOptions, *, resume: bool, overwrite: bool) -> None:
        """Raises a `UserError` if the address cannot be used, or holds what another run left."""
        assert options.url is not None
        self.options, self._overwrite, self._folder = options, overwrite, Path()
        self._pending: set[str] = set()
        self._error: str | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._begun = False
        try:
            self._place = Place(options.url)
            self._rollouts = self._place / "rollouts"
            self._rollouts.check()
            there = step_files(self._rollouts)
            if there and not (resume or overwrite):
                raise StoreError(
                    f"{options.url} holds rollouts of step {there[0].step} to {there[-1].step} already: give another store.url, or "
                    "--overwrite to remove them"
                )
        except StoreError as error:
            raise UserError(str(error)) from error

    @property
    def pending(self) -> set[str]:
        """Names of files that are not copied yet, and must stay."""
        with self._changed:
            return set(self._pending)

    def watch(self, folder: Path) -> None:
        """`folder` is where the run's rollouts lie. Rollouts of a run that is overwritten go."""
        self._folder = folder
        if self._overwrite:
            self.cut_after(-1)

    def _begin(self) -> None:
        """Start copying, first what a run before this one has not: after a resume has cut both sides."""
        if self._begun:
            return
        self._begun = True
        there = {file.step for file in step_files(self._rollouts)} if any(self._folder.iterdir()) else set()
        self._add(file.name for file in step_files(self._folder) if file.step not in there)
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def cut_after(self, step: int) -> None:
        """Remove what is of later steps, as a resume does with the run's own files."""
        try:
            files = step_files(self._rollouts)
            torn = {file.file for file in files if file.step > step and file.group is not None}
            kept = [file for file in files if file.step <= step and file.file in torn]
            if kept:
                self._merge(kept)
            for name in torn | {file.file for file in files if file.step > step}:
                self._rollouts.remove(name)
        except StoreError as error:
            raise UserError(str(error)) from error

    def add(self, name: str) -> None:
        """Copy this file too."""
        self._begin()
        self._add([name])

    def finish(self) -> None:
        """Wait until everything is copied; a `UserError` if that takes too long."""
        self._begin()
        if self._wait(_END_S):
            return
        raise UserError(
            f"{len(self.pending)} of the run's rollouts are not in {self._place} ({self._error or 'it is too slow'}); the run is "
            "whole, and --resume copies them",
            exit_code=75,
        )

    def close(self) -> None:
        """Stop copying soon."""
        self._wait(_END_S / 10)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> bool:
        end = monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending or self._closed, max(0.0, end - monotonic()))

    def _add(self, names: Iterable[str]) -> None:
        with self._changed:
            self._pending.update(names)
            self._changed.notify_all()

    def _run(self) -> None:
        pause, about = 0.0, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                name = min(self._pending)
            try:
                if not about:
                    for one in _ABOUT:
                        self._place.write(one, (self._folder.parent / one).read_bytes())
                    about = True
                self._copy(name)
                pause, self._error = 0.0, None
            except (StoreError, OSError) as error:
                if self._error is None:
                    _log.warning("the copy of the rollouts is behind and will be tried again: %s", error)
                pause, self._error = min(30.0, max(1.0, 2 * pause)), str(error)
                continue
            with self._changed:
                self._pending.discard(name)
                self._changed.notify_all()

    def _copy(self, name: str) -> None:
        """One file; then the steps before it are merged and thinned as the options say."""
        try:
            content = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return
        self._rollouts.write(name, content)
        size, keep, newest = self.options.merge, self.options.keep, (steps_in(name) or (0, 0))[1]
        if size == 1 and not keep:
            return
        held = {one: steps for one in self._rollouts.names() if (steps := steps_in(one))}
        if keep:
            for one in [one for one, (_, last) in held.items() if last <= newest - keep]:
                self._rollouts.remove(one)
                del held[one]
        blocks = defaultdict(list)
        for one, (_, last) in held.items():
            blocks[(last - 1) // size].append(one)
        for block, names in blocks.items():
            if (block + 1) * size <= newest and len(names) > 1:
                self._merge(step_files(self._rollouts, names))

    def _merge(self, files: Sequence[StepFile]) -> None:
        """Put steps into one file, then remove those they were in."""
        name = f"steps-{files[0].step:06d}-{files[-1].step:06d}.parquet"
        tables = [(table, {**facts, "step": str(file.step)}) for file in files for table, facts in [file.table()]]
        uncut = all(facts["schema_version"] == str(UNCUT.version) for _, facts in tables)
        self._rollouts.write(name, merged(tables, UNCUT if uncut else ROLLOUTS))
        for old in {file.file for file in files} | {file.name for file in files}:
            if old != name:
                self._rollouts.remove(old)
