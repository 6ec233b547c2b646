"""Tools that come with the library, by name: `tools:python`, `tools:search=docs`, `tools:python,search=docs`.

They run where environments do, in a worker with walls: no network, limited memory, nothing of the trainer's in reach. What an
episode is worth is for reward functions to say.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rolecall.agents.adapters import ToolsEnv
from rolecall.agents.bm25 import ranked, words_of
from rolecall.tasks.env import EnvError

_SECONDS = 10.0
_SHOWN = 2000
"""Characters of an answer that the policy reads."""
_LARGEST = 2 << 20
"""Bytes of a file that is searched, or that a program writes."""
_PASSAGE = 600


class Toolbox(ToolsEnv):
    """The named tools: the first message without a call ends the episode."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(toolbox(options))

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Written out, so that a worker need not import transformers for it."""
        return [_schema(name, *_ABOUT[name]) for name in self._tools]


_ABOUT = {
    "python": ("Run a Python program and return what it prints.", "code", "the program"),
    "search": ("Look for passages in the given texts.", "query", "words to look for"),
}
"""What each does, its argument, and what that is."""


def _schema(name: str, about: str, argument: str, meaning: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def toolbox(options: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The tools that are named, each with what it is given: `python` nothing, `search` a folder."""
    found: dict[str, Callable[..., Any]] = {}
    for name, given in options.items():
        if name == "python":
            if given != "":
                raise EnvError(f"tools:python takes no value, got {given!r}")
            found[name] = python
        elif name == "search":
            if not given or not Path(str(given)).expanduser().is_dir():
                raise EnvError(f"tools:search={given} needs a folder of texts, and there is none of that name")
            found[name] = _search_in(str(Path(str(given)).expanduser().resolve()))
        else:
            raise EnvError(f"there is no tool {name!r} here: there are python and search=FOLDER")
    if not found:
        raise EnvError("name a tool: tools:python, tools:search=FOLDER, or both with a comma between")
    return found


def python(code: str) -> str:
    """What a program prints; a `ValueError` with the last line if it fails."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as printed:
        run = subprocess.Popen(
            [sys.executable, "-Iu", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=place,
            start_new_session=True,
            preexec_fn=_limit_files,
            env={"PATH": os.environ.get("PATH", ""), "HOME": place, "TMPDIR": place, "OMP_NUM_THREADS": "1"},
        )
        try:
            run.wait(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"no end within {_SECONDS:g} s; it was stopped") from error
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)  # with all that it started
            run.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        text = printed.read(_SHOWN).decode(errors="backslashreplace").strip()
        if run.returncode:
            printed.seek(max(0, size - _SHOWN))
            lines = printed.read().decode(errors="backslashreplace").strip().splitlines()
            raise ValueError(lines[-1][:300] if lines else f"exit code {run.returncode}")
    return f"{text} … ({size - _SHOWN} bytes more)" if size > _SHOWN else text or "(nothing was printed)"


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST, _LARGEST))


def _search_in(folder: str) -> Callable[[str], str]:
    def search(query: str) -> str:
        passages = _passages(folder)
        found = ranked(query, [words for _, _, words in passages])[:3]
        if not found:
            return "nothing was found"
        return "\n\n".join(f"[{passages[i][0]}] {passages[i][1]}" for i in found)

    return search


@cache
def _passages(folder: str) -> list[tuple[str, str, Counter[str]]]:
    """(file, passage, its words) of all texts, in the order of their names."""
    found = []
    for path in sorted(Path(folder).rglob("*")):
        if not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        text = path.read_bytes()
        if b"\0" in text:
            continue
        for passage in _cut(text.decode(errors="replace")):
            found.append((str(path.relative_to(folder)), passage, Counter(words_of(passage))))
    return found


def _cut(text: str) -> list[str]:
    """Paragraphs, short ones together."""
    passages = [""]
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        for start in range(0, len(paragraph), _PASSAGE):
            piece = paragraph[start : start + _PASSAGE].strip()
            if passages[-1] and len(passages[-1]) + len(piece) > _PASSAGE:
                passages.append("")
            passages[-1] = f"{passages[-1]}\n{piece}".strip()
    return [passage for passage in passages if passage]
