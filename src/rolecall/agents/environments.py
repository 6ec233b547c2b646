"""Environments by name.

calculator · guessing · kuhn              built in, with options as tasks have them: guessing:high=31,tries=5
addition · rg:chain_sum …                 a task of one answer, as an environment of one turn
envs.py:MyEnv · package.module:MyEnv      yours: a class with `reset` and `step`, or one of TRL's kind
gym:FrozenLake-v1:is_slippery=false       Gymnasium's, with what `make` takes; gym:package:ID imports the package first
textworld:rooms=3,quest=2                 games that TextWorld makes, one for each seed
tools:python,search=FOLDER                tools that come with the library
mcp:python server.py · mcp:http://…       the tools of an MCP server
openenv:http://127.0.0.1:8000             behind an OpenEnv server
pettingzoo:classic/tictactoe-v3           PettingZoo's games of turns, with what `make` takes
trl:envs.py:MyEnv                         TRL's `environment_factory` kind, where the class has a tool `step`

Programs that play by themselves are not opened here: agent:… (`programs`) and verifiers:… (`verifiers_env`).
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from rolecall.agents.adapters import OneTurn, TRLEnv
from rolecall.agents.gym_text import GymTextEnv
from rolecall.agents.mcp_tools import MCPEnv, check_server
from rolecall.agents.openenv_env import OpenEnv, check_openenv
from rolecall.agents.pettingzoo_text import PettingZooText
from rolecall.agents.textworld_env import TextWorldEnv, textworld_options
from rolecall.agents.toolbox import Toolbox
from rolecall.tasks.agent_tasks import AGENT_TASKS
from rolecall.tasks.builtin import BUILT_IN
from rolecall.tasks.env import EnvError
from rolecall.tasks.names import find_task, is_task, task_options
from rolecall.workers.load import load_object, split_name

Factory = Callable[[], Any]
"""Makes a fresh environment, for one episode."""


def open_env(name: str) -> Factory:
    """What makes the environments of that name. User code is imported here: call it where it may run."""
    kind, _, rest = name.partition(":")
    if is_task(name):
        task = find_task(name)
        return task.env if hasattr(task, "env") else partial(OneTurn, task)
    if kind == "textworld":
        return partial(TextWorldEnv, **textworld_options(name, task_options(name, rest)))
    if kind == "tools":
        named = {word: value for word, _, value in (part.partition("=") for part in rest.split(",")) if word}
        return partial(Toolbox, named)
    if kind == "mcp":
        return partial(MCPEnv, rest)
    if kind == "openenv":
        return partial(OpenEnv, rest)
    if kind == "pettingzoo":
        made, _, last = rest.partition(":")
        return partial(PettingZooText, made, **task_options(name, last))
    if kind == "gym":
        made, _, last = rest.rpartition(":")
        if (
            "=" not in last
        ):  # a module that registers the environment may stand before its id: gym:rware:rware-tiny-2ag-v2
            made, last = rest, ""
        return partial(GymTextEnv, made, **task_options(name, last))
    forced = kind == "trl"
    own = rest if forced else name
    found = load_object(*_parted(own), what=f"environment {own!r}", error=EnvError)
    return as_factory(found, trl=forced, name=name)


def as_factory(found: Any, *, trl: bool = False, name: str = "") -> Factory:
    """What makes environments of a class or function given in Python."""
    name = name or getattr(found, "__name__", repr(found))
    if not callable(found):
        raise EnvError(
            f"environment {name}: a {type(found).__name__} is not a class or function that makes environments"
        )
    if trl or (isinstance(found, type) and not hasattr(found, "step")):
        return partial(TRLEnv, found)
    return found


def check_name(name: str) -> None:
    """Refuse a name that stands for nothing, without importing user code."""
    kind, _, rest = name.partition(":")
    if is_task(name):
        find_task(name)
    elif kind in ("gym", "textworld", "tools", "pettingzoo"):
        open_env(name)()
    elif kind == "mcp":
        check_server(rest)
    elif kind == "openenv":
        check_openenv(rest)
    else:
        _parted(rest if kind == "trl" else name)


def _parted(name: str) -> tuple[str, str]:
    if ":" not in name.strip(":"):
        known = [*AGENT_TASKS, *BUILT_IN]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)};"
        raise EnvError(f"there is no environment {name!r}; {hint} name your own file.py:Class, Gymnasium's gym:ID")
    return split_name(name, what=f"environment {name!r}", error=EnvError)
