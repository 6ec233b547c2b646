"""Environments of other kinds as `Env`: TRL's `environment_factory` classes, tasks of one answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolecall.tasks.builtin import Task
from rolecall.tasks.env import BadReply, EnvError, Message, Said, Step
from rolecall.tasks.tools import answer_call, find_calls


class OneTurn:
    """A task whose rows are answered once: the answer is scored and the episode is over."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        self._row = row
        return row["prompt"]

    def step(self, message: Message) -> Step:
        return Step(reward=self._task.score(message["content"], self._row), done=True)


class TRLEnv:
    """A class as TRL's `environment_factory` takes it, unchanged.

    It is made without arguments. `reset(**row)` may return a text, which is put behind the last message of the row's
    prompt. Every other public method is a tool. The first message without a call ends the episode; its reward is that
    of `get_reward()`, or the attribute `reward`, if there is either.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()
        self._tools = {
            name: method
            for name, method in inspect.getmembers(self._env, inspect.ismethod)
            if not name.startswith("_") and name not in ("reset", "get_reward")
        }
        if not hasattr(self._env, "reset"):
            raise EnvError(f"{type(self._env).__name__} has no `reset`, which an environment needs")
        for name, method in self._tools.items():
            if inspect.iscoroutinefunction(method):
                raise EnvError(f"the tool `{name}` of {type(self._env).__name__} is async; make it an ordinary method")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What a chat template says of the tools: from type hints and Google-style docstrings, as TRL does."""
        from transformers.utils import get_json_schema

        return [get_json_schema(method) for method in self._tools.values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        told = self._env.reset(**row)
        prompt = row.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if told is not None:
            if not isinstance(told, str):
                raise BadReply(f"{type(self._env).__name__}.reset returned a {type(told).__name__}, not a text or None")
            messages[-1]["content"] = f"{messages[-1]['content']}{told}"
        return messages

    def step(self, message: Message) -> Step:
        calls = find_calls(message["content"], tuple(self._tools))
        if not calls:
            return Step(reward=self._reward(), done=True)
        answers = [answer_call(call, self._tools) for call in calls]
        failed = sum(not well for _, well in answers)
        return Step(
            messages=[said for said, _ in answers],
            counts={"tool_calls": float(len(calls)), "tool_failures": float(failed)},
        )

    def final_reward(self) -> float | None:
        """What an episode that is cut off by a limit is worth."""
        return self._reward()

    def view(self) -> Mapping[str, Any]:
        """The attributes that reward functions see."""
        return vars(self._env)

    def _reward(self) -> float | None:
        if hasattr(self._env, "get_reward"):
            return self._env.get_reward()
        return getattr(self._env, "reward", None)
