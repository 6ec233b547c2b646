"""Write docs/conformance.md anew below its head: what rolecall, TRL, verl and OpenRLHF pass, and where they differ.

    python benchmarks/conformance.py trl=ENV/bin/python verl=ENV/bin/python openrlhf=ENV/bin/python

Each library runs in an environment of its own, which needs rolecall, pytest and the library; rolecall runs in this one.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rolecall.conformance.interface import Interface
from rolecall.conformance.load import NAMES, SHIPPED, signature

PAGE = Path(__file__).parents[1] / "docs/conformance.md"
MARK = "<!-- below: written by benchmarks/conformance.py -->\n"
MARKS = {"passes": "passes", "differs": "**differs**", "not offered": "–"}


def main() -> None:
    places = dict(word.split("=", 1) for word in sys.argv[1:])
    unknown = places.keys() - set(SHIPPED)
    if unknown or not places:
        sys.exit(f"give name=path/to/python for some of {', '.join(SHIPPED[1:])}")
    reports = {"rolecall": run("rolecall", sys.executable)}
    for name in SHIPPED[1:]:
        if name in places:
            reports[name] = run(name, places[name])
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(head + MARK + "\n".join(lines(reports)) + "\n")


def run(name: str, python: str) -> dict[str, Any]:
    """What `rolecall conformance --json` says in an environment."""
    print(f"running {name}", file=sys.stderr)
    done = subprocess.run(
        [python, "-m", "rolecall", "conformance", "--adapter", name, "--json"], capture_output=True, text=True
    )
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{name}: {done.stderr}")
    report = json.loads(done.stdout)
    silent = [r["case"] for r in report["results"] if r["outcome"] == "differs" and not r["reason"]]
    if silent or report["idle_reasons"]:
        sys.exit(f"{name}: without a reason: {silent}; with a reason too many: {report['idle_reasons']}")
    return report


def lines(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    own = reports["rolecall"]["results"]
    others = {name: report for name, report in reports.items() if name != "rolecall"}
    versions = {key: value for report in reports.values() for key, value in report["versions"].items()}
    yield "\n## What each passes\n"
    yield f"{len(own)} cases, with " + ", ".join(f"{key} {value}" for key, value in versions.items()) + "."
    yield "Each entry: passes / differs / not offered.\n"
    yield from table("cases", reports, rows(reports))
    yield "\nNot offered means that the library has no function for it that can be called alone, or none of that choice."
    for name, report in others.items():
        yield f"\n## Where {name} {versions[name]} differs\n"
        yield from differences(report["results"])
    yield "\n## What was called\n"
    yield from table("", others, ([f"`{key}`", *(r["calls"].get(key, "–") for r in others.values())] for key in NAMES))
    yield "\n## Every case\n"
    yield from table("case, and what it asks", reports, every(own, reports))
    yield "\n## The functions\n"
    for name in NAMES:
        doc = " ".join((getattr(Interface, name).__doc__ or "").split())
        yield f"- `{name}{stated(name)}`: {doc}"


def stated(name: str) -> str:
    given = signature(name)
    return str(given.replace(parameters=[p.replace(annotation=p.empty) for p in given.parameters.values()]))


def table(corner: str, reports: dict[str, Any], body: Any) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(reports)} |"
    yield "|---" * (len(reports) + 1) + "|"
    for row in body:
        yield f"| {' | '.join(row)} |"


def rows(reports: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    sections = list(dict.fromkeys(r["section"] for r in reports["rolecall"]["results"]))
    for section in (*sections, None):
        entries = []
        for report in reports.values():
            outcomes = [r["outcome"] for r in report["results"] if section in (None, r["section"])]
            entries.append(" / ".join(str(outcomes.count(outcome)) for outcome in MARKS))
        yield [section or "**all**", *entries]


def differences(results: list[dict[str, Any]]) -> Iterator[str]:
    """A row per case; the variants of a case that differ for one reason share it."""
    yield "| case | expected, and what came | why |"
    yield "|---|---|---|"
    for (base, reason), same in groupby(
        (r for r in results if r["outcome"] == "differs"), lambda r: (r["case"].partition("[")[0], r["reason"])
    ):
        variants = list(same)
        names = [r["case"][len(base) :].strip("[]") for r in variants]
        which = f" ({', '.join(names)})" if names != [""] else ""
        yield f"| `{base}`{which} | {cell(variants[0]['said'])} | {cell(reason)} |"


def every(own: list[dict[str, Any]], reports: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """A row per case, with all its variants."""
    for base, same in groupby(own, lambda r: r["case"].partition("[")[0]):
        about = next(same)["about"]
        entries = []
        for report in reports.values():
            outcomes = [r["outcome"] for r in report["results"] if r["case"].partition("[")[0] == base]
            entries.append(", ".join(MARKS[outcome] for outcome in MARKS if outcome in outcomes))
        yield [f"`{base}`: {cell(about)}", *entries]


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
