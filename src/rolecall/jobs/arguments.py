"""Arguments of the Python functions under the names that TRL's trainers have for them."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from rolecall.agents.adapters import ToolsEnv
from rolecall.errors import UserError
from rolecall.rewards.sources import name_of

ARGUMENTS = {
    "train_dataset": "rows",
    "eval_dataset": "eval_data",
    "reward_funcs": "reward",
    "environment_factory": "env",
    "processing_class": "tokenizer",
}
"""What may be an object, and so is an argument of ours rather than a setting."""

P = ParamSpec("P")
T = TypeVar("T")


def trl_arguments(job: Callable[P, T]) -> Callable[P, T]:
    """The job, which also takes TRL's names of its arguments, and `tools`."""

    @wraps(job)
    def call(*args: P.args, **given: P.kwargs) -> T:
        settings: dict[str, Any] = dict(given)
        for name, ours in ARGUMENTS.items():
            if name in settings:
                value = settings.pop(name)
                if ours in settings:
                    raise UserError(f"`{name}` is `{ours}` under another name; keep one")
                settings[ours] = value
        if isinstance(settings.get("env"), Mapping):
            raise UserError(
                "a run has one environment: give a class; rows that tell what to play are handed to its `reset`"
            )
        if settings.get("tools"):
            settings = _with_tools(settings)
        return job(*args, **settings)

    return call


def _with_tools(settings: dict[str, Any]) -> dict[str, Any]:
    """Functions that the policy may call are an environment."""
    tools = settings.pop("tools")
    if settings.get("env") is not None:
        raise UserError("`tools` make an environment of their own, and there is `env`: make them methods of its class")
    functions = list(tools) if isinstance(tools, list | tuple) else [tools]
    for function in functions:
        if not callable(function) or isinstance(function, type):
            raise UserError(f"tools are functions, as in tools=[add], got {function!r:.60}")
    if settings.get("reward") is None:
        raise UserError("`tools` say nothing of what an episode is worth: give a `reward` function, too")
    named = {name_of(function): function for function in functions}
    env: Any = partial(ToolsEnv, named)
    env.__name__ = f"tools {', '.join(named)}"  # what config.json says
    return {**settings, "env": env}
