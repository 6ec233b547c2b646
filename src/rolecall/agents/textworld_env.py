"""Games that TextWorld makes, without a network: `textworld:rooms=2,objects=4,quest=2`, `textworld:coin=4,brief=true`.

A row's `seed` is the game: its map, its objects and its quest. A row with a `game`, the path of a file that TextWorld made,
plays that. Games are compiled once and kept in the directory for temporary files.
"""

import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from rolecall.tasks.env import EnvError, Message, Step

_PROMPT = re.compile(r"\s*>\s*(-= [^\n]*)?$")
"""Where the game waits for a command, and its status line."""


_FILES = frozenset({"save", "restore", "script", "transcript", "unscript", "record", "recording", "replay"})
"""Words to the interpreter, which would write or read a file of the name that the policy says next."""


class TextWorldEnv:
    """The policy's first line is a command; the game answers. The reward is what a command adds to the score, of 1 in all."""

    def __init__(
        self,
        *,
        rooms: int = 2,
        objects: int = 4,
        quest: int = 2,
        coin: int | None = None,
        hints: bool = False,
        brief: bool = False,
    ) -> None:
        """So many rooms and objects, a quest of so many commands, or TextWorld's coin collector at this level. `hints` lists what
        can be done; `brief` is the room and that list, without the objective and without commands that only look."""
        self._size = {"nb_rooms": rooms, "nb_objects": objects, "quest_length": quest}
        self._coin, self._hints, self._brief = coin, hints, brief
        self._textworld = _package()

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        textworld, given = self._textworld, row.get("game")
        path = Path(given) if given is not None else self._made(int(row.get("seed", seed)))
        if not path.is_file():
            raise EnvError(f"there is no game {path}")
        known = ("admissible_commands", "objective", "description", "won", "lost", "max_score")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter knows no game of TextWorld, which keeps the score itself
            self._game = textworld.start(str(path), textworld.EnvInfos(**dict.fromkeys(known, True)))
            state = self._game.reset()
        self.score, self.most, self.won = 0.0, float(state.max_score or 1), False
        if self._brief:
            return self._in_short(state)
        return "\n\n".join([state.objective.strip(), state.description.strip(), *self._can_be_done(state)])

    def step(self, message: Message) -> Step:
        line = next(iter(message["content"].strip().splitlines()), "")
        command = " ".join("".join(c if c.isascii() and c.isprintable() else " " for c in line).split())
        if not command or _FILES & set(re.findall(r"[a-z]+", command.lower())):
            return Step(messages="Say what to do.", counts={"no_commands": 1.0})
        state, score, done = self._game.step(command)
        self.won, gained, self.score = bool(state.won), (score - self.score) / self.most, float(score)
        said = _PROMPT.sub("", state.feedback.strip("\n")).strip() or "Nothing happens."
        if done:
            return Step(messages=said, reward=gained, done=True, counts={"won": float(self.won)})
        told = self._in_short(state) if self._brief else "\n\n".join([said, *self._can_be_done(state)])
        return Step(messages=told, reward=gained)

    def _in_short(self, state: Any) -> str:
        """The room and what changes something."""
        commands = [c for c in state.admissible_commands if c.split()[0] not in ("look", "inventory", "examine")]
        return f"{state.description.strip().splitlines()[0].strip('-= ')}: {', '.join(commands)}"

    def _can_be_done(self, state: Any) -> list[str]:
        return [f"You can: {', '.join(state.admissible_commands)}."] if self._hints else []

    def _made(self, seed: int) -> Path:
        """The game of a seed, made and compiled unless it has been."""
        textworld = self._textworld
        size = sorted(self._size.items()) if self._coin is None else f"coin {self._coin}"
        name = sha256(f"{textworld.__version__}/{size}/{seed}".encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"rolecall-textworld-{os.getuid()}"
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            raise EnvError(f"{place}, where games are kept, belongs to another user: set TMPDIR")
        if not (made := place / f"{name}.z8").is_file():
            options = textworld.GameOptions()
            options.seeds = Random(seed).randrange(2**31)
            for option, value in self._size.items() if self._coin is None else ():
                setattr(options, option, value)
            with tempfile.TemporaryDirectory(dir=place) as aside, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as above: the coin collector plays its walkthrough
                options.path = str(Path(aside) / f"{name}.z8")
                textworld.generator.compile_game(self._game_of(options), options)
                for ending in (".json", ".z8"):  # the game itself last: who finds it finds all
                    (Path(aside) / f"{name}{ending}").replace(made.with_suffix(ending))
        return made

    def _game_of(self, options: Any) -> Any:
        if self._coin is None:
            return self._textworld.generator.make_game(options)
        from textworld.challenges.tw_coin_collector import coin_collector

        return coin_collector.make({"level": self._coin}, options)


def textworld_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a name, if they are all known and make sense."""
    known: dict[str, type] = {"rooms": int, "objects": int, "quest": int, "coin": int, "hints": bool, "brief": bool}
    for option, value in given.items():
        if option not in known:
            raise EnvError(f"environment {name!r}: there is no option {option!r}, but {', '.join(known)}")
        if type(value) is not known[option] or (type(value) is int and value < 1):
            wanted = "true or false" if known[option] is bool else "a whole number of at least 1"
            raise EnvError(f"environment {name!r}: {option} must be {wanted}, got {value!r}")
    if "coin" in given and given.keys() & {"rooms", "objects", "quest"}:
        raise EnvError(
            f"environment {name!r}: the level of coin says how large a game is; leave out rooms, objects and quest"
        )
    if given.get("coin", 1) > 300:
        raise EnvError(f"environment {name!r}: TextWorld's coin collector has levels 1 to 300, got {given['coin']}")
    return dict(given)


def _package() -> Any:
    try:
        import textworld
        import textworld.generator
    except ImportError as error:
        raise EnvError(
            "environments named textworld:… need the package textworld: pip install 'rolecall[textworld]'"
        ) from error
    return textworld
