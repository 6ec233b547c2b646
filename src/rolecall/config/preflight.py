"""Files and folders that options name, looked for before anything heavy is imported."""

import resource
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rolecall.config.given import GIVEN
from rolecall.errors import UserError

_MODELS = ("model", "against", "critic_from")
_ROWS = ("rows", "data")
_REWARDS = ("reward", "judge")
_RUNS = ("from_run", "run")
_ADDRESS_SPACE = 2 << 30
"""Runs of `tiny` end well from about 1.5 GiB on; threads take more on machines with more cores."""
_DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt")


def check_address_space() -> None:
    """Raise, in one sentence, if the process may not have the memory that torch needs to be loaded and used.

    Below it not every end can be a sentence: where a new thread gets no memory for its own variables the C library ends
    the process, and libraries that were refused memory crash as they are unloaded.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise UserError(
            f"a process has {limit / 2**30:.1f} GiB of address space here (ulimit -v) and needs {_ADDRESS_SPACE >> 30} GiB "
            "for the smallest model; raise the limit, or start in a shell without one"
        )


def check_paths(options: Any) -> None:
    """Raise, in one sentence, if an option names a file or folder that is not there. Names that may stand for something
    else (a task, a hub id, a module) are left to whoever opens them."""
    reads_addresses = getattr(options, "command", None) in ("rl", "rescore")
    for name, value in _named(options):
        if name in _MODELS and value.startswith(("http://", "https://")):
            _check_api(options, name, value)
        elif name in _MODELS:
            _check_model(name, value)
        elif name in _ROWS and (_is_path(value) or Path(_bare(value)).suffix in _DATA) and not _is_there(value):
            raise UserError(f"there is no file or folder {value}{_near(value)}")
        elif name in _REWARDS and ":" not in value and _is_path(value) and not _is_there(value):
            raise UserError(f"reward {value!r}: there is no such run{_near(value)}")
        elif name == "by" and value.rpartition(":")[0].endswith(".py"):
            _check_source("lessons.by", value)
        elif name in (*_REWARDS, "env"):
            _check_source("environment" if name == "env" else name, value)
        elif name in _RUNS and not _is_there(value) and not (reads_addresses and "://" in value):
            raise UserError(f"there is no run {value}; give the directory of a run, such as runs/rl-1{_near(value)}")
        elif name == "prompts_file" and not _is_there(value):
            raise UserError(f"prompts file {value!r} cannot be read: No such file or directory")


def _named(options: Any) -> Iterator[tuple[str, str]]:
    """Every option that is a text, or a list of them, by the last part of its name."""
    for f in fields(options):
        value = getattr(options, f.name)
        if is_dataclass(value):
            yield from _named(value)
        else:
            several = value if isinstance(value, tuple | list) else [value]
            yield from ((f.name, one) for one in several if isinstance(one, str) and one and not one.startswith(GIVEN))


def _check_api(options: Any, option: str, address: str) -> None:
    if not getattr(options, "behind_api", False) or option != "model":
        raise UserError(
            f"{option} {address!r} is an address: only `rolecall eval` and `generate` take a model behind one; to sample from servers of the "
            "model that trains, give engine.servers"
        )


def _check_model(option: str, name: str) -> None:
    if not _is_there(name) and (_is_path(name) or name.endswith(".gguf")):
        what = "reward model" if option == "critic_from" else "model"
        raise UserError(
            f"{what} {name!r}: no such directory; give a run, a model directory, a .gguf file, a hub id, or 'tiny'"
            f"{_near(name)}"
        )


def _check_source(what: str, name: str) -> None:
    """file.py:name, also with a kind before it."""
    where = name.rpartition(":")[0].removeprefix("trl:").removeprefix("agent:").removeprefix("verifiers:")
    if where.endswith(".py") and not _is_there(where):
        raise UserError(f"{what} {name!r}: there is no file {Path(where).expanduser().resolve()}")


def _is_path(name: str) -> bool:
    """Whether a name can only be a path. `owner/name` is a hub id, unless the first part is a folder here."""
    first = name.partition("/")[0]
    if name.startswith((".", "/", "~")) or _bare(name).count("/") > 1:
        return True
    return "/" in name and (first == "runs" or Path(first).is_dir())


def _bare(name: str) -> str:
    """Without a dataset's `:configuration` and `@split`."""
    return name.partition("@")[0].partition(":")[0]


def _is_there(name: str) -> bool:
    """Whether it is there; what cannot even be asked for is left to whoever opens it."""
    try:
        return "\0" in name or any(Path(one).expanduser().exists() for one in (name, _bare(name)) if one)
    except (OSError, RuntimeError):  # too long, no such user
        return True


def _near(name: str) -> str:
    """The neighbour that may be meant."""
    path = Path(name).expanduser()
    try:
        close = get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    except (OSError, RuntimeError, ValueError):
        return ""
    return f"; did you mean {path.parent / close[0]}?" if close else ""
