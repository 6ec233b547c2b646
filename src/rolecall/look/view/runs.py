"""The runs and audits of a directory: which there are, and a line about each. Nothing outside the directory is read."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rolecall.errors import UserError
from rolecall.look.audit_page import ReadAudit, read_audit
from rolecall.look.charts import is_number
from rolecall.look.run import RunFiles, check_format, flat, is_demo, is_evaluation, near, read_object, step_files
from rolecall.look.view.logs import Line, RunLog, read_line
from rolecall.train.lock import LOCK, holder_of, is_held

State = Literal["running", "done", "stopped", "diverged", "crashed", "errors", "unreadable"]
"""`errors` is of an audit that found some."""

MAIN = ("reward", "return", "eval_accuracy", "accuracy", "rewards/accuracies", "loss")
"""The number that the table shows, the first that a run has."""
_EVALUATED = ("eval_accuracy", "eval_reward", "eval_return", "eval_loss")
_POINTS = 48
"""Lines of the metrics that a sparkline is drawn from."""
_SMALL = 1 << 18
"""Bytes of metrics up to which all lines are looked at."""
_BAD_STEPS = 3
"""Steps in a row without a finite loss that end a run."""
_SIGNS = ("run.json", "config.json", "metrics.jsonl")
_READ = (*_SIGNS, "timing.jsonl", "rollouts", "updates", "report.html")
KEPT = 12
"""Runs whose lines stay in memory."""
SEPARATOR = ":"
"""Between the names of a folder and of a run inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What the table says of a run, or of an audit."""

    kind: Literal["run", "audit"] = "run"
    id: str
    """What addresses call it."""
    name: str
    state: State
    problem: str = ""
    """Why it cannot be read."""
    addressed: bool = True
    """Whether it has a page."""
    command: str = ""
    algorithm: str = ""
    model: str = ""
    source: str = ""
    """Rows or environment."""
    settings: Sequence[tuple[str, str]] = ()
    step: int = 0
    steps: int | None = None
    main: str = ""
    """Which number `spark` shows."""
    last: float | None = None
    spark: Sequence[float] = ()
    evaluated: tuple[str, float] | None = None
    changed: float = 0.0
    """When its metrics were last written, in seconds since 1970."""

    @property
    def tags(self) -> list[str]:
        """The parts of a name such as `grpo,lr=1e-3@seed=1` after the first."""
        return [part for part in re.split(r"[,@+]", self.name)[1:] if part]


class Runs:
    """The runs below a directory: right inside it, or inside a folder there, such as a demo's."""

    def __init__(self, root: Path, *, only: str | None = None) -> None:
        """`only` is the name of the one run that is shown."""
        self.root, self.only = root.resolve(), only
        self.log = lru_cache(maxsize=KEPT)(RunLog)
        self._held: dict[str, tuple[object, Summary | None]] = {}

    def found(self) -> dict[str, Path]:
        """The runs by what addresses call them. Links that lead out of the directory are left out."""
        runs: dict[str, Path] = {}
        for outer in _folders(self.root):
            if self.only not in (None, outer.name) or not self.holds(outer):
                continue
            if _is_run(outer):
                runs[outer.name] = outer
                continue
            for inner in _folders(outer):
                if _is_run(inner) and self.holds(inner):
                    runs.setdefault(f"{outer.name}{SEPARATOR}{inner.name}", inner)
        return runs

    def pages(self) -> dict[str, Path]:
        """The HTML files, some of which are audits, by what addresses call them: beside runs, not inside them."""
        folders = {} if self.only else {"": self.root}
        folders |= {f"{f.name}{SEPARATOR}": f for f in _folders(self.root) if folders and not _is_run(f)}
        found = ((f"{prefix}{page.name}", page) for prefix, folder in folders.items() for page in _pages(folder))
        return {name: page for name, page in found if self.holds(page)}

    def path(self, run: str) -> Path | None:
        """Where a run lies; None if there is none of this name."""
        return next((path for path in self._places(run) if _is_run(path)), None)

    def audit(self, name: str) -> ReadAudit | None:
        """What an audit's page says; None if there is none of this name."""
        pages = (path for path in self._places(name) if path.suffix == ".html" and path.is_file())
        return next((found for path in pages if not self.only and (found := read_audit(path)) is not None), None)

    def _places(self, name: str) -> Iterator[Path]:
        """Where something of this name may lie below the directory."""
        outer, _, inner = name.partition(SEPARATOR)
        for names in [[name], [outer, inner]] if inner else [[name]]:
            path = self.root.joinpath(*names) if all(map(_is_name, names)) else None
            if path is not None and self.only in (None, names[0]) and self.holds(path):
                yield path

    def holds(self, path: Path) -> bool:
        """Whether a path, links followed, lies below the directory."""
        try:
            return path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):
            return False

    def summaries(self) -> list[Summary]:
        """A line about every run: those that are running, then the one that changed last first."""
        found, pages = self.found(), self.pages()
        self._held = {run: held for run, held in self._held.items() if run in found or run in pages}
        made = [self.summary(run, path) for run, path in found.items()]
        made += [one for name, path in pages.items() if (one := self._audited(name, path)) is not None]
        # Runs that train side by side keep their places, whichever wrote last.
        return sorted(made, key=lambda s: (0.0, s.name) if s.state == "running" else (1 / (1 + s.changed), s.name))

    def summary(self, run: str, path: Path) -> Summary:
        """A line about one. Read again only if its files changed."""
        held_by = is_held(path) if self.holds(path / LOCK) else None
        key = (path, held_by, *(_stamp(path / name) for name in (*_SIGNS, "model", "report.html")))
        held = self._held.get(run)
        if held is not None and held[0] == key and held[1] is not None:
            return held[1]
        name = run.replace(SEPARATOR, "/") if not (self.root / run).is_dir() else run
        made = (
            self._read(run, name, path, held_by) if _is_name(path.name) and _is_name(run) else _unaddressed(run, name)
        )
        self._held[run] = (key, made)
        return made

    def _audited(self, name: str, path: Path) -> Summary | None:
        """A line about an audit; None for a page of something else."""
        key, held = _stamp(path), self._held.get(name)
        if held is None or held[0] != key:
            try:
                made = _summary_of(name, read_audit(path), changed=key[0] / 1e9)
            except (UserError, OSError) as error:
                why = str(error) if isinstance(error, UserError) else f"{path} cannot be read: {error.strerror}"
                made = Summary(kind="audit", id=name, name=name, state="unreadable", problem=why, changed=key[0] / 1e9)
            self._held[name] = held = key, made
        return held[1]

    def check(self, path: Path) -> None:
        """Refuse a run whose files are links to somewhere else."""
        for name in _READ:
            if not self.holds(path / name):
                raise UserError(f"{path / name} is a link that leads out of {self.root}; open the run where it is")

    def _read(self, run: str, name: str, path: Path, held_by: bool | None) -> Summary:
        changed = _stamp(path / "metrics.jsonl")[0] or _stamp(path / "run.json")[0] or _stamp(path)[0]
        when = changed / 1e9
        try:
            self.check(path)
            about, config = described(path)
            lines = sampled(path / "metrics.jsonl")
        except UserError as error:
            if held_by and not (path / "run.json").exists():
                return Summary(id=run, name=name, state="running", changed=when)
            return Summary(id=run, name=name, state="unreadable", problem=str(error), changed=when)
        except OSError as error:
            why = f"{path} cannot be read: {error.strerror or error}"
            return Summary(id=run, name=name, state="unreadable", problem=why, changed=when)
        step = max((int(line["step"]) for line in lines), default=0)
        main = next((name for name in MAIN if any(is_number(line.get(name)) for line in lines)), "")
        spark = [float(line[main]) for line in lines if main and is_number(line.get(main))]
        evaluations = [(n, float(line[n])) for line in lines for n in _EVALUATED if is_number(line.get(n))]
        steps = config.get("steps")
        return Summary(
            id=run,
            name=name,
            state=state_of(path, lines, held_by, steps=steps, step=step, ended=bool(about.get("ended"))),
            command=str(about.get("command", "run")),
            algorithm=_algorithm(config),
            model=near(config.get("model")),
            source=near(config.get("rows") or config.get("env")),
            settings=_settings(config),
            step=step,
            steps=steps if isinstance(steps, int) else None,
            main=main,
            last=spark[-1] if spark else None,
            spark=spark,
            evaluated=evaluations[-1] if evaluations else None,
            changed=when,
        )

    def files(self, path: Path) -> RunFiles:
        """The whole run as it is now; one without a finished step too."""
        self.check(path)
        about, config = described(path)
        lines = self.log(path).read()
        return RunFiles(
            path=path,
            about=about,
            config=config,
            steps=lines.steps,
            evaluations=lines.evaluations,
            timing=lines.timing,
            rollouts=step_files(path / "rollouts"),
            updates=step_files(path / "updates"),
            locked=(path / LOCK).exists(),
        )

    def log_of(self, path: Path) -> Path | None:
        """What the run printed, if somebody sent it to a file: NAME.log beside its directory, or a .log inside it."""
        inside = sorted(path.glob("*.log")) if path.is_dir() else []
        for file in (path.with_name(f"{path.name}.log"), *inside):
            if file.is_file() and self.holds(file):
                return file
        return None


def resources(path: Path) -> str:
    """What the process that works on a run holds and has used; empty if there is none here, or the system does not say."""
    pid = holder_of(path)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    held = {name: words for name, _, words in (line.partition(":") for line in status.splitlines())}
    if "VmRSS" not in held:  # it has just ended
        return ""
    megabytes = int(held["VmRSS"].split()[0]) / 1e3
    seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    used = f"{seconds / 60:.0f} min" if seconds > 120 else f"{seconds:.0f} s"
    return f"process {pid}: {megabytes:,.0f} MB of memory, {used} of processor time"


def described(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """run.json and config.json."""
    about = read_object(path / "run.json")
    check_format(path, about)
    return about, read_object(path / "config.json")


def state_of(path: Path, lines: Sequence[Line], held_by: bool | None, *, steps: Any, step: int, ended: bool) -> State:
    """How a run stands, from what lies there: its lock, its last lines, its model, and the report written at its end.

    `ended`: an error that ended it was noted.
    """
    if held_by is not None:
        return "running" if held_by else "crashed"
    trained = [line for line in lines if not is_evaluation(line)]
    last = trained[-_BAD_STEPS:]
    if len(last) == _BAD_STEPS and all(line.get("skipped") for line in last):
        return "diverged"
    if ended:
        return "crashed"
    if (isinstance(steps, int) and step >= steps) or (path / "model").is_dir():
        return "done"
    written, logged = _stamp(path / "report.html")[0], _stamp(path / "metrics.jsonl")[0]
    return "stopped" if written and written + 60e9 >= logged else "crashed"


def sampled(path: Path) -> list[Line]:
    """Lines of a log from its beginning to its end: all of a short one, of a long one some, and the last few."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SMALL:
                return [line for raw in file.read().splitlines(keepends=True) if (line := read_line(raw)) is not None]
            found = []
            for place in range(_POINTS):
                file.seek(size * place // _POINTS)
                if place:
                    file.readline()  # the rest of a line
                found += _parsed([file.readline()])
            file.seek(size - _SMALL // 8)
            found += _parsed(file.read().splitlines(keepends=True)[1:])
            once = {(line["step"], is_evaluation(line)): line for line in found}
            return sorted(once.values(), key=lambda line: line["step"])
    except FileNotFoundError:
        return []


_KEY_SETTINGS = {
    "optim.lr": "lr",
    "lr": "lr",
    "batch": "batch",
    "prompts": "prompts",
    "samples": "samples",
    "seed": "seed",
}


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    held = dict(flat(config))
    return [(short, f"{held[name]:g}") for name, short in _KEY_SETTINGS.items() if is_number(held.get(name))]


def _algorithm(config: Mapping[str, Any]) -> str:
    algorithm = config.get("algorithm")
    return str((algorithm.get("name") if isinstance(algorithm, dict) else config.get("algo")) or "")


def _unaddressed(run: str, name: str) -> Summary:
    why = "its name holds a character that no address may hold; rename its directory to see it"
    return Summary(id=run, name=name, state="unreadable", problem=why, addressed=False)


def _summary_of(name: str, audit: ReadAudit | None, *, changed: float) -> Summary | None:
    if audit is None:
        return None
    return Summary(
        kind="audit",
        id=name,
        name=name.replace(SEPARATOR, "/").removesuffix(".html"),
        state="errors" if audit.count("error") else "done",
        command="audit",
        algorithm=audit.about.get("command", "").removeprefix("rolecall "),
        model=near(audit.about.get("model")),
        source=near(audit.about.get("rows")),
        settings=[(f"{level}s", str(audit.count(level))) for level in ("error", "warning")],
        addressed=_is_name(name),
        changed=changed,
    )


def _parsed(lines: Sequence[bytes]) -> list[Line]:
    return [line for raw in lines if raw.endswith(b"\n") and (line := read_line(raw)) is not None]


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
    return [path / name for name in sorted(names)]


def _pages(path: Path) -> list[Path]:
    try:
        return sorted(page for page in path.glob("*.html") if page.is_file())
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    try:
        return not is_demo(path) and any((path / name).is_file() for name in _SIGNS)
    except OSError:  # no permission, which its line says
        return True


def _is_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not any(c in "/\\\x7f" or ord(c) < 32 for c in name)


def _stamp(path: Path) -> tuple[int, int, int]:
    """(time, size, inode) of a file; zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
