"""Environments by name."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from rolecall.marl.envs.adapters import GymEnv, ParallelEnv, foraging_env
from rolecall.marl.envs.base import Env, EnvError, Envs, LocalEnvs
from rolecall.marl.envs.foraging import ForagingEnvs
from rolecall.marl.envs.matrix import CLIMBING, MatrixGames, penalty
from rolecall.workers.load import load_object, split_name

KINDS = ("climbing", "penalty", "lbf", "lbforaging", "mpe", "pettingzoo", "gym")
"""What stands before the colon."""

FORMS = (
    "climbing, penalty:-100, lbf:8x8-2p-2f-coop, lbforaging:8x8-2p-2f-coop, mpe:simple_speaker_listener_v4, "
    "pettingzoo:MODULE, gym:ID, or file.py:function"
)

_FORAGING = re.compile(
    r"(?P<size>\d+)x(?P<size2>\d+)|(?P<p>\d+)p|(?P<f>\d+)f|(?P<s>\d+)s|(?P<word>coop|pen|v3|Foraging)"
)


def open_local(name: str, count: int, *, limit: int | None = None) -> Envs:
    """`count` environments in this process."""
    kind, _, rest = name.partition(":")
    if kind == "climbing":
        return MatrixGames(CLIMBING, name=name, count=count, limit=limit or 25)
    if kind == "penalty":
        return MatrixGames(penalty(_number(name, rest or "-100")), name=name, count=count, limit=limit or 25)
    if kind == "lbf":
        board = _board(name, rest)
        return ForagingEnvs(name=name, count=count, limit=limit or 50, **board)
    return LocalEnvs(_maker(name, limit), count)


def _maker(name: str, limit: int | None) -> Callable[[], Env]:
    """What makes one environment of another package, or of the user."""
    kind, _, rest = name.partition(":")
    if kind == "lbforaging":
        _need(name, "lbforaging")
        id_ = rest if rest.startswith("Foraging") else _foraging_id(**_board(name, rest))
        return lambda: _made(name, lambda: foraging_env(id_, name=name, limit=limit))
    if kind == "mpe":
        _need(name, "mpe2")
        return lambda: ParallelEnv(_mpe(name, rest).parallel_env(), name=name, limit=limit)
    if kind == "pettingzoo":
        _need(name, "pettingzoo")
        return lambda: ParallelEnv(_module(name, rest).parallel_env(), name=name, limit=limit)
    if kind == "gym":
        _need(name, "gymnasium")
        import gymnasium

        # Gymnasium's checker objects to a reward for each agent.
        return lambda: _made(
            name, lambda: GymEnv(gymnasium.make(rest, disable_env_checker=True), name=name, limit=limit)
        )
    if rest and kind not in KINDS and (kind.endswith(".py") or _importable(kind)):
        _need(name, "gymnasium")
        function = _function(name)
        return lambda: _adapted(function(), name, limit)
    near = get_close_matches(kind, KINDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {FORMS}"
    raise EnvError(f"there is no environment {name!r}; {hint}")


def _adapted(env: Any, name: str, limit: int | None) -> Env:
    if hasattr(env, "possible_agents"):
        return ParallelEnv(env, name=name, limit=limit)
    if hasattr(env, "action_space") and hasattr(env, "reset"):
        return GymEnv(env, name=name, limit=limit)
    raise EnvError(f"{name} gave a {type(env).__name__}; it must give a PettingZoo parallel or a Gymnasium environment")


def _need(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise EnvError(f"{name} needs {package}, which is not installed: pip install 'rolecall[marl]'")


def _made(name: str, make: Callable[[], Env]) -> Env:
    """An environment from Gymnasium's registry, or its error in a sentence."""
    import gymnasium

    try:
        return make()
    except gymnasium.error.UnregisteredEnv as error:
        known = [*gymnasium.registry]
        near = get_close_matches(name.partition(":")[2], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "gymnasium.registry lists those there are"
        raise EnvError(f"there is no environment {name!r}; {hint}") from error
    except gymnasium.error.Error as error:
        raise EnvError(f"the environment {name!r} cannot be made: {error}") from error


def _board(name: str, text: str) -> dict[str, Any]:
    """8x8-2p-2f-2s-coop, its parts in any order."""
    found: dict[str, Any] = {"coop": False, "penalty": 0.0}
    for part in text.split("-"):
        match = _FORAGING.fullmatch(part)
        if match is None:
            raise EnvError(
                f"{name!r} is not a foraging board: {part!r} is not a part of one, as in lbf:8x8-2p-2f-2s-coop"
            )
        if match["size"]:
            if match["size"] != match["size2"]:
                raise EnvError(f"{name!r}: boards are square, as in 8x8")
            found["size"] = int(match["size"])
        for key, field in (("p", "players"), ("f", "food"), ("s", "sight")):
            if match[key]:
                found[field] = int(match[key])
        found["coop"] |= match["word"] == "coop"
        found["penalty"] = 0.1 if match["word"] == "pen" else found["penalty"]
    missing = [what for what in ("size", "players", "food") if what not in found]
    if missing:
        raise EnvError(f"{name!r} does not say its {missing[0]}, as in lbf:8x8-2p-2f-coop")
    if found["size"] < 5 or not 1 <= found["players"] <= 20 or not 1 <= found["food"] <= 20:
        raise EnvError(f"{name!r}: a board has at least 5x5 cells, and 1 to 20 players and pieces of food")
    found.setdefault("sight", found["size"])
    return found


def _foraging_id(*, size: int, players: int, food: int, sight: int, coop: bool, penalty: float) -> str:
    seen = "" if sight >= size else f"-{sight}s"
    return f"Foraging{seen}-{size}x{size}-{players}p-{food}f{'-coop' if coop else ''}{'-pen' if penalty else ''}-v3"


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise EnvError(f"{name!r}: the penalty is a number, as in penalty:-100") from None


def _mpe(name: str, rest: str) -> Any:
    import pkgutil

    import mpe2

    known = sorted(module.name for module in pkgutil.iter_modules(mpe2.__path__) if re.search(r"_v\d+$", module.name))
    words = {re.sub(r"^simple_|_v\d+$", "", module).replace("_", "-"): module for module in known}
    wanted = words.get(rest.replace("_", "-"), rest)
    if wanted not in known:
        near = get_close_matches(rest.replace("_", "-"), [*words], n=1) or get_close_matches(rest, known, n=1)
        hint = f"did you mean 'mpe:{near[0]}'?" if near else f"there are {', '.join(words)}"
        raise EnvError(f"there is no environment {name!r}; {hint}")
    return importlib.import_module(f"mpe2.{wanted}")


def _module(name: str, rest: str) -> Any:
    path = rest if rest.startswith("pettingzoo.") else f"pettingzoo.{rest}"
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise EnvError(f"the environment {name!r} cannot be imported: {error}") from error
    if not hasattr(module, "parallel_env"):
        raise EnvError(
            f"{path} has no parallel_env: agents that take turns are not supported; see pettingzoo.butterfly"
        )
    return module


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _function(name: str) -> Callable[[], Any]:
    """The user's own: file.py:function or module:function."""
    what = f"environment {name!r}"
    found = load_object(*split_name(name, what=what, error=EnvError), what=what, error=EnvError)
    if not callable(found):
        raise EnvError(f"{what} is a {type(found).__name__}, not a function that makes an environment")
    return found
