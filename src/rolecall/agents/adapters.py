"""Environments of other kinds as `Env`: TRL's `environment_factory` classes, tasks of one answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolecall.agents.replies import BadReply
from rolecall.heavy import import_heavy
from rolecall.tasks.builtin import Task
from rolecall.tasks.env import EnvError, Message, Said, Step
from rolecall.tasks.tools import awaited, call_tools


class OneTurn:
    """A task whose rows are answered once: the answer is scored and the episode is over."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        self._row = row
        return row["prompt"]

    def step(self, message: Message) -> Step:
        return Step(reward=self._task.score(message["content"], self._row), done=True)


class ToolsEnv:
    """Functions that the policy may call, as TRL's `tools`, async ones too: the first message without a call ends the episode.

    The row's prompt begins it. What it is worth is for reward functions to say, which see the whole conversation.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self._tools = dict(tools)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What a chat template says of the tools: from type hints and Google-style docstrings, as TRL does."""
        utils = import_heavy("transformers.utils")
        return [utils.get_json_schema(tool) for tool in self._tools.values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        prompt = row.get("prompt", "")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

    def step(self, message: Message) -> Step:
        called = call_tools(message["content"], self._tools, short=tuple(self._tools))
        return called or Step(reward=self.final_reward(), done=True)

    def final_reward(self) -> float | None:
        """What an episode is worth when it ends or a limit cuts it off: nothing of its own."""
        return None


class TRLEnv(ToolsEnv):
    """A class as TRL's `environment_factory` takes it, unchanged.

    It is made without arguments. `reset(**row)` may return a text, which is put after the last message of the row's
    prompt. Every other public method is a tool, beside those given. The first message without a call ends the episode; its
    reward is that of `get_reward()`, or the attribute `reward`, if there is either. All methods may be async.
    """

    def __init__(self, factory: Callable[[], Any], tools: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._env = factory()
        if not hasattr(self._env, "reset"):
            raise EnvError(f"{type(self._env).__name__} has no `reset`, which an environment needs")
        names = [name for name, _ in inspect.getmembers(type(self._env), inspect.isroutine)]  # no property is asked for
        public = [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]
        super().__init__({**(tools or {}), **{name: getattr(self._env, name) for name in public}})

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        told = awaited(self._env.reset(**row))
        messages = [dict(message) for message in super().reset(row, seed)]
        if told is not None:
            if not isinstance(told, str):
                raise BadReply(f"{type(self._env).__name__}.reset returned a {type(told).__name__}, not a text or None")
            messages[-1]["content"] = f"{messages[-1]['content']}{told}"
        return messages

    def final_reward(self) -> float | None:
        """What the environment says the episode is worth."""
        if hasattr(self._env, "get_reward"):
            return awaited(self._env.get_reward())
        return getattr(self._env, "reward", None)

    def view(self) -> Mapping[str, Any]:
        """The attributes that reward functions see."""
        return vars(self._env)


def named_in(row: Mapping[str, Any], by_name: Mapping[str, Any]) -> Any:
    """What is kept for the environment that a row names."""
    name: Any = row.get("environment")
    if name in by_name:
        return by_name[name]
    known = ", ".join(by_name)
    raise EnvError(f"a row's `environment` is {name!r}, and there are {known}: name one of them in every row")


class SeveralEnvs:
    """Environments by name, as TRL's `environment_factory` takes a dictionary: a row's `environment` says which one it plays.

    Each is of TRL's kind, or has `reset` and `step` as ours have. `environment` is not handed to it.
    """

    def __init__(
        self, factories: Mapping[str, Callable[[], Any]], tools: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self._factories, self._given = factories, tools

    @property
    def tools(self) -> dict[str, list[dict[str, Any]]]:
        """What a chat template says of the tools of each environment; finding out makes one of each."""
        return {name: list(getattr(self._made(made), "tools", ())) for name, made in self._factories.items()}

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        self._env = self._made(named_in(row, self._factories))
        told: Said = self._env.reset({name: value for name, value in row.items() if name != "environment"}, seed)
        return told

    def step(self, message: Message) -> Step:
        found: Step = self._env.step(message)
        return found

    def final_reward(self) -> float | None:
        """What the one that is played says, if it says anything."""
        return self._env.final_reward() if hasattr(self._env, "final_reward") else None

    def view(self) -> Mapping[str, Any]:
        """The attributes that reward functions see."""
        held = getattr(self._env, "view", None)
        return held() if callable(held) else vars(self._env)

    def _made(self, factory: Callable[[], Any]) -> Any:
        made = factory()
        return made if hasattr(made, "step") else TRLEnv(lambda: made, self._given)
