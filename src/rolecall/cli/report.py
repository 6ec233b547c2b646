"""`rolecall report` on the terminal."""

from rolecall.config.report import ReportOptions
from rolecall.jobs.report import run as write_report


def run(options: ReportOptions) -> None:
    """Write the page and say where it lies."""
    made = write_report(options)
    print(f"report: {made.path} ({made.path.stat().st_size / 1e3:,.0f} kB)")
    if made.pictures:
        print(f"curves: {len(made.pictures)} pictures in {made.path.parent / 'curves'}")
