"""Where a benchmark's figures stand in the documentation: between two marks with its name."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def put(page: str, name: str, text: str) -> None:
    """Replace what stands between the marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = (DOCS / page).read_text().split(begin)
    (DOCS / page).write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
