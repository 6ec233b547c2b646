"""Environments of other kinds as `Env`: Gymnasium's, TRL's `environment_factory` classes, tasks of one answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
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


class GymEnv:
    """A Gymnasium environment whose actions can be written and whose observations can be read.

    Observations: text as it is, anything else as Python writes it; `ansi` rendering in its place if the environment has
    it and is made with `render_mode="ansi"`. Actions: text as it is; of a `Discrete` space, its number. Another answer
    is told what is missing, and is counted, without a step of the environment.
    """

    def __init__(self, name: str, **options: Any) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise EnvError("environments named gym:… need gymnasium: pip install 'rolecall[agents]'") from error
        try:
            self._env: Any = gymnasium.make(name, **options)
        except gymnasium.error.Error as error:
            near = get_close_matches(name, list(gymnasium.registry), n=1)
            hint = f"; did you mean 'gym:{near[0]}'?" if near else ""
            raise EnvError(f"gymnasium does not make {name!r}: {' '.join(str(error).split())}{hint}") from error
        spaces = gymnasium.spaces
        action: Any = self._env.action_space
        if not isinstance(action, spaces.Discrete | spaces.Text):
            raise EnvError(f"gym:{name} takes actions of {action}; only Discrete and Text ones can be written")
        if isinstance(self._env.observation_space, spaces.Box) and self._env.render_mode != "ansi":
            raise EnvError(
                f"gym:{name} shows arrays of numbers, which are not text; wrap it in an environment of your own"
            )
        self._discrete = isinstance(action, spaces.Discrete)
        self._first, self._count = int(getattr(action, "start", 0)), int(getattr(action, "n", 0))

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        observation, _ = self._env.reset(seed=seed % 2**31, options=row.get("options"))
        asked = row.get("prompt")
        before = [] if asked is None else [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if before and before[-1]["role"] == "user":
            return [*before[:-1], {**before[-1], "content": f"{before[-1]['content']}\n{self._text(observation)}"}]
        return [*before, {"role": "user", "content": self._text(observation)}]

    def step(self, message: Message) -> Step:
        action: Any = message["content"].strip()
        if self._discrete:
            known = action.isascii() and action.isdigit() and len(action) < 10
            if not known or not self._first <= int(action) < self._first + self._count:
                wanted = f"a number from {self._first} to {self._first + self._count - 1}"
                return Step(messages=f"answer with {wanted}", counts={"bad_actions": 1.0})
            action = int(action)
        elif not self._env.action_space.contains(action):
            return Step(messages=f"that is no action of {self._env.action_space}", counts={"bad_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(
            messages=self._text(observation), reward=float(reward), done=terminated or truncated, truncated=truncated
        )

    def _text(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            observation = self._env.render()
        if isinstance(observation, str):
            return observation
        if hasattr(observation, "item") and getattr(observation, "ndim", 1) == 0:
            observation = observation.item()
        if isinstance(observation, tuple):
            observation = tuple(x.item() if hasattr(x, "item") else x for x in observation)
        return repr(observation)


class ToolsEnv:
    """Functions that the policy may call, as TRL's `tools`: the first message without a call ends the episode.

    The row's prompt begins it. What it is worth is for reward functions to say, which see the whole conversation.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self._tools = dict(tools)
        for name, tool in self._tools.items():
            if inspect.iscoroutinefunction(tool):
                raise EnvError(f"the tool `{name}` is async; make it an ordinary function")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What a chat template says of the tools: from type hints and Google-style docstrings, as TRL does."""
        from transformers.utils import get_json_schema

        return [get_json_schema(tool) for tool in self._tools.values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        prompt = row.get("prompt", "")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

    def step(self, message: Message) -> Step:
        calls = find_calls(message["content"], tuple(self._tools))
        if not calls:
            return Step(reward=self.final_reward(), done=True)
        answers = [answer_call(call, self._tools) for call in calls]
        failed = sum(not well for _, well in answers)
        return Step(
            messages=[said for said, _ in answers],
            counts={"tool_calls": float(len(calls)), "tool_failures": float(failed)},
        )

    def final_reward(self) -> float | None:
        """What an episode is worth when it ends or a limit cuts it off: nothing of its own."""
        return None


class TRLEnv(ToolsEnv):
    """A class as TRL's `environment_factory` takes it, unchanged.

    It is made without arguments. `reset(**row)` may return a text, which is put behind the last message of the row's
    prompt. Every other public method is a tool. The first message without a call ends the episode; its reward is that
    of `get_reward()`, or the attribute `reward`, if there is either.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()
        if not hasattr(self._env, "reset"):
            raise EnvError(f"{type(self._env).__name__} has no `reset`, which an environment needs")
        methods = inspect.getmembers(self._env, inspect.ismethod)
        super().__init__({n: m for n, m in methods if not n.startswith("_") and n not in ("reset", "get_reward")})

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        told = self._env.reset(**row)
        messages = [dict(message) for message in super().reset(row, seed)]
        if told is not None:
            if not isinstance(told, str):
                raise BadReply(f"reset returned a {type(told).__name__}, not a text or None")
            messages[-1]["content"] = f"{messages[-1]['content']}{told}"
        return messages

    def final_reward(self) -> float | None:
        """What the environment says the episode is worth."""
        if hasattr(self._env, "get_reward"):
            return self._env.get_reward()
        return getattr(self._env, "reward", None)

    def view(self) -> Mapping[str, Any]:
        """The attributes that reward functions see."""
        return vars(self._env)
