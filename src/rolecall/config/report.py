"""The options of `rolecall report`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """A page to look at a run: what ran, before and after, curves, and some answers token by token."""

    run: str = field(metadata={"bare": True})
    """The directory of a run or of a demo; one that still goes on is shown as far as it is."""
    out: str | None = None
    """The file to write; report.html in the run's directory if not given."""
    png: bool = False
    """Also write each curve as a picture into `curves/` beside the page (needs `rolecall[plot]`)."""
