"""Objects by name: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rolecall.errors import UserError

MakeError = Callable[[str], UserError]


def split_name(name: str, *, what: str, error: MakeError) -> tuple[str, str]:
    """(module, or absolute path of a file that is there; name in it). Imports nothing. `what` begins each sentence."""
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise error(f"{what} is not of the form 'file.py:name' or 'module:name'")
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        if not path.is_file():
            raise error(f"{what}: there is no file {path}")
        return str(path), attribute
    return module, attribute


def load_object(module: str, attribute: str, *, what: str, error: MakeError) -> Any:
    """Import it here, dotted names too. Every way this can fail is one sentence that begins with `what`."""
    try:
        found: Any = _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except BaseException as failure:  # a module may raise anything, SystemExit too
        raise error(f"{what} cannot be loaded: {type(failure).__name__}: {failure}") from failure
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise error(f"{what}: {Path(module).name} has no `{part}`{hint}")
        found = getattr(found, part)
    return found


def pickle_callable(given: Callable[..., Any], *, what: str, advice: str, error: MakeError) -> bytes:
    """A callable as it travels to a worker. `what` begins the sentence of one that cannot, `advice` ends it.

    What an importable module defines travels by name; a function of a script, a notebook or another function by value.
    """
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(given)
    except Exception as failure:
        why = f"{type(failure).__name__}: {failure}"
        raise error(f"{what} cannot be sent to a worker process ({why}); move it into a file and {advice}") from failure
    return packed


def _import_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
