"""`rolecall conformance` on the terminal."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from textwrap import indent

from rolecall.config.conformance import ConformanceOptions
from rolecall.conformance.run import DIFFERS, NOT_OFFERED, OUTCOMES, Report, run_cases


def run(options: ConformanceOptions) -> int:
    """Print how the adapter did; 1 if something differs."""
    with redirect_stdout(sys.stderr):  # libraries print while they are imported
        report = run_cases(options.adapter)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        _show(report)
    return 1 if report.count(DIFFERS) else 0


def _show(report: Report) -> None:
    print(", ".join(f"{name} {version}" for name, version in report.versions.items()), end="\n\n")
    sections = list(dict.fromkeys(result.section for result in report.results))
    print(f"{'':12}", *(f"{outcome:>11}" for outcome in OUTCOMES))
    for section in (*sections, None):
        counts = (f"{report.count(outcome, section):11}" for outcome in OUTCOMES)
        print(f"{section or 'all':12}", *counts)
    for result in report.results:
        if result.outcome == DIFFERS:
            lines = [result.about, result.said, *([result.reason] if result.reason else [])]
            print(f"\n{result.section}: {result.case} differs", indent("\n".join(lines), "  "), sep="\n")
    if report.not_offered:
        print(f"\n{NOT_OFFERED} at all: {', '.join(report.not_offered)}")
    if report.idle_reasons:
        print(f"\nREASONS that are not needed, since nothing differs: {', '.join(report.idle_reasons)}")
