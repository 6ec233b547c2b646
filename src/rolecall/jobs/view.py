"""`rolecall view`: a local page over the runs of a directory."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rolecall.errors import UserError

_NEEDED = ("starlette", "uvicorn", "jinja2")


def check_view() -> None:
    """Refuse if the packages are missing."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise UserError("the view needs starlette, uvicorn and jinja2: pip install 'rolecall[view]'")


def view(directory: str | Path = "runs", *, port: int, or_any: bool = False, ready: Callable[[str], None]) -> None:
    """Serve the runs of a directory, or one run, until SIGTERM or Ctrl-C; `ready` gets the address to open.

    `or_any` takes any port if that one is taken.
    """
    check_view()
    place = Path(directory).expanduser()
    if not place.exists():
        if place != Path("runs"):
            raise UserError(f"there is no directory {place}; give the one that holds your runs, such as runs")
    elif not place.is_dir():
        raise UserError(f"{place} is a file; give the directory that holds your runs, such as runs")
    elif not os.access(place, os.R_OK | os.X_OK):
        raise UserError(f"{place} cannot be read: permission denied; give a directory that you may read")
    from rolecall.look.view.server import serve

    single = (place / "run.json").is_file()
    place = place.resolve()
    serve(place.parent if single else place, only=place.name if single else None, port=port, or_any=or_any, ready=ready)
