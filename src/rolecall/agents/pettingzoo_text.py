"""PettingZoo's games of turns (AEC) as text: `pettingzoo:classic/tictactoe-v3`, with what `make` takes after a colon.

All players are the policy, each with a conversation of its own. Actions are numbers, of which the action mask says the legal ones.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rolecall.agents.gym_text import NUMBERS, as_number, plain_ansi, plain_numbers, sections
from rolecall.tasks.env import EnvError, Message, Move

_ROOM = 560
"""Characters of the documentation that go into the prompt, by whole paragraphs."""


class PettingZooText:
    """A game whose actions are numbers. An answer that is no legal one is told what is wanted, and counted, without a step.

    The first message says what the module's documentation says, unless the row has a `prompt`. Observations: the `ansi`
    rendering where there is one, two planes as a board (X: the player's own, O: another's), up to 32 numbers as they are.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._env = _made(name, options)
        self._ansi = getattr(self._env.unwrapped, "render_mode", None) == "ansi"
        self._paragraphs = _documented(self._env.unwrapped)
        for player in self.players:
            if not hasattr(self._env.action_space(player), "n"):
                raise EnvError(
                    f"pettingzoo:{name} takes actions of {self._env.action_space(player)}; only Discrete ones can be written"
                )
        self._env.reset(seed=0)
        self._read(self._env.agent_selection)  # an observation that is no text is said now

    @property
    def players(self) -> tuple[str, ...]:
        """As the game names them."""
        return tuple(self._env.possible_agents)

    def reset(self, row: Mapping[str, Any], seed: int) -> Move:
        self._env.reset(seed=seed % 2**31, options=row.get("options"))
        told = str(row.get("prompt") or "\n\n".join(self._paragraphs))
        self._untold = {player: f"{told}\n\nYou are {player}." for player in self.players}
        return self._turn({})

    def step(self, message: Message) -> Move:
        env, speaker = self._env, self._env.agent_selection
        action = as_number(message["content"])
        if action is None or action not in self._legal(speaker):
            return Move(speaker=speaker, messages={speaker: self._wanted(speaker)}, counts={"bad_actions": 1.0})
        env.step(action)
        rewards = {player: float(reward) for player, reward in env.rewards.items()}
        ends, cuts = env.terminations.copy(), env.truncations.copy()
        while env.agents and (ends[env.agent_selection] or cuts[env.agent_selection]):
            env.step(None)  # takes a player out whose game is over
        if not env.agents:
            return Move(
                speaker=speaker, rewards=rewards, done=True, truncated=any(cuts.values()) and not any(ends.values())
            )
        return self._turn(rewards)

    def _turn(self, rewards: Mapping[str, float]) -> Move:
        """The next player reads what it sees; before its first turn also what the game is."""
        player = self._env.agent_selection
        read = [self._untold.pop(player, ""), self._read(player)]
        return Move(speaker=player, messages={player: "\n\n".join(filter(None, read))}, rewards=rewards)

    def _legal(self, player: str) -> list[int]:
        seen, space = self._env.observe(player), self._env.action_space(player)
        mask = seen.get("action_mask") if isinstance(seen, dict) else self._env.infos[player].get("action_mask")
        return [i for i in range(int(space.n)) if mask is None or mask[i]]

    def _wanted(self, player: str) -> str:
        return f"Answer with one of these numbers, and nothing else: {', '.join(map(str, self._legal(player)))}."

    def _read(self, player: str) -> str:
        seen = self._env.observe(player)
        seen = seen["observation"] if isinstance(seen, dict) else seen
        shape: tuple[int, ...] = getattr(seen, "shape", ())
        if self._ansi:
            text = plain_ansi(self._env.render())
        elif len(shape) == 3 and shape[2] == 2:
            board = _board(seen, numbered=shape[0] * shape[1] == int(self._env.action_space(player).n))
            text = f"{board}\n\nX is yours."
        elif len(shape) <= 1 and sum(shape) <= NUMBERS:
            text = repr(plain_numbers(seen))
        else:
            raise EnvError(
                f"{self._env} shows arrays of shape {list(shape)}, which are not text; wrap it in a game of your own"
            )
        return f"{text}\n\n{self._wanted(player)}"


def _board(planes: Any, *, numbered: bool) -> str:
    """Two planes of zeros and ones; where every square has an action, an empty one shows its number."""
    rows, columns, _ = planes.shape
    width = len(str(rows * columns - 1)) if numbered else 1

    def square(row: int, column: int) -> str:
        own, other = planes[row, column]
        empty = str(row * columns + column) if numbered else "."
        return ("X" if own else "O" if other else empty).rjust(width)

    return "\n".join(" ".join(square(row, column) for column in range(columns)) for row in range(rows))


def _documented(env: Any) -> list[str]:
    """What the documentation of a game says before its first section, without its title and table."""
    doc = sections(sys.modules[type(env).__module__].__doc__ or "").get("", "")
    kept: list[str] = []
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith(("#", "|", "This environment is part")) or not paragraph.strip():
            continue
        if sum(map(len, kept)) + len(paragraph) <= _ROOM:
            kept.append(paragraph)
    return kept


def _made(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import pettingzoo
    except ImportError as error:
        raise EnvError("environments named pettingzoo:… need pettingzoo: pip install 'rolecall[marl]'") from error
    try:
        env = pettingzoo.make("aec", name, **options)
        if "render_mode" in options or "ansi" not in env.metadata.get("render_modes", ()):
            return env
        return pettingzoo.make("aec", name, render_mode="ansi", **options)
    except Exception as error:  # its registry's errors, missing packages, options that it does not have
        raise EnvError(f"pettingzoo does not make {name!r}: {' '.join(str(error).split())}") from error
