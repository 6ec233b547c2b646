"""`rolecall view`: a local page over the runs of a directory, by itself or beside a run."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from threading import Event, Thread

from rolecall.config.view import PORT
from rolecall.errors import UserError

_NEEDED = ("starlette", "uvicorn", "jinja2")


def check_view() -> None:
    """Refuse if the packages are missing."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise UserError("the view needs starlette, uvicorn and jinja2: pip install 'rolecall[view]'")


def view(directory: str | Path = "runs", *, port: int = PORT, ready: Callable[[str], None]) -> None:
    """Serve the runs of a directory, or one run, until SIGTERM or Ctrl-C; `ready` gets the address to open."""
    check_view()
    place = Path(directory).expanduser()
    if not place.exists():
        if place != Path("runs"):
            raise UserError(f"there is no directory {place}; give the one that holds your runs, such as runs")
    elif not place.is_dir():
        raise UserError(f"{place} is a file; give the directory that holds your runs, such as runs")
    elif not os.access(place, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UserError(f"{place} cannot be read: permission denied; give a directory that you may read")
    from rolecall.look.view.server import serve

    single = (place / "run.json").is_file()
    place = place.resolve()
    only = place.name if single else None
    serve(place.parent if single else place, only=only, port=port, or_any=False, ready=ready)


@contextmanager
def view_beside(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Show a run in a process of its own as long as this one works on it; `say` gets the address, or that there is none.

    Other runs are shown too if they lie in a directory called runs.
    """
    # A session of its own: Ctrl-C is for the run. Its input is never written to, and ends when this process does.
    words = [sys.executable, "-m", "rolecall.jobs.view", str(run.resolve())]
    pipe, away = subprocess.PIPE, subprocess.DEVNULL
    server = subprocess.Popen(words, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=away)
    over = Event()

    def tell() -> None:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if address:
            say(f"view: {address}")
        elif not over.is_set():
            say(f"the view did not start; rolecall view {run.parent} says why")

    speaker = Thread(target=tell, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        server.terminate()
        server.wait()
        speaker.join()
        for end in (server.stdin, server.stdout):
            assert end is not None
            end.close()
        say(f"the view ended with the run; see it again with: rolecall view {quote(str(run.parent))}")


def _serve_beside(run: Path) -> None:
    """What the process does: the page, politely, until the run's process is gone."""
    from rolecall.look.view.server import serve

    os.nice(10)
    Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    only = None if run.parent.name == "runs" else run.name
    serve(run.parent, only=only, first=run.name, port=PORT, or_any=True, ready=_print)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve_beside(Path(sys.argv[1]))
