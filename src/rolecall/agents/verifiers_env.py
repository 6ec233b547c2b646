"""Environments of the package verifiers, unchanged: `verifiers:ID`, with what its `load_environment` takes after a colon.

Such an environment plays an episode itself, by an OpenAI client. So it is run as a program is (`programs`), and calls the gateway.
Its dataset are the rows, and what its rubric says is the reward.
"""

import asyncio
import json
import os
import pickle
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    """A loaded environment as a program: (base URL, key, row) -> what its rubric says.

    A rubric with functions that compare the rollouts of a group says nothing of one alone: then a rollout's state is returned as
    it is, and `score` is given those of a group.
    """

    def __init__(self, name: str) -> None:
        self._env = _loaded(name)
        rubric = self._env.rubric
        self.grouped = any(map(rubric._is_group_func, rubric._get_reward_funcs()))
        """Whether rollouts are scored by groups."""
        self._state: Mapping[str, Any] = {}
        if self.grouped:
            self._env.set_score_rollouts(False)
            unscored = rubric.dummy_score_rollout

            async def keep(state: Any) -> None:
                self._state = state
                await unscored(state)

            rubric.dummy_score_rollout = keep

    def __call__(self, base_url: str, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        os.environ["OPENAI_API_KEY"] = key
        client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=base_url, max_retries=0)
        found = asyncio.run(self._env.run_rollout(dict(row), client, "policy", {}))
        if (error := found.get("error")) is not None:
            raise EnvError(error["error_chain_str"] if isinstance(error, Mapping) else str(error))
        if self.grouped:
            return {"state": _packed(self._state)}
        return {"reward": found["reward"], **_shown(found)}

    def score(self, states: Sequence[str]) -> list[dict[str, Any]]:
        """What the rubric says of a group's rollouts."""
        from verifiers.types import State

        group = [State(pickle.loads(b64decode(state))) for state in states]
        asyncio.run(self._env.rubric.score_group(group))
        return [{"reward": float(state["reward"]), **_shown(state)} for state in group]


def _shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """What reward functions see of a rollout."""
    return {name: state.get(name) for name in ("metrics", "stop_condition", "is_truncated")}


def _packed(state: Mapping[str, Any]) -> str:
    """A state as text, without what cannot leave its process (a client, a lock)."""
    kept = {}
    for name, value in state.items():
        with suppress(Exception):  # whatever an object raises that does not let itself be pickled
            pickle.dumps(value)
            kept[name] = value
    return b64encode(pickle.dumps(kept)).decode()


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
        raise EnvError(
            f"{PREFIX}… needs verifiers 0.1.10 to 0.3, this is {verifiers.__version__}, which has no load_environment: "
            "pip install 'rolecall[verifiers]'"
        )
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
    return env
