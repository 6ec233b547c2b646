"""The files of a run, read for looking at. Nothing here needs the run to be over, and nothing is changed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rolecall
from rolecall.errors import UserError
from rolecall.train.jsonl import read_lines
from rolecall.train.lock import LOCK

FORMAT = 1
"""The layout of a run that this version reads; `format` in run.json."""

_STEP_FILE = re.compile(r"step-([0-9]{6,})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What a run's directory says."""

    path: Path
    about: dict[str, Any]
    """run.json."""
    config: dict[str, Any]
    """config.json."""
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl that are about training steps."""
    evaluations: list[dict[str, Any]]
    """Those that are about evaluations."""
    timing: list[dict[str, Any]]
    """timing.jsonl."""
    rollouts: dict[int, Path]
    """The files of rollouts/ by step."""
    updates: dict[int, Path]
    """The files of updates/ by step."""
    locked: bool
    """A process works in the directory, or died in it."""

    @property
    def command(self) -> str:
        """What made it: sft, rm, rl …"""
        return str(self.about.get("command", "run"))

    @property
    def last_step(self) -> int:
        """The last step in the metrics."""
        return int(self.steps[-1]["step"]) if self.steps else 0


def is_demo(path: Path) -> bool:
    """True for the directory of a demo, whose runs lie inside it."""
    return (path / "demo.json").is_file()


def read_run(path: Path) -> RunFiles:
    """Read a run's directory. What is not one, is of a newer rolecall, is torn, or may not be read, is a `UserError`."""
    try:
        return _read_run(path)
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; make it readable for yourself") from error


def read_single(path: Path) -> RunFiles:
    """The same, where a demo of several runs will not do."""
    if is_demo(path):
        raise UserError(f"{path} is a demo of several runs; give one of them, such as {path / 'ppo'}")
    return read_run(path)


def read_several(paths: Sequence[Path]) -> list[RunFiles]:
    """Different runs."""
    places = [path.resolve() for path in paths]
    if len(set(places)) < len(places):
        raise UserError(f"{next(p for p in paths if places.count(p.resolve()) > 1)} is given twice; give each run once")
    return [read_single(path) for path in paths]


def _read_run(path: Path) -> RunFiles:
    check_directory(path)
    if not (path / "run.json").is_file():
        if (path / "config.json").is_file() or (path / "metrics.jsonl").is_file():
            raise UserError(f"{path} is half a run: it has no run.json; let it begin, or bring back a whole copy")
        raise UserError(f"{path} is not a run: it has no run.json; give a directory that sft, rm, rl or demo wrote")
    about = read_object(path / "run.json")
    check_format(path, about)
    lines = _lines(path / "metrics.jsonl")
    if not lines:
        raise UserError(f"{path} has no finished step yet, so there is nothing to show; let it train first")
    return RunFiles(
        path=path,
        about=about,
        config=read_object(path / "config.json"),
        steps=[line for line in lines if not is_evaluation(line)],
        evaluations=[line for line in lines if is_evaluation(line)],
        timing=[line for line in _lines(path / "timing.jsonl") if isinstance(line["step"], int)],
        rollouts=step_files(path / "rollouts"),
        updates=step_files(path / "updates"),
        locked=(path / LOCK).exists(),
    )


def check_directory(path: Path) -> None:
    """Refuse what is no directory."""
    if not path.exists():
        raise UserError(f"there is no run {path}; give the directory of a run, such as runs/rl-1")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a run; give the directory that holds it")


def check_format(path: Path, about: dict[str, Any]) -> None:
    """Refuse a run of a newer layout."""
    found = about.get("format", 1)
    if not isinstance(found, int) or found > FORMAT:
        by = about.get("versions", {}).get("rolecall", "?") if isinstance(about.get("versions"), dict) else "?"
        raise UserError(
            f"{path} is a run in format {found}, written by rolecall {by}; this is rolecall {rolecall.__version__}, "
            f"which reads up to format {FORMAT}: install a newer one"
        )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is half a run: it has no {path.name}; bring back a whole copy") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is torn or no JSON; bring back a whole copy of the run") from None
    if not isinstance(held, dict):
        raise UserError(f"{path} holds no JSON object; bring back a whole copy of the run")
    return held


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, numbers as numbers; a torn last line is one that is being written."""
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        return []
    for line in lines:
        if not isinstance(line.get("step"), int | float):
            raise UserError(f"{path} has a line without a step; bring back a whole copy of it")
    return [{name: number_of(value) for name, value in line.items()} for line in lines]


def number_of(value: Any) -> Any:
    """A number that JSON has no word for, which logs write as a text."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def is_evaluation(line: dict[str, Any]) -> bool:
    """Whether a line of the metrics is about an evaluation."""
    return any(name.startswith("eval_") for name in line)


def step_files(folder: Path) -> dict[int, Path]:
    """The records in a folder by step."""
    if not folder.is_dir():
        return {}
    found = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def near(name: Any) -> str:
    """The last two parts of an absolute path; anything else as it is."""
    text = "" if name is None else str(name)
    return "/".join(Path(text).parts[-2:]) if text.startswith("/") else text


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_text(value: Any) -> str:
    """A setting as a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def command_line(run: RunFiles) -> str:
    """What started a run."""
    given = run.about.get("arguments")
    arguments = list(given) if isinstance(given, list) else []
    if arguments and arguments[0] in (run.command, "demo"):
        return " ".join(["rolecall", *map(str, arguments)])
    return f"rolecall.{run.command}(…) from Python"
