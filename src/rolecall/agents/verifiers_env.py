"""Environments of the package verifiers, unchanged: `verifiers:ID`, with what its `load_environment` takes after a colon.

Such an environment plays an episode itself, by an OpenAI client. So it is run as a program is (`programs`), and calls the gateway.
Its dataset are the rows, and what its rubric says is the reward.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.config.agents import AgentOptions
from rolecall.tasks.env import EnvError
from rolecall.tasks.names import task_options
from rolecall.tasks.rows import ListRows
from rolecall.tasks.sources import Splits
from rolecall.workers.child import Answer
from rolecall.workers.load import load_object, split_name
from rolecall.workers.pool import WorkerPool
from rolecall.workers.walls import Walls

PREFIX = "verifiers:"
"""How the name of such an environment begins."""


class VerifiersProgram:
    """A loaded environment as a program: (base URL, key, row) -> what its rubric says."""

    def __init__(self, name: str) -> None:
        self._env = _loaded(name)

    def __call__(self, base_url: str, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        os.environ["OPENAI_API_KEY"] = key
        client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=base_url, max_retries=0)
        found = asyncio.run(self._env.run_rollout(dict(row), client, "policy", {}))
        if (error := found.get("error")) is not None:
            raise EnvError(error["error_chain_str"] if isinstance(error, Mapping) else str(error))
        shown = {name: found.get(name) for name in ("metrics", "stop_condition", "is_truncated")}
        return {"reward": found["reward"], **shown}


def verifiers_rows(name: str, options: AgentOptions, *, n: int, held_out: int) -> Splits:
    """Up to so many rows of its dataset, and of its dataset for evaluation if it has one."""
    walls = Walls(
        memory_mb=4096,
        network=options.network,
        variables=options.variables,
        options=("agent.network", "agent.variables"),
    )
    setup, what = {"name": name, "n": n, "held_out": held_out}, f"environment {name}"
    module = "rolecall.agents.verifiers_env"
    with WorkerPool(module, [setup], what=what, error=EnvError, deadline_s=options.deadline, walls=walls) as pool:
        train, test = pool.ready["train"], pool.ready["test"]
    return Splits(train=ListRows(train), test=None if test is None else ListRows(test))


def open_worker(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Answer]:
    """(the rows of an environment, nothing more to do)."""
    env = _loaded(setup["name"])
    own = env.build_eval_dataset() is not None
    return {
        "train": _plain(env.get_dataset(setup["n"])),
        "test": _plain(env.get_eval_dataset(setup["held_out"])) if own else None,
    }, lambda job, send: None


def _plain(dataset: Any) -> Sequence[Mapping[str, Any]]:
    """As it travels to the trainer."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(dataset.to_list(), default=str))
    return rows


def check_verifiers(name: str) -> tuple[str, dict[str, Any]]:
    """(module or file, what it is given), without importing it."""
    where, _, last = name.removeprefix(PREFIX).partition(":")
    if not where:
        raise EnvError(f"environment {name!r} names no environment: verifiers:ID, or verifiers:FILE.py")
    what = f"environment {name!r}"
    return split_name(f"{where}:load_environment", what=what, error=EnvError)[0], task_options(name, last)


def _loaded(name: str) -> Any:
    module, options = check_verifiers(name)
    try:
        import verifiers
    except ImportError as error:
        raise EnvError(
            f"environments named {PREFIX}… need the package verifiers: pip install 'rolecall[verifiers]'"
        ) from error
    if not hasattr(verifiers, "load_environment"):
        raise EnvError(f"{PREFIX}… needs verifiers 0.1, this is {verifiers.__version__}, which has no load_environment")
    import datasets  # which verifiers needs

    datasets.disable_progress_bars()
    if module.endswith(".py"):
        what = f"environment {name!r}"
        env = load_object(module, "load_environment", what=what, error=EnvError)(**options)
    else:
        try:
            env = verifiers.load_environment(module, **options)
        except (ValueError, RuntimeError) as error:  # with its own sentence
            raise EnvError(str(error)) from error
    groups: list[str] = getattr(env.rubric, "_get_group_reward_func_names", list)()
    if groups:
        raise EnvError(
            f"the rubric of {Path(module).name} compares the rollouts of a group ({groups[0]}), but each is scored where it "
            "was played: give that function as --reward"
        )
    return env
