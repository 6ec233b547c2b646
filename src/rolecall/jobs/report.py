"""`rolecall report`: a page to look at a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rolecall.errors import UserError
from rolecall.files import DiskError, write_atomically
from rolecall.look.compare_page import compare_html, compared_curves, read_runs
from rolecall.look.report import curves_of, report_html
from rolecall.train.exit_codes import ExitCode

_log = logging.getLogger("rolecall")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was written."""

    path: Path
    """The page."""
    pictures: Sequence[Path] = ()
    """The curves, if they were asked for."""


def report(run: str | Path, *others: str | Path, out: str | Path | None = None, png: bool = False) -> Report:
    """Write the page of a run: `report("runs/rl-1").path`. With `png`, also its curves as pictures.

    Several runs are compared on one page, which needs `out`.
    """
    place = Path(run).expanduser()
    if others and out is None:
        raise UserError("a comparison belongs to no run: say which file to write, such as --out compare.html")
    compared = read_runs([place, *(Path(other).expanduser() for other in others)]) if others else None
    page = (report_html(place) if compared is None else compare_html(compared)).encode()
    target = place / "report.html" if out is None else Path(out).expanduser()
    if not target.parent.is_dir():
        raise UserError(f"there is no directory {target.parent} to write the report into; make it first")
    if target.is_dir():
        raise UserError(f"{target} is a directory; say which file to write, such as {target / 'report.html'}")
    pictures: list[Path] = []
    if png:
        from rolecall.look.png import write_png

        try:
            curves = curves_of(place) if compared is None else {"": compared_curves(compared)}
            for name, charts in curves.items():
                pictures += write_png(charts, target.parent / "curves" / name)
        except OSError as error:
            raise UserError(f"the curves could not be written: {error}", exit_code=ExitCode.DISK) from error
    try:
        write_atomically(target, page)
    except DiskError as error:
        raise UserError(str(error), exit_code=ExitCode.DISK) from error
    return Report(path=target, pictures=tuple(pictures))


def report_at_the_end(run: Path) -> None:
    """The page of a run that has just ended. Whatever goes wrong with it is a warning: the run itself is whole."""
    try:
        report(run)
    except Exception as error:
        _log.warning("the report of %s was not written: %s; `rolecall report %s` tries again", run, error, run)
