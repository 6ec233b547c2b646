"""Running the cases against an adapter: pytest in this process, without the reader's own settings."""

import importlib.metadata
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolecall.conformance.load import NAMES, load
from rolecall.errors import UserError

if TYPE_CHECKING:
    import pytest

OUTCOMES = PASSES, DIFFERS, NOT_OFFERED = "passes", "differs", "not offered"
_CASES = Path(__file__).parent / "cases"
_PLAIN = ["terminal", "cacheprovider", "faulthandler", "warnings", "logging", "unraisableexception", "threadexception"]
_SECTIONS = ("masks", "aggregation", "returns", "advantages", "kl", "losses")
_FILES = tuple(str(_CASES / f"test_{section}.py") for section in _SECTIONS)
_ARGUMENTS = ("-c", os.devnull, "--rootdir", str(_CASES), "--disable-plugin-autoload", "--capture=sys", *_FILES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How one case went."""

    section: str
    """The file that holds the case: masks, aggregation, returns, …"""
    case: str
    """Its name."""
    about: str
    """What it asks, in a sentence."""
    outcome: str
    """PASSES, DIFFERS or NOT_OFFERED."""
    said: str
    """What was expected and what came, where it differs; what is missing, where it is not offered."""
    reason: str | None
    """Why it differs, if the adapter says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How an adapter did."""

    versions: Mapping[str, str]
    """Of rolecall, torch and the packages that the adapter names."""
    calls: Mapping[str, str]
    """For each function that is offered, the first line of its docstring: what is called."""
    results: tuple[Result, ...]
    """A line per case."""

    idle_reasons: tuple[str, ...]
    """Cases that the adapter explains although nothing differs in this version."""

    not_offered: tuple[str, ...]
    """Functions of the interface that the adapter lacks."""

    def count(self, outcome: str, section: str | None = None) -> int:
        """Cases with this outcome, in a section or in all."""
        return sum(r.outcome == outcome and section in (None, r.section) for r in self.results)


def run_cases(name: str) -> Report:
    """Run every case against the adapter of this name or file."""
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise UserError("the conformance cases need pytest: pip install 'rolecall[conformance]'") from error
    adapter = load(name)
    collector = _Collector(adapter.reasons)
    plugins = [word for plugin in _PLAIN for word in ("-p", f"no:{plugin}")]
    options = ["-p", "rolecall.conformance.plugin", "--conformance-adapter", name]
    added = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        code = pytest.main([*plugins, *options, *_ARGUMENTS], plugins=[collector])
    finally:
        if added is not None:
            os.environ["PYTEST_ADDOPTS"] = added
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not collector.results:
        raise UserError(f"pytest could not run the cases (its exit code is {int(code)})", exit_code=1)
    _check_reasons(name, adapter.reasons, collector.results)
    packages = ("rolecall", "torch", *adapter.packages)
    return Report(
        versions={package: importlib.metadata.version(package) for package in dict.fromkeys(packages)},
        calls={key: (inspect.getdoc(f) or "").split("\n")[0] for key, f in adapter.functions.items()},
        results=tuple(collector.results),
        not_offered=tuple(key for key in NAMES if key not in adapter.functions),
        idle_reasons=tuple(case for case in adapter.reasons if case not in collector.explained),
    )


class _Collector:
    """A pytest plugin that keeps how each case went."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.results: list[Result] = []
        self.explained: set[str] = set()
        self._reasons = reasons
        self._about: dict[str, str] = {}

    def pytest_configure(self, config: "pytest.Config") -> None:
        config.option.tbstyle = "native"  # only a failure's first line is read; the long form takes most of the time

    def pytest_itemcollected(self, item: "pytest.Item") -> None:
        doc = inspect.getdoc(getattr(item, "obj", None)) or ""
        self._about[item.nodeid] = " ".join(doc.split("\n\n")[0].split())

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        if report.when != "call" and report.passed:
            return
        file, _, test = report.nodeid.partition("::")
        case = test.removeprefix("test_")
        outcome = PASSES if report.passed else NOT_OFFERED if report.skipped else DIFFERS
        why = next((c for c in (case, case.partition("[")[0]) if c in self._reasons and outcome == DIFFERS), None)
        if why is not None:
            self.explained.add(why)
        self.results.append(
            Result(
                section=Path(file).stem.removeprefix("test_"),
                case=case,
                about=self._about[report.nodeid],
                outcome=outcome,
                said=_said(report.longrepr),
                reason=None if why is None else self._reasons[why],
            )
        )


def _said(longrepr: Any) -> str:
    """The first line of what went wrong, or of why a case was skipped."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    message = "" if longrepr is None else str(longrepr if crash is None else crash.message)
    return message.split("\n")[0].removeprefix("AssertionError: ")


def _check_reasons(name: str, reasons: Mapping[str, str], results: list[Result]) -> None:
    known = {form for result in results for form in (result.case, result.case.partition("[")[0])}
    for case in reasons:
        if case not in known:
            close = get_close_matches(case, known, n=1)
            end = f": did you mean {close[0]}?" if close else ""
            raise UserError(f"REASONS of the adapter {name} name an unknown case {case}{end}")
