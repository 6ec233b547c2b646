"""Runs tests against a copy of the package in forked processes, and records which test runs which line.

A parent imports torch, pytest and the other heavy libraries once, but nothing of rolecall; every run of tests is a fork
of it, which starts in milliseconds. A run sees the package through a copy of `src` of its own, in which one file may be
mutated: worker processes and compiled C files see the same copy. Time limits are of processor time, so that a busy
machine changes no result; a run in which every process sleeps for a while hangs.
"""

import ast
import ctypes
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

_HEAVY = """
    torch torch.nn.functional torch.utils.checkpoint torch.testing torch.distributed numpy transformers
    safetensors.torch transformers.models.llama.modeling_llama transformers.models.auto.modeling_auto
    accelerate peft pyarrow.parquet hypothesis jaxtyping beartype pydantic yaml rich.console gguf
    huggingface_hub tokenizers cloudpickle gymnasium transformers.models.qwen2.modeling_qwen2
    transformers.tokenization_utils_tokenizers coverage datasets pandas
"""
_ALREADY = "ignore::pytest.PytestAssertRewriteWarning"  # plugins are imported before the fork
_ASLEEP_SECONDS = 60
_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER


def import_heavy() -> None:
    """What every run needs and no mutant touches."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in _HEAVY.split():
        try:
            importlib.import_module(name)
        except ImportError:  # the tests that need it are skipped, or import it themselves
            continue
    assert not any(name.split(".")[0] == "rolecall" for name in sys.modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run of tests said."""

    verdict: str
    """passed, failed, or: crashed, slow, asleep, none (no test was run)"""
    by: str
    """The first test that failed."""
    seconds: float
    """Processor time of the run."""


class Slot:
    """A copy of the package, and the runs on it one after the other."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root, self.source = folder, root, folder / "src"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "src", self.source)
        gc.freeze()  # or each run would look through all that is imported
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of a run come to us, to be ended

    def run(
        self, tests: list[str], *, changed: tuple[str, bytes] | None = None, limit: float, plugins: Iterable = ()
    ) -> Outcome:
        """Run tests until one fails, with one file changed. `limit` is in seconds of processor time."""
        if not tests:
            return Outcome(verdict="none", by="", seconds=0.0)
        if changed is None:
            return self._run(tests, limit, list(plugins))
        path = self.source / changed[0]
        held, times = path.read_bytes(), path.stat()
        path.write_bytes(changed[1])
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        try:
            return self._run(tests, limit, list(plugins))
        finally:
            path.write_bytes(held)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled form is valid again

    def _run(self, tests: list[str], limit: float, plugins: list) -> Outcome:
        told = self.folder / "failed"
        told.unlink(missing_ok=True)
        before = _children_seconds()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = self._child(tests, limit, [*plugins, _FirstFailure(told)])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status, verdict = self._wait(pid, limit)
        self._end_orphans()
        code = os.waitstatus_to_exitcode(status)
        if not verdict:
            verdict = {0: "passed", 1: "failed", 5: "none", -signal.SIGXCPU: "slow"}.get(code, "crashed")
        by = told.read_text() if told.is_file() else ""
        return Outcome(verdict=verdict, by=by, seconds=_children_seconds() - before)

    def _child(self, tests: list[str], limit: float, plugins: list) -> int:
        os.setsid()
        out = os.open(self.folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        hard = int(limit) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ |= {"PYTHONPATH": str(self.source), "ROLECALL_CACHE": str(self.folder / "cache")}
        sys.path.insert(0, str(self.source))
        os.chdir(self.root)
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--timeout=0",
            "-W",
            _ALREADY,
            f"--basetemp={self.folder}/tmp",
        ]
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        return int(pytest.main([*options, *files], plugins=[*plugins, _Chosen(tests)]))

    def _wait(self, pid: int, limit: float) -> tuple[int, str]:
        """Until it ends, or is to be ended."""
        awake, used, polls = time.monotonic(), 0.0, 0
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status, ""
            time.sleep(0.05)
            polls += 1
            if polls % 60:
                continue
            tree = _tree(pid)
            now = sum(_seconds(process) for process in tree)
            if now > used or any(_status(process) in ("running", "disk-sleep") for process in tree):
                awake, used = time.monotonic(), max(now, used)
            verdict = "asleep" if time.monotonic() - awake > _ASLEEP_SECONDS else "slow" if now > 2 * limit else ""
            if verdict:
                os.kill(pid, signal.SIGKILL)
                return os.waitpid(pid, 0)[1], verdict

    def _end_orphans(self) -> None:
        while left := psutil.Process().children():
            for process in left:
                process.kill()
                process.wait()


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"


class _Chosen:
    """Only these tests, in this order. A test that is not there any more, because its name comes from a table that was
    mutated, is not run: that alone notices nothing."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests) if "::" in test}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.places:
            chosen = [item for item in items if item.nodeid in self.places]
            items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])


class _FirstFailure:
    def __init__(self, told: Path) -> None:
        self.told = told

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.told.is_file():
            self.told.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


# -- which test runs which line ----------------------------------------------------------------------------------------


class _Recorder:
    """Runs in the child: coverage by test, also of processes that the test starts, and the time of each test."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source, self.tests = folder, source, dict[str, dict]()
        self.cover: Any = None

    def pytest_configure(self, config: Any) -> None:
        config.option.maxfail = 0  # a test that fails is left out, the others are recorded

    def pytest_sessionstart(self) -> None:
        import coverage

        settings = self.folder / "coverage.ini"
        settings.write_text(
            f"[run]\ndata_file = {self.folder}/lines\nsource = {self.source}\nparallel = true\ncore = ctrace\n"
            "patch = _exit\nsigterm = true\ncontext = ${ROLECALL_TEST-}\ndisable_warnings = no-data-collected, module-not-measured\n"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(settings)  # coverage's .pth file starts it in processes of tests
        self.cover = coverage.Coverage(config_file=str(settings))
        self.cover.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.cover.switch_context(item.nodeid)
        os.environ["ROLECALL_TEST"] = item.nodeid
        self.tests[item.nodeid] = {"seconds": -sum(os.times()[:4]), "passed": True, "ran": False}
        yield
        self.tests[item.nodeid]["seconds"] += sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid]["passed"] &= not report.failed
        self.tests[report.nodeid]["ran"] |= report.when == "call" and report.passed

    def pytest_sessionfinish(self) -> None:
        self.cover.stop()
        self.cover.save()
        (self.folder / "tests.json").write_text(json.dumps(self.tests))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Which tests run which lines, by function, so that edits elsewhere in a file move nothing."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Processor time of each test that passes."""
    functions: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """`file::function` -> test -> lines it runs, from the function's first."""

    def tests_at(self, place: str, line: int) -> list[str]:
        """Those that run the line, or else the function."""
        by_test = self.functions.get(place, {})
        return [test for test, lines in by_test.items() if line in lines] or list(by_test)

    def tests_of_file(self, file: str) -> list[str]:
        """Those that run anything in it."""
        found = (tests for place, tests in self.functions.items() if place.split("::")[0] == file)
        return list(dict.fromkeys(test for tests in found for test in tests))


def spans(source: bytes) -> list[tuple[int, int, str]]:
    """First and last line and qualified name of each outermost function (a method counts as outermost)."""
    found = []

    def walk(body: list[ast.stmt], where: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((node.lineno, node.end_lineno or node.lineno, where + node.name))
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{where}{node.name}.")

    walk(ast.parse(source).body, "")
    return found


def record(slot: Slot, test_file: Path) -> dict:
    """Run one file of tests and say which lines its tests ran: {tests: ..., functions: ...}."""
    folder = slot.folder / "recorded"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    outcome = slot.run([str(test_file)], limit=1500, plugins=[_Recorder(folder, slot.source)])
    if outcome.verdict not in ("passed", "failed", "none"):
        raise RuntimeError(f"{test_file} could not be recorded ({outcome.verdict}): see {slot.folder}/out.txt")
    tests = json.loads((folder / "tests.json").read_text())
    kept = {name: test["seconds"] for name, test in tests.items() if test["passed"] and test["ran"]}
    return {"verdict": outcome.verdict, "seconds": kept, "functions": _functions(folder, slot.source, kept)}


def _functions(folder: Path, source: Path, tests: dict[str, float]) -> dict[str, dict[str, list[int]]]:
    """What coverage wrote down, in this process and in those of the tests: function -> test -> lines."""
    from coverage import CoverageData

    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("lines*"):
        data = CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            contexts = {line: tests.keys() & set(names) for line, names in data.contexts_by_lineno(file).items()}
            for first, last, where in spans(Path(file).read_bytes()):
                for line in range(first + (first < last), last + 1):  # the line of `def` runs on import
                    for test in contexts.get(line, ()):
                        found[f"{Path(file).relative_to(source)}::{where}"][test].add(line - first)
    return {place: {test: sorted(lines) for test, lines in by_test.items()} for place, by_test in found.items()}


def digest(*paths: Path) -> str:
    """Of the contents of files."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()[:16]
