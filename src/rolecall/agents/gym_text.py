"""Gymnasium environments as text: what a model reads of one, and which words are its actions.

Gymnasium documents an environment in its class's docstring, under headings such as `## Action Space` with a line
`- 0: Move left` for each action. What is not documented so is described by its spaces alone.
"""

import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from rolecall.tasks.env import EnvError, Message, Said, Step, at_own_limit

_ROOM = 560
"""Characters of the docstring that go into the prompt, by whole sections; a small model has little context."""
NUMBERS = 32
"""The most numbers of a Box that are written out."""
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymTextEnv:
    """A Gymnasium environment whose actions can be written and whose observations can be read.

    The first message says what the docstring says of it, its actions and how to answer, unless the row has a `prompt`.
    Observations: the `ansi` rendering where there is one, else text as it is and numbers by their documented names.
    Actions of a `Discrete` space: a number or a documented name. Another answer is told what is missing, and is counted,
    without a step of the environment.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._env = _made(name, options)
        from gymnasium import spaces

        action, seen = self._env.action_space, self._env.observation_space
        if not isinstance(action, spaces.Discrete | spaces.Text):
            raise EnvError(f"gym:{name} takes actions of {action}; only Discrete and Text ones can be written")
        self._ansi = self._env.render_mode == "ansi"
        if isinstance(seen, spaces.Box) and not self._ansi and (len(seen.shape) > 1 or sum(seen.shape) > NUMBERS):
            raise EnvError(
                f"gym:{name} shows arrays of shape {list(seen.shape)}, which are not text (up to {NUMBERS} numbers are "
                "written out); wrap it in an environment of your own"
            )
        self._parts = sections(type(self._env.unwrapped).__doc__ or "")
        self._discrete, self._steps = isinstance(action, spaces.Discrete), 0
        self._first, self._count = int(getattr(action, "start", 0)), int(getattr(action, "n", 0))
        named = numbered(self._parts.get("action space", ""))
        self._actions = named if sorted(named) == self._all_actions() else {}
        names = numbered(self._parts.get("observation space", ""), table=True)
        boxed = isinstance(seen, spaces.Box) and sorted(names) == list(range(sum(seen.shape)))
        self._names = [names[i] for i in sorted(names)] if boxed else []

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        self._steps = 0
        observation, _ = self._env.reset(seed=seed % 2**31, options=row.get("options"))
        first, asked = self._text(observation), row.get("prompt")
        return f"{self.prompt(first)}\n\n{first}" if asked is None else after_prompt(asked, first)

    def step(self, message: Message) -> Step:
        action = self._action(message["content"])
        if action is None:
            return Step(messages=f"answer with {self._wanted()}", counts={"bad_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._steps += 1
        if terminated and not truncated and at_own_limit(self._env, self._steps):
            truncated = True
        return Step(
            messages=self._text(observation),
            reward=float(reward),
            done=bool(terminated or truncated),
            truncated=bool(truncated),
        )

    def prompt(self, first: str) -> str:
        """What stands before the first observation: the docstring's opening and rules as far as there is room, actions."""
        parts = self._parts
        opening = parts.get("") or parts.get("description", "").partition("\n\n")[0]
        kept, room = [opening], _ROOM - len(opening)
        wanted = [] if self._ansi or self._names else ["observation space"]
        for title in [*wanted, "rewards", "reward", "episode end", *(["description"] if parts.get("") else [])]:
            text = parts.get(title, "")
            if text and len(text) <= room:
                kept.append(text if title == "description" else f"{title.capitalize()}: {text}")
                room -= len(text)
        if self._ansi and re.search(r"\[.\]", first):
            kept.append("Brackets mark what the environment colours.")
        if self._actions:
            kept.append("Actions: " + ", ".join(f"{i} {self._actions[i]}" for i in sorted(self._actions)) + ".")
        return "\n\n".join([*filter(None, kept), f"Answer with {self._wanted()}, and nothing else."])

    def _all_actions(self) -> list[int]:
        return list(range(self._first, self._first + self._count))

    def _wanted(self) -> str:
        if not self._discrete:
            space = self._env.action_space
            return (
                f"a text of {space.min_length} to {space.max_length} of the characters {''.join(space.character_list)}"
            )
        number = f"a number from {self._first} to {self._first + self._count - 1}"
        short = [found[0] for found in (short_names(self._actions)[i] for i in sorted(self._actions)) if found]
        return f"{number}, or {', '.join(short)}" if short else number

    def _action(self, said: str) -> Any:
        text = said.strip()
        if not self._discrete:
            return text if self._env.action_space.contains(text) else None
        if (number := as_number(text)) is not None:
            return number if number in self._all_actions() else None
        words, known = " ".join(_words(text)), short_names(self._actions)
        found = [i for i, phrase in self._actions.items() if words in (" ".join(_words(phrase)), *known[i])]
        return found[0] if len(found) == 1 else None

    def _text(self, observation: Any) -> str:
        if self._ansi:
            return plain_ansi(self._env.render())
        if isinstance(observation, str):
            return observation
        if self._names:
            return ", ".join(f"{name} {x:.4g}" for name, x in zip(self._names, observation.tolist(), strict=True))
        return repr(plain_numbers(observation))


def after_prompt(asked: Said, first: str) -> Said:
    """A row's prompt, and after it the first observation."""
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    if before and before[-1]["role"] == "user":
        return [*before[:-1], {**before[-1], "content": f"{before[-1]['content']}\n{first}"}]
    return [*before, {"role": "user", "content": first}]


def as_number(said: str) -> int | None:
    """The number that an answer consists of, perhaps in quotes or with a stop."""
    plain = said.strip().strip(".\"'`* ")
    return int(plain) if plain.isascii() and plain.isdigit() and len(plain) < 10 else None


def sections(doc: str) -> dict[str, str]:
    """The parts of a docstring by heading in lower case, the opening by "": without links, tags and code."""
    text = re.sub(r"```.*?```", "", inspect.cleandoc(doc), flags=re.DOTALL)
    text = re.sub(r"\[([^\]\n]*)\]\(http[^)]*\)", r"\1", re.sub(r"\[?<a [^>]*>(\d+</a>\])?|</a>", "", text))
    found = re.split(r"^\s*##+\s*(.+?)\s*$", text.replace("`", "").replace("**", ""), flags=re.MULTILINE)
    titles = ["", *(title.lower() for title in found[1::2])]
    return {title: _tidy(body) for title, body in zip(titles, found[::2], strict=True)}


def _tidy(body: str) -> str:
    """Without indentation, and lines that are only broken for the page joined."""
    lines = [" ".join(line.split()) for line in body.strip().splitlines()]
    text = "\n".join(lines)
    return re.sub(r"(?<=[^\n])\n(?=[^\n|+*\-\d])", " ", text)


def numbered(text: str, *, table: bool = False) -> dict[int, str]:
    """What stands behind the numbers of a list (`- 0: Move left`) or in the second column of a table (`| 0 | Angle |`)."""
    rows = re.findall(r"^\|\s*(\d+)\s*\|\s*([^|\n]+?)\s*\|", text, flags=re.MULTILINE)
    items = [] if table else re.findall(r"^[-*]\s*(\d+)\s*[:=]\s*(.+?)\s*$", text, flags=re.MULTILINE)
    return {int(number): name.rstrip(".") for number, name in items or rows}


def short_names(actions: Mapping[int, str]) -> dict[int, list[str]]:
    """The words that only one action's description has: together, without what is in brackets, then one by one."""
    found: dict[int, list[str]] = {}
    for i, phrase in actions.items():
        others = {word for j, other in actions.items() if j != i for word in _words(other)}
        own = [word for word in _words(phrase) if word not in others and not word.isdigit()]
        outside = [word for word in _words(re.sub(r"\(.*?\)", "", phrase)) if word in own]
        found[i] = list(dict.fromkeys([*filter(None, [" ".join(outside)]), *own]))
    return found


def plain_ansi(text: str) -> str:
    """A rendering without escape codes: what they colour in brackets, with the colour's name where there are several."""
    pattern = re.compile(r"\x1b\[([34])([0-7])[0-9;]*m(.*?)\x1b\[0m", flags=re.DOTALL)
    several = len({match[2] for match in pattern.finditer(text)}) > 1

    def mark(match: re.Match[str]) -> str:
        return f"[{match[3]}]({_COLOURS[int(match[2])]})" if several else f"[{match[3]}]"

    return re.sub(r"\x1b\[[0-9;]*m", "", pattern.sub(mark, text)).strip("\n")


def _made(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator
    except ImportError as error:
        raise EnvError("environments named gym:… need gymnasium: pip install 'rolecall[agents]'") from error
    module, _, id_ = name.rpartition(":")
    try:
        if module:  # it registers the environment
            import_module(module)
        if "render_mode" not in options:
            entry = gymnasium.spec(id_).entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            modes = getattr(creator, "metadata", {}).get("render_modes", ())
            options = {**options, "render_mode": "ansi"} if "ansi" in modes else options
        return gymnasium.make(id_, **options)
    except ImportError as error:
        raise EnvError(f"gym:{name} cannot be made: {error}; install what it needs") from error
    except gymnasium.error.Error as error:
        near = get_close_matches(id_, list(gymnasium.registry), n=1)
        hint = f"; did you mean 'gym:{near[0]}'?" if near else ""
        raise EnvError(f"gymnasium does not make {name!r}: {' '.join(str(error).split())}{hint}") from error


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("'", ""))


def plain_numbers(observation: Any) -> Any:
    """Plain numbers, floats to four digits."""
    if isinstance(observation, tuple | list):
        return type(observation)(plain_numbers(x) for x in observation)
    if isinstance(observation, dict):
        return {name: plain_numbers(x) for name, x in observation.items()}
    if hasattr(observation, "tolist"):
        return plain_numbers(observation.tolist())
    return float(f"{observation:.4g}") if isinstance(observation, float) else observation
