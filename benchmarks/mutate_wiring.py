"""Mutants of everything but the maths: which small wrong edits do the tests notice?

    make mutate-wiring                                         # the sample: about 1,000 mutants of Python, 60 of C
    .venv/bin/python benchmarks/mutate_wiring.py --rooms marl  # one room of it
    .venv/bin/python benchmarks/mutate_wiring.py --share 1 --only marl/returns.py

Prints the score and every survivor that docs/numerics.md does not explain. State is in `.mutate/`, so a run goes on
where the last one stopped; a changed file's mutants are run again, and survivors once their tests have changed.
"""

import argparse
import ast
import functools
import json
import multiprocessing
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from mutants import Mutant, files_of, mutants_of, sample
from mutate_tests import Lines, Slot, digest, import_heavy, record, spans

ROOT = Path(__file__).parents[1]
ROOMS = ["recipes", "agents", "train", "experience", "marl", "policy", "rollout", "rewards"]
_TESTS = [*ROOMS, "jobs", "reference"]
_PYTHON_SHARE, _C_SHARE = 0.07, 0.035
_MOST_SECONDS = 25.0
"""Of tests run for one mutant, the quickest first."""
_QUICK = 1.0
_C_FILES = {
    "policy/flat.c": "policy/flat_ops.py",
    "policy/head.c": "policy/head_ops.py",
    "policy/attend.c": "policy/attend_ops.py",
    "rollout/linear.c": "rollout/linear.py",
    "rollout/decode.c": "rollout/kernels.py",
}
"""Where each C file's functions are called."""
_IN_WORKERS = dict.fromkeys(("calling.py", "math_verifier.py", "sources.py", "verifiers.py", "worker.py"), "pool.py")
"""Of rewards/: files whose functions run in walled-off workers, which record nothing; and who calls those."""


class State:
    """What is known from this and earlier runs."""

    def __init__(self, root: Path, package: str = "rolecall") -> None:
        self.root, self.source, self.package = root, root / "src", root / "src" / package
        self.folder = root / ".mutate"
        self.folder.mkdir(exist_ok=True)
        self.results_path = self.folder / "results.jsonl"
        self.results: dict[str, dict] = {}
        if self.results_path.is_file():
            for line in self.results_path.read_text().splitlines():
                self.results |= {(entry := json.loads(line))["key"]: entry}

    def test_files(self, folders: list[str]) -> list[Path]:
        """The tests that may be run."""
        patterns = [name if name.endswith(".py") else f"{name}/test_*.py" for name in folders]
        return [path for pattern in patterns for path in sorted((self.root / "tests").glob(pattern))]

    def recorded(self, test_file: Path) -> Path:
        """Where its lines are kept; another path once the test has changed."""
        name = str(test_file.relative_to(self.root / "tests")).replace("/", ".")
        return self.folder / "lines" / f"{name}.{digest(test_file)}.json"

    def lines(self, folders: list[str]) -> Lines:
        """All that has been recorded."""
        lines = Lines()
        for path in map(self.recorded, self.test_files(folders)):
            found = json.loads(path.read_text()) if path.is_file() else {"seconds": {}, "functions": {}}
            lines.seconds.update(found["seconds"])
            for place, tests in found["functions"].items():
                lines.functions.setdefault(place, {}).update(tests)
        return lines

    def add(self, entry: dict) -> None:
        """Keep a result."""
        self.results[entry["key"]] = entry
        with self.results_path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def known(self, mutant: Mutant, source: str, tests: list[str]) -> bool:
        """A result holds while the file is the same and, for a survivor, the tests to run are the same."""
        entry = self.results.get(mutant.key)
        if entry is None or entry["source"] != source:
            return False
        return entry["noticed"] or entry["tests"] == self.signature(tests)

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        return {str(p.relative_to(self.root)): digest(p) for p in (self.root / "tests").rglob("test_*.py")}

    def signature(self, tests: list[str]) -> str:
        """Of the files of these tests."""
        return " ".join(sorted({self._digests.get(test.split("::")[0], "")[:6] for test in tests}))


def tests_for(mutant: Mutant, lines: Lines, users: dict[str, set[str]], source: bytes) -> list[str]:
    """The tests that concern a mutant, in the order to run them.

    Inside a function: those that run the line, or else the function. In a table or class body: those that run a function
    in which one of the names it defines occurs, or name it themselves, or else anything of the file.
    """
    if mutant.file.endswith(".c"):
        found = lines.tests_of_file(f"rolecall/{_C_FILES[mutant.file.removeprefix('rolecall/')]}")
    elif mutant.names or not mutant.where:
        places = sorted({place for name in mutant.names for place in users.get(name, ())})
        found = [test for place in places for test in lines.functions.get(place, ())]
        found += [test for test in lines.seconds if any(name in _words(test.split("::")[0]) for name in mutant.names)]
    else:
        first, where = next((f, name) for f, last, name in spans(source) if f <= mutant.line <= last)
        found = lines.tests_at(f"{mutant.file}::{where}", mutant.line - first)
    if mutant.file.startswith("rolecall/rewards/") and (caller := _IN_WORKERS.get(mutant.file.split("/")[-1])):
        found += lines.tests_of_file(f"rolecall/rewards/{caller}")
    return _ordered(list(dict.fromkeys(found)) or lines.tests_of_file(mutant.file), lines.seconds)


@functools.cache
def _words(file: str) -> set[str]:
    """The names in a test file of this tree."""
    path = ROOT / file
    return set(re.findall(r"\w+", path.read_text())) if path.is_file() else set()


def _ordered(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """Quick ones first, those of one file together; then the rest by their time; all within the limit."""
    kept, total = [], 0.0
    for test in sorted(tests, key=lambda t: (seconds[t], t)):
        total += seconds[test]
        if total < _MOST_SECONDS or not kept:
            kept.append(test)
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in kept:
        if seconds[test] < _QUICK:
            by_file[test.split("::")[0]].append(test)
    groups = sorted(by_file.values(), key=lambda group: sum(seconds[t] for t in group))
    return [t for group in groups for t in group] + [t for t in kept if seconds[t] >= _QUICK]


def users_of_names(package: Path) -> dict[str, set[str]]:
    """Name -> the functions that it reaches, as `file::function`: in whose text it occurs, or a table made from it."""
    users: dict[str, set[str]] = defaultdict(set)
    made_from: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        source, file = path.read_bytes(), str(path.relative_to(package.parent))
        ranges = spans(source)
        for statement in ast.parse(source).body:
            made = statement.name if isinstance(statement, ast.ClassDef) else _target(statement)
            for node in ast.walk(statement):
                name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
                if name is None:
                    continue
                inside = {f"{file}::{where}" for first, last, where in ranges if first <= node.lineno <= last}
                users[name] |= inside
                if made and not inside and isinstance(node, ast.Name) and name != made:
                    made_from[name].add(made)
    for name in list(made_from):
        reached, todo = {name}, [name]
        while todo:
            todo += (new := made_from.get(todo.pop(), set()) - reached)
            reached |= new
        users[name] = set().union(*(users[other] for other in reached))
    return users


def _target(statement: ast.stmt) -> str | None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else None


# -- the processes of the pool ------------------------------------------------------------------------------------------

_slot: Slot


def _start(folder: Path, root: Path, names: Any) -> None:
    global _slot
    _slot = Slot(folder / f"slot{names.get()}", root)


def _record(test_file: Path) -> tuple[Path, dict]:
    return test_file, record(_slot, test_file)


def _try(task: tuple[Mutant, bytes, list[str], float]) -> tuple[Mutant, dict]:
    mutant, text, tests, limit = task
    outcome = _slot.run(tests, changed=(mutant.file, text), limit=limit)
    entry = {"verdict": outcome.verdict, "by": outcome.by, "seconds": round(outcome.seconds, 2)}
    return mutant, entry | {"noticed": outcome.verdict not in ("passed", "none")}


def drawn(args: argparse.Namespace, state: State) -> list[Mutant]:
    """The sample, room by room; C files last."""
    chosen = []
    for suffix, share in ((".py", args.share or _PYTHON_SHARE), (".c", args.share or _C_SHARE)):
        for path in files_of(args.rooms, state.package, suffix):
            file = str(path.relative_to(state.source))
            if args.only in file:
                chosen += sample(mutants_of(file, path.read_bytes()), share=share, seed=args.seed)
    return chosen


def run(args: argparse.Namespace, state: State) -> list[Mutant]:
    """Everything of the sample that is not known yet."""
    context = multiprocessing.get_context("fork")
    names = context.Queue()
    for number in range(args.children):
        names.put(number)
    with context.Pool(args.children, _start, (state.folder, state.root, names), maxtasksperchild=None) as pool:
        files = [path for path in state.test_files(args.tests) if not state.recorded(path).is_file()]
        (state.folder / "lines").mkdir(exist_ok=True)
        for number, (test_file, found) in enumerate(pool.imap_unordered(_record, files), 1):
            state.recorded(test_file).write_text(json.dumps(found))
            print(
                f"recorded {number} of {len(files)}: {test_file.name}, {len(found['seconds'])} tests, {found['verdict']}"
            )
        mutants, lines, users = drawn(args, state), state.lines(args.tests), users_of_names(state.package)
        tasks, sources = [], {}
        for mutant in mutants:
            source = (state.source / mutant.file).read_bytes()
            sources[mutant.file] = digest(state.source / mutant.file)
            tests = tests_for(mutant, lines, users, source)
            if not state.known(mutant, sources[mutant.file], tests):
                tasks.append((mutant, mutant.apply(source), tests, 20 + 3 * sum(lines.seconds[t] for t in tests)))
        chosen = {mutant.key: tests for mutant, _, tests, _ in tasks}
        for number, (mutant, entry) in enumerate(pool.imap_unordered(_try, tasks[: args.most]), 1):
            key = {"key": mutant.key, "source": sources[mutant.file]}
            state.add(key | entry | {"tests": state.signature(chosen[mutant.key]), "count": len(chosen[mutant.key])})
            print(f"{number}/{len(tasks)} {entry['verdict']:7} {entry['seconds']:5.1f} s  {mutant.key}", flush=True)
    return mutants


def explained(page: str) -> set[str]:
    """The mutants that a page names in a list, each on a line of its own."""
    return set(re.findall(r"^ *- `+ ?(rolecall/.*?) ?`+$", page, flags=re.M))


def report(mutants: list[Mutant], results: dict[str, dict], reasons: set[str]) -> int:
    """Print the score by room and the survivors without an explanation; how many of these there are."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    left = []
    for mutant in mutants:
        entry = results.get(mutant.key)
        noticed = entry is not None and entry["noticed"]
        what = (
            "not run" if entry is None else "noticed" if noticed else "explained" if mutant.key in reasons else "left"
        )
        for name in (mutant.file.split("/")[1] + " C" * mutant.file.endswith(".c"), "all"):
            rooms[name][what] += 1
        if what == "left":
            left.append(mutant)
    print(f"\n{'':14} noticed  explained  left  not run  noticed of those run")
    for room, n in rooms.items():
        share = f"{100 * n['noticed'] / max(n.total() - n['not run'], 1):.1f} %"
        print(f"{room:14} {n['noticed']:7} {n['explained']:10} {n['left']:5} {n['not run']:8}  {share}")
    times = [results[m.key]["seconds"] for m in mutants if m.key in results]
    print(f"{sum(times) / max(len(times), 1):.1f} s of processor time per mutant\n")
    for mutant in left:
        print(f"{mutant.file}:{mutant.line} ({results[mutant.key]['count']} tests)\n  {mutant.key}")
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--share", type=float, help=f"of each file's mutants (default {_PYTHON_SHARE}, C {_C_SHARE})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", type=int, default=2, help="runs at the same time")
    parser.add_argument("--most", type=int, help="mutants to run now")
    parser.add_argument("--tests", nargs="+", default=_TESTS, help="folders or files of tests to use, in tests/")
    parser.add_argument("--report", action="store_true", help="print what is known, run nothing")
    args = parser.parse_args()
    state = State(ROOT)
    if args.report:
        mutants = drawn(args, state)
    else:
        import_heavy()
        mutants = run(args, state)
    sys.exit(1 if report(mutants, state.results, explained((ROOT / "docs" / "numerics.md").read_text())) else 0)


if __name__ == "__main__":
    main()
